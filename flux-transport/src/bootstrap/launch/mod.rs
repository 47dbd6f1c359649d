//! Starts the ranks of a program as processes of this host.
//!
//! Invariant: when [`Launcher::run`] returns, no process that it started runs and its directory is
//! gone. If the launcher is killed, the kernel kills the ranks, and the next one removes the
//! directory.
//!
//! Each rank leads a process group: what it starts ends with it, and a terminal's signals reach it
//! once.

mod apart;
mod directory;
mod signals;

pub use self::apart::one_host_each;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use self::apart::Apart;
use self::directory::Directory;
pub use self::signals::{Signals, hear_of_children};
use crate::bootstrap::environment::runtime_directory;
use crate::bootstrap::names::{
    FLUX_LAUNCHER, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_SECRET, FLUX_WORLD_SIZE,
};

/// How often the ranks and the signals are looked at: ends are seen this late at most.
const LOOK: Duration = Duration::from_millis(10);
/// Longest time until ranks that were told to end are killed.
const MAX_GRACE: Duration = Duration::from_hours(24);

/// A program to be started once per rank.
///
/// ```
/// use flux_transport::WorldSize;
/// use flux_transport::launch::{Launcher, exit_code};
/// let launcher = Launcher::new(WorldSize::new(2).unwrap(), "sh").args(["-c", "exit $FLUX_RANK"]);
/// assert_eq!(exit_code(launcher.run()?), 1);
/// # Ok::<(), flux_transport::launch::LaunchError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Launcher {
    ranks: WorldSize,
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    hosts: Option<u32>,
    sharing: bool,
    grace: Duration,
    on_failure: fn(&Failed) -> Others,
}

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

/// Why the ranks did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum LaunchError {
    /// There are not as many ranks as hosts.
    #[error(
        "{ranks} ranks cannot be kept apart as those of {hosts} hosts: give 1 to {ranks} hosts"
    )]
    Hosts {
        /// The hosts that were asked for.
        hosts: u32,
        ranks: WorldSize,
    },
    /// There is no room for the rendezvous.
    #[error("cannot make a private directory in {}: {source}", .within.display())]
    Directory { within: PathBuf, source: io::Error },
    /// The program does not start.
    #[error("cannot start {program:?} as rank {rank}: {source}")]
    Start { program: OsString, rank: Rank, source: io::Error },
    /// The launcher cannot look after its ranks.
    #[error("{step} failed: {source}")]
    Io { step: &'static str, source: io::Error },
}

impl Launcher {
    /// `ranks` processes of `program`.
    pub fn new(ranks: WorldSize, program: impl Into<OsString>) -> Self {
        Self {
            ranks,
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            hosts: None,
            sharing: false,
            grace: Duration::from_secs(5),
            on_failure: |_| Others::End,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to the environment, which is otherwise this process's.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Runs the ranks as if on `hosts` hosts: each group of neighbours has its own `FLUX_HOST_ID`
    /// and `NCCL_HOSTID`, and all meet over loopback TCP. For tests.
    #[must_use]
    pub fn apart(mut self, hosts: u32) -> Self {
        self.hosts = Some(hosts);
        self
    }

    /// Lets NCCL run ranks that share a device: each counts as the only one of its host
    /// ([`one_host_each`]). For [`Options::shared_device`](crate::Options::shared_device).
    #[must_use]
    pub fn sharing_devices(mut self) -> Self {
        self.sharing = true;
        self
    }

    /// How long ranks may take to end before they are killed: 5 s by default, a day at most.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace.min(MAX_GRACE);
        self
    }

    /// Decides for each failed rank what becomes of the others. By default they end.
    #[must_use]
    pub fn on_failure(mut self, say: fn(&Failed) -> Others) -> Self {
        self.on_failure = say;
        self
    }

    /// Starts the ranks and waits for all: the status of the first that failed, or success.
    ///
    /// When one fails, the others get SIGTERM (unless [`on_failure`](Self::on_failure) says
    /// otherwise), and SIGKILL after the grace time. SIGINT, SIGTERM, SIGQUIT and SIGHUP of this
    /// process go to the ranks; a second one kills. An ignored SIGHUP, as under `nohup`, stays
    /// ignored. The ranks share stdout and stderr; their stdin is empty.
    ///
    /// # Errors
    /// See [`LaunchError`]; ranks that had started are killed.
    pub fn run(&self) -> Result<ExitStatus, LaunchError> {
        if let Some(hosts) = self.hosts.filter(|hosts| !(1..=self.ranks.get()).contains(hosts)) {
            return Err(LaunchError::Hosts { hosts, ranks: self.ranks });
        }
        let signals = Signals::catch()
            .map_err(|source| LaunchError::Io { step: "catching signals", source })?;
        let directory = Directory::make(&runtime_directory(&|name| std::env::var_os(name)))?;
        let apart = |hosts| Apart::make(hosts, self.ranks, &directory.path);
        let apart = self
            .hosts
            .map(apart)
            .transpose()
            .map_err(|source| LaunchError::Io { step: "keeping the ranks apart", source })?;
        let mut group = ProcessGroup {
            ranks: Vec::new(),
            grace: self.grace,
            on_failure: self.on_failure,
            stopping: None,
            first_failure: None,
        };
        for rank in self.ranks.ranks() {
            let start = |source| LaunchError::Start { program: self.program.clone(), rank, source };
            let child =
                self.command(rank, &directory.path, apart.as_ref()).spawn().map_err(start)?;
            let pid = Pid::from_child(&child);
            group.ranks.push(Running { child, pid, rank });
        }
        while !group.ranks.is_empty() {
            if let Some(signal) = signals.take() {
                group.stop(signal);
            }
            group
                .reap()
                .map_err(|source| LaunchError::Io { step: "waiting for the ranks", source })?;
            std::thread::sleep(LOOK);
        }
        Ok(group.first_failure.unwrap_or_default())
    }

    fn command(&self, rank: Rank, rendezvous: &Path, apart: Option<&Apart>) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env(FLUX_RANK, rank.to_string())
            .env(FLUX_WORLD_SIZE, self.ranks.to_string())
            .env(FLUX_LOCAL_RANK, rank.to_string())
            .env(FLUX_RENDEZVOUS, rendezvous)
            // Of whoever started the launcher: the family above is the one that counts.
            .env_remove(FLUX_LAUNCHER)
            .stdin(Stdio::null())
            .process_group(0);
        if let Some(apart) = apart {
            // Two secrets would be refused.
            command.env_remove(FLUX_SECRET).envs(apart.env(rank));
        }
        if self.sharing {
            command.envs(one_host_each(rank));
        }
        let launcher = rustix::process::getpid();
        let die_with_parent = move || {
            // Sent when the thread that started the rank ends: `run` stays on one thread.
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The launcher may have died before the line above.
            if rustix::process::getppid() == Some(launcher) {
                Ok(())
            } else {
                Err(rustix::io::Errno::SRCH.into())
            }
        };
        // SAFETY: between fork and exec the closure makes two async-signal-safe system calls; it
        // allocates nothing, takes no lock and touches only a copied process id and its returned
        // error.
        unsafe { command.pre_exec(die_with_parent) };
        command
    }
}

/// The exit code of a status: its own, or 128 + the signal, as a shell says it.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

struct Running {
    child: Child,
    pid: Pid,
    rank: Rank,
}

/// The ranks that run; dropped, it kills them.
struct ProcessGroup {
    ranks: Vec<Running>,
    grace: Duration,
    on_failure: fn(&Failed) -> Others,
    /// When the ranks are killed, once they were told to end.
    stopping: Option<Instant>,
    first_failure: Option<ExitStatus>,
}

impl ProcessGroup {
    /// Tells all ranks to end; told twice, kills them.
    fn stop(&mut self, signal: Signal) {
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
    fn reap(&mut self) -> io::Result<()> {
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
            if failed {
                self.first_failure.get_or_insert(status);
                let failed = Failed { rank, status, others: self.ranks.len() };
                if self.stopping.is_none() && (self.on_failure)(&failed) == Others::End {
                    self.stop(Signal::TERM);
                }
            }
        }
        if self.stopping.is_some_and(|end| end <= Instant::now()) {
            self.signal_all(Signal::KILL);
        }
        Ok(())
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for running in &mut self.ranks {
            if let Err(error) = running.child.wait() {
                tracing::warn!(rank = %running.rank, %error, "cannot wait for a rank that was \
                                                              killed");
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
