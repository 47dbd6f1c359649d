//! Waits for a program with a limit.
//!
//! Invariant: [`wait`] ends soon after its limit. When it returns, nothing of the program's process
//! group runs, unless the kernel cannot end it (a driver call that does not return). That holds
//! also where this process ignores SIGCHLD, or another thread reaps the child.

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// How often a program is looked at: its end is seen this late at most.
const LOOK: Duration = Duration::from_millis(5);

/// The status of `child`, which leads a process group; `None` if the group had to be killed after
/// `limit`. A killed group may take `grace` to go.
///
/// # Errors
/// `ECHILD` if it ended and this process is not told how; else the system's.
pub fn wait(child: Child, limit: Duration, grace: Duration) -> io::Result<Option<ExitStatus>> {
    wait_unless(child, limit, grace, || false)
}

/// As [`wait`], but the group is killed as soon as `give_up` says so, too.
///
/// # Errors
/// As [`wait`].
pub fn wait_unless(
    mut child: Child,
    limit: Duration,
    grace: Duration,
    mut give_up: impl FnMut() -> bool,
) -> io::Result<Option<ExitStatus>> {
    let leader = Pid::from_child(&child);
    let mut given_up = false;
    // Not reaped, so that the group's number is still its own when it is killed.
    let over = within(limit, || {
        given_up = give_up();
        Ok(given_up
            || waitid(
                WaitId::Pid(leader),
                WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG,
            )?
            .is_some())
    });
    // Whatever became of looking.
    let killed = kill_process_group(leader, Signal::KILL);
    if over? && !given_up {
        return child.wait().map(Some);
    }
    killed?;
    let gone = |child: &mut Child| match child.try_wait() {
        // What the system has reaped nobody has to collect.
        Err(error) if is_untold(&error) => Ok(true),
        end => Ok(end?.is_some()),
    };
    if !within(grace, || gone(&mut child))? {
        std::thread::Builder::new().name("flux-collect".to_owned()).spawn(move || child.wait())?;
    }
    Ok(None)
}

/// Whether the child that was asked for has ended, and this process is not told how.
pub(crate) fn is_untold(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::CHILD.raw_os_error())
}

/// Whether `done` says so before `time` is over.
fn within(time: Duration, mut done: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    let began = Instant::now();
    loop {
        if done()? {
            return Ok(true);
        }
        if began.elapsed() >= time {
            return Ok(false);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;
    use std::os::unix::process::CommandExt;
    use std::path::PathBuf;
    use std::process::Command;

    #[test]
    fn a_program_that_takes_longer_to_go_is_collected_when_it_is_gone() {
        let child = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let entry = PathBuf::from(format!("/proc/{}", child.id()));
        assert!(entry.exists());
        assert_eq!(wait(child, Duration::ZERO, Duration::ZERO).unwrap(), None);
        // The entry stays until it is collected.
        assert!(within(AMPLE, || Ok(!entry.exists())).unwrap());
    }

    #[test]
    fn a_status_is_that_of_the_program() {
        let child = Command::new("sh").args(["-c", "exit 3"]).process_group(0).spawn().unwrap();
        assert_eq!(wait(child, AMPLE, Duration::ZERO).unwrap().unwrap().code(), Some(3));
    }
}
