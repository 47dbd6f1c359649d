//! Programs with a time limit.
//!
//! Invariant: when [`run`] returns, nothing in the program's process group runs any more, unless
//! the kernel does not let it go. When this process is killed, the kernel kills the program.

use flux_transport::internal::limited;
use flux_transport::launch::Signals;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// How long a killed program may take to go: its driver may have device memory to free.
const GRACE: Duration = Duration::from_secs(20);

/// A signal that came while a program ran, and that ends this process after clean-up.
#[derive(Debug, thiserror::Error)]
#[error("ended by signal {}", .0.as_raw())]
struct Interrupted(Signal);

/// The error of a run that a signal ended.
pub(crate) fn interrupted(signal: Signal) -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, Interrupted(signal))
}

/// The signal that ended the run of `error`.
pub(crate) fn interrupted_by(error: &anyhow::Error) -> Option<Signal> {
    error.chain().find_map(|cause| {
        Some(cause.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref::<Interrupted>()?.0)
    })
}

/// Runs `command` for at most `limit`, with its output in the file `log`. `None` where it was
/// killed.
pub(crate) fn run(
    command: &mut Command,
    limit: Duration,
    log: &Path,
) -> io::Result<Option<ExitStatus>> {
    let log = File::create(log)?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
    let parent = getpid();
    let die_with_parent = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above.
        if getppid() == Some(parent) { Ok(()) } else { Err(rustix::io::Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec the closure makes two async-signal-safe system calls. It
    // allocates nothing, takes no lock, and reads only a copied process id.
    unsafe { command.pre_exec(die_with_parent) };
    let signals = Signals::catch()?;
    let mut came = None;
    let ended = limited::wait_unless(command.spawn()?, limit, GRACE, || {
        came = signals.take();
        came.is_some()
    })?;
    // A signal since the last look ends this process too.
    match came.or_else(|| signals.take()) {
        Some(signal) => Err(interrupted(signal)),
        None => Ok(ended),
    }
}

/// How a run came to no success, with the last lines of its log; `None` where it succeeded.
pub(crate) fn failure(ended: Option<ExitStatus>, limit: Duration, log: &Path) -> Option<String> {
    let how = match ended {
        Some(status) if status.success() => return None,
        Some(status) => format!("failed, {status}:"),
        None => format!("took more than {} s: see --limit", limit.as_secs_f64()),
    };
    Some(format!("{how}\n{}", last_lines(log)))
}

/// The last lines of a log, for an error.
pub(crate) fn last_lines(log: &Path) -> String {
    tail(log, 20).join("\n")
}

/// The last `lines` lines of a log; none where it cannot be read.
pub(crate) fn tail(log: &Path, lines: usize) -> Vec<String> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].iter().map(|&l| l.to_owned()).collect()
}

#[cfg(test)]
#[path = "../../flux-transport/tests/processes/mod.rs"]
mod processes;

#[cfg(test)]
mod tests {
    use super::processes::gone_within;
    use super::*;
    use crate::lateness::{assert_soon, scaled};
    use std::time::Instant;

    #[test]
    fn a_program_at_its_limit_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & echo $!; sleep 1000"]);
        let start = Instant::now();
        assert_eq!(run(&mut command, scaled(Duration::from_millis(300)), &log).unwrap(), None);
        assert_soon(start.elapsed(), Duration::from_secs(10));
        let grandchild = tail(&log, 1)[0].parse().unwrap();
        assert!(gone_within(&[grandchild], Duration::from_secs(5)), "{grandchild} still runs");
    }

    #[test]
    fn a_tail_is_the_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        std::fs::write(&log, "a\nb\nc\n").unwrap();
        assert_eq!((tail(&log, 2), tail(&log, 9).len()), (vec!["b".to_owned(), "c".to_owned()], 3));
    }
}
