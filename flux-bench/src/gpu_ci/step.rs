//! One program run with a time limit.
//!
//! Invariant: when a step is over, nothing that it started in its process group runs any more.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It ended with success.
    Passed,
    /// It ended with another status, or could not be started.
    Failed,
    /// It was killed at its limit.
    TimedOut,
}

/// A step that has been run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What it is called in the summary.
    pub name: String,
    /// The command line.
    pub command: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Status or signal, in words; empty where it passed.
    pub status: String,
    /// How long it ran.
    pub seconds: f64,
    /// The last lines that it wrote to stdout and stderr.
    pub output_tail: Vec<String>,
}

/// Lines of output that a summary keeps.
const TAIL: usize = 60;

impl Step {
    /// Runs `command` for at most `limit`, with everything it writes in the file `log`.
    pub fn run(name: &str, mut command: Command, limit: Duration, log: &Path) -> Self {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let shown = words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
        let start = Instant::now();
        let ended = spawn(&mut command, log).and_then(|child| wait(child, limit));
        let seconds = start.elapsed().as_secs_f64();
        let (outcome, status) = match ended {
            Ok(Some(status)) if status.success() => (Outcome::Passed, String::new()),
            Ok(Some(status)) => (Outcome::Failed, status.to_string()),
            Ok(None) => (Outcome::TimedOut, format!("killed after {} s", limit.as_secs_f64())),
            Err(error) => (Outcome::Failed, error.to_string()),
        };
        Self { name: name.to_owned(), command: shown, outcome, status, seconds, output_tail: tail(log) }
    }
}

fn spawn(command: &mut Command, log: &Path) -> io::Result<Child> {
    let log = File::create(log)?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0).spawn()
}

/// The child's status, or `None` where it had to be killed. Its group is killed before the child is reaped, so the group's number is still its own.
fn wait(mut child: Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let leader = Pid::from_child(&child);
    let end = Instant::now() + limit;
    let over = loop {
        if waitid(WaitId::Pid(leader), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG)?.is_some() {
            break true;
        }
        if Instant::now() >= end {
            break false;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    kill_process_group(leader, Signal::KILL)?;
    let status = child.wait()?;
    Ok(over.then_some(status))
}

fn tail(log: &Path) -> Vec<String> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].iter().map(|&l| l.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> (Step, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        (Step::run("step", command, limit, &folder.path().join("log")), folder)
    }

    #[test]
    fn success_and_failure_are_told_apart_and_output_is_kept() {
        let (step, _folder) = shell("echo out; echo err >&2", Duration::from_secs(20));
        assert_eq!((step.outcome, step.output_tail), (Outcome::Passed, vec!["out".to_owned(), "err".to_owned()]));
        let (step, _folder) = shell("exit 3", Duration::from_secs(20));
        assert_eq!((step.outcome, step.status.as_str()), (Outcome::Failed, "exit status: 3"));
    }

    #[test]
    fn a_step_at_its_limit_is_killed_with_its_children() {
        let (step, folder) = shell("sleep 1000 & echo $!; sleep 1000", Duration::from_millis(300));
        assert_eq!(step.outcome, Outcome::TimedOut);
        assert!(step.seconds < 10.0, "{}", step.seconds);
        let child = Pid::from_raw(step.output_tail[0].parse().unwrap()).unwrap();
        // The grandchild is reaped by whoever adopts it, soon after it is killed.
        let gone = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.as_raw_nonzero())).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        });
        assert!(gone, "{child:?} still runs");
        drop(folder);
    }

    #[test]
    fn a_program_that_is_missing_fails_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let step = Step::run("x", Command::new("/no/such/program"), Duration::from_secs(1), &folder.path().join("log"));
        assert_eq!(step.outcome, Outcome::Failed);
        assert!(step.status.contains("No such file"), "{}", step.status);
    }
}
