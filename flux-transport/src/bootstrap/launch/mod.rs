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
mod error;
mod group;
mod output;
mod signals;

pub use self::apart::one_host_each;
pub use self::error::LaunchError;
pub use self::group::{Failed, Others};
pub use self::signals::{Signals, hear_of_children};

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use flux_core::{Rank, WorldSize};
use rustix::process::{Pid, Signal};

use self::apart::Apart;
use self::directory::Directory;
use self::group::{ProcessGroup, Running};
use self::output::{Output, Passing};
use crate::bootstrap::environment::runtime_directory;
use crate::bootstrap::names::{
    FLUX_LAUNCHER, FLUX_LOCAL_RANK, FLUX_RANK, FLUX_RENDEZVOUS, FLUX_SECRET, FLUX_WORLD_SIZE,
};

/// How often the ranks and the signals are looked at: ends are seen this late at most.
const LOOK: Duration = Duration::from_millis(5);
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
    output: Output,
    grace: Duration,
    on_failure: fn(&Failed) -> Others,
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
            output: Output::default(),
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

    /// Begins each line that a rank prints with its number, as in `[1] `.
    #[must_use]
    pub fn prefix(mut self) -> Self {
        self.output.prefix = true;
        self
    }

    /// Writes what each rank prints to `rank-R.log` in this folder, which is made; also to this
    /// process's output only with [`prefix`](Self::prefix).
    #[must_use]
    pub fn logs(mut self, folder: impl Into<PathBuf>) -> Self {
        self.output.logs = Some(folder.into());
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

    /// Starts the ranks and waits for all: the status of the first cause of a failure, or success.
    /// Ranks that fail for want of another end about when that does. So of those that fail within
    /// half a second the cause is one that a signal killed, else one that panicked (status 101),
    /// else the first to end.
    ///
    /// When one fails, the others get SIGTERM (unless [`on_failure`](Self::on_failure) says
    /// otherwise), and SIGKILL after the grace time. SIGINT, SIGTERM, SIGQUIT and SIGHUP of this
    /// process go to the ranks; a second one kills. An ignored SIGHUP, as under `nohup`, stays
    /// ignored. The ranks share stdout and stderr unless [`logs`](Self::logs) says otherwise; their
    /// stdin is empty.
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
        let passing = Passing::new();
        let mut group = ProcessGroup::new(self.grace, self.on_failure);
        for rank in self.ranks.ranks() {
            let start = |source| LaunchError::Start { program: self.program.clone(), rank, source };
            let mut command = self.command(rank, &directory.path, apart.as_ref());
            let log = self.output.redirect(rank, &mut command)?;
            let mut child = command.spawn().map_err(start)?;
            let pid = Pid::from_child(&child);
            let passed = Output::pass(&mut child, rank, log.as_ref(), &passing);
            group.ranks.push(Running { child, pid, rank });
            passed.map_err(start)?;
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
        passing.finish();
        Ok(group.cause().unwrap_or_default())
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
