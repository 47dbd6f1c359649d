//! The ranks of a launch that run, and the first cause where some fail.
//!
//! Invariant: of failures within [`TOGETHER`] of the first, one is told, the likeliest cause: ranks
//! that wait for another fail with it, and may end before it.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use flux_core::Rank;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

/// A rank that has failed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Failed {
    /// The rank.
    pub rank: Rank,
    /// How it ended.
    pub status: ExitStatus,
    /// How many others still run.
    pub others: usize,
}

/// What becomes of the others when a rank has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// They are told to end.
    End,
    /// They go on.
    GoOn,
}

/// How long after the first failure others count as of the same cause.
const TOGETHER: Duration = Duration::from_millis(500);
/// The status of a Rust program that panics.
const PANICKED: i32 = 101;

pub(super) struct Running {
    pub(super) child: Child,
    pub(super) pid: Pid,
    pub(super) rank: Rank,
}

/// The ranks that run; dropped, it kills them.
pub(super) struct ProcessGroup {
    pub(super) ranks: Vec<Running>,
    grace: Duration,
    on_failure: fn(&Failed) -> Others,
    /// When the ranks are killed, once they were told to end.
    stopping: Option<Instant>,
    /// Failures that are not told yet, in the order of their ends, and when they are.
    untold: Vec<(Rank, ExitStatus)>,
    until: Instant,
    cause: Option<ExitStatus>,
}

impl ProcessGroup {
    pub(super) fn new(grace: Duration, on_failure: fn(&Failed) -> Others) -> Self {
        Self {
            ranks: Vec::new(),
            grace,
            on_failure,
            stopping: None,
            untold: Vec::new(),
            until: Instant::now(),
            cause: None,
        }
    }

    /// The status of the first cause; `None` where no rank failed.
    pub(super) const fn cause(&self) -> Option<ExitStatus> {
        self.cause
    }

    /// Tells all ranks to end; told twice, kills them.
    pub(super) fn stop(&mut self, signal: Signal) {
        if self.stopping.is_some() {
            self.stopping = Some(Instant::now());
        } else {
            self.stopping = Some(Instant::now() + self.grace);
            self.signal_all(signal);
        }
    }

    fn signal_all(&self, signal: Signal) {
        for running in &self.ranks {
            signal_group(running.pid, signal);
        }
    }

    /// Reaps ended ranks, and ends the others after a failure or when their time is over.
    pub(super) fn reap(&mut self) -> io::Result<()> {
        let mut at = 0;
        while let Some(running) = self.ranks.get_mut(at) {
            // Looked at, not yet reaped: nobody else can have its process or group id.
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            let Some(status) = rustix::process::waitid(WaitId::Pid(running.pid), look)? else {
                at += 1;
                continue;
            };
            let failed = status.exit_status() != Some(0);
            // What the rank has started and left behind, also where all went well.
            signal_group(running.pid, Signal::KILL);
            let status = running.child.wait()?;
            let rank = running.rank;
            self.ranks.remove(at);
            if !failed {
                continue;
            }
            if self.stopping.is_some() && self.untold.is_empty() {
                // It was told to end.
                self.cause.get_or_insert(status);
                continue;
            }
            if self.untold.is_empty() {
                self.until = Instant::now() + TOGETHER;
            }
            self.untold.push((rank, status));
        }
        if !self.untold.is_empty()
            && (self.ranks.is_empty() || self.stopping.is_some() || self.until <= Instant::now())
        {
            self.tell();
        }
        if self.stopping.is_some_and(|end| end <= Instant::now()) {
            self.signal_all(Signal::KILL);
        }
        Ok(())
    }

    /// Tells what failed, the cause first.
    fn tell(&mut self) {
        let mut failures = std::mem::take(&mut self.untold);
        failures.sort_by_key(|(_, status)| likelihood(*status));
        for (rank, status) in failures {
            self.cause.get_or_insert(status);
            if self.stopping.is_none()
                && (self.on_failure)(&Failed { rank, status, others: self.ranks.len() })
                    == Others::End
            {
                self.stop(Signal::TERM);
                return;
            }
        }
    }
}

/// Orders failures: a rank that is killed, or panics, does not do so for want of another.
fn likelihood(status: ExitStatus) -> u8 {
    match (status.signal(), status.code()) {
        (Some(_), _) => 0,
        (_, Some(PANICKED)) => 1,
        _ => 2,
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for running in &mut self.ranks {
            if let Err(error) = running.child.wait() {
                tracing::warn!(
                    rank = %running.rank,
                    %error,
                    "cannot wait for a rank that was killed",
                );
            }
        }
    }
}

/// To a group whose leader is not reaped, so that the id is still its own.
fn signal_group(leader: Pid, signal: Signal) {
    if let Err(error) = rustix::process::kill_process_group(leader, signal) {
        tracing::debug!(%error, "a group of processes is gone already");
    }
}
