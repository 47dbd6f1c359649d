//! A rank process, as seen by the process that started it.
//!
//! Invariant: it is killed and reaped on drop, unless the kernel keeps it for [`GRACE`]. Every wait
//! has a limit.

use super::interrupt::Interrupt;
use super::messages::{Reply, Request};
use super::threads;
use anyhow::{Context, bail};
use flux_core::Rank;
use flux_transport::launch::one_host_each;
use flux_transport::{FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_WORLD_SIZE};
use rustix::process::{Pid, Signal};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a process that was killed may take to go: its driver may have memory to free.
const GRACE: Duration = Duration::from_secs(20);
/// How often a process is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// How often whoever waits for a report looks whether a signal ends the run.
const LOOK_AROUND: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Process {
    pub(super) rank: u32,
    child: Child,
    orders: ChildStdin,
    reports: Receiver<String>,
    reader: Option<JoinHandle<()>>,
    interrupt: Interrupt,
}

impl Process {
    /// Starts this program with `words` as rank `rank` of `world`, which meets the others in
    /// `rendezvous` and puts files in `temporary`. `sharing`: whether ranks share devices.
    pub(super) fn start(
        rank: u32,
        world: u32,
        sharing: bool,
        rendezvous: &Path,
        temporary: &Path,
        words: &[String],
        interrupt: Interrupt,
    ) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(words)
            .envs(sharing.then(|| one_host_each(Rank::new(rank))).into_iter().flatten())
            .env(FLUX_RANK, rank.to_string())
            .env(FLUX_WORLD_SIZE, world.to_string())
            .env(FLUX_LOCAL_RANK, rank.to_string())
            .env(FLUX_RENDEZVOUS, rendezvous)
            .env("TMPDIR", temporary)
            .env("XDG_RUNTIME_DIR", temporary)
            // NVLink multicast can take a shared host's devices out of service.
            .env("NCCL_NVLS_ENABLE", "0")
            // Its connections stay a minute after their last use and would pass for leaks.
            .env("NCCL_RAS_ENABLE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("a rank process cannot be started")?;
        let (orders, out) = (
            child.stdin.take().context("no pipe to a rank")?,
            child.stdout.take().context("no pipe from a rank")?,
        );
        let (sender, reports) = channel();
        let read = move || {
            BufReader::new(out)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line).map_err(drop))
        };
        let reader = std::thread::Builder::new().name(format!("reports of rank {rank}")).spawn(
            move || {
                // Until the rank has ended, or nobody listens any more.
                let _ = read();
            },
        )?;
        Ok(Self { rank, child, orders, reports, reader: Some(reader), interrupt })
    }

    pub(super) fn request(&mut self, order: Request) -> anyhow::Result<()> {
        let line = serde_json::to_string(&order)? + "\n";
        self.orders
            .write_all(line.as_bytes())
            .with_context(|| format!("rank {} takes no orders", self.rank))
    }

    /// The next report; `None` at the limit, which is a hang.
    pub(super) fn reply(&self, limit: Instant) -> anyhow::Result<Option<Reply>> {
        loop {
            self.interrupt.check()?;
            let left = limit.saturating_duration_since(Instant::now());
            match self.reports.recv_timeout(left.min(LOOK_AROUND)) {
                Ok(line) => {
                    return Ok(Some(
                        serde_json::from_str(&line)
                            .with_context(|| format!("rank {} says {line:?}", self.rank))?,
                    ));
                }
                Err(RecvTimeoutError::Timeout) if left > LOOK_AROUND => {}
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("rank {} has ended without a report; what it wrote is above", self.rank)
                }
            }
        }
    }

    pub(super) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        rustix::process::kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("rank {} gets no signal", self.rank))
    }

    /// What each of its threads does, as the system says.
    pub(super) fn threads(&self) -> Vec<String> {
        threads::of(self.child.id())
    }

    /// Waits until it has ended by itself, until the limit; whether it has.
    pub(super) fn ended(&mut self, limit: Instant) -> anyhow::Result<bool> {
        within(limit, || {
            self.interrupt.check()?;
            Ok(self.child.try_wait()?.is_some())
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Of a process that has ended, this does nothing; a stopped one is killed all the same.
        let _ = self.child.kill();
        if !collect(&mut self.child, &mut self.reader, Instant::now() + GRACE) {
            tracing::warn!(
                rank = self.rank,
                pid = self.child.id(),
                "a rank was killed, and it or what it has started is left behind"
            );
        }
    }
}

/// Reaps what was killed and joins its reader; whether both have ended by the limit.
fn collect(child: &mut Child, reader: &mut Option<JoinHandle<()>>, limit: Instant) -> bool {
    let gone = within(limit, || Ok(!matches!(child.try_wait(), Ok(None)))).unwrap_or(false);
    // Its pipe is open for as long as anything that it has started holds it.
    let read = within(limit, || Ok(reader.as_ref().is_none_or(JoinHandle::is_finished)));
    let read = read.unwrap_or(false);
    if let Some(reader) = reader.take_if(|_| read) {
        let _ = reader.join();
    }
    gone && read
}

/// Whether `done` says so before the limit.
fn within(limit: Instant, mut done: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<bool> {
    loop {
        let done = done()?;
        if done || Instant::now() >= limit {
            return Ok(done);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::assert_soon;
    use std::io::Read;

    fn started(script: &str) -> (Child, Option<JoinHandle<()>>) {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let _ = out.read_to_end(&mut Vec::new());
        });
        (child, Some(reader))
    }

    #[test]
    fn a_pipe_that_outlives_its_process_is_not_waited_for() {
        let (mut child, mut reader) = started("exit 0");
        assert!(collect(&mut child, &mut reader, Instant::now() + GRACE) && reader.is_none());
        // What it has started holds the pipe until its own input, which this test holds, is closed.
        let (mut child, mut reader) = started("exec 3<&0; (read line <&3) & exit 0");
        let began = Instant::now();
        assert!(!collect(&mut child, &mut reader, Instant::now() + Duration::from_millis(300)));
        assert_soon(began.elapsed(), GRACE);
        assert!(reader.is_some());
        drop(child.stdin.take());
        assert!(collect(&mut child, &mut reader, Instant::now() + GRACE) && reader.is_none());
    }
}
