//! One program of the checks, and how it ended.
//!
//! Invariant: a step has passed only where its program ended by itself, in time, with success.

use crate::limited;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::process::Command;
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
    /// What its tests did not run for, a line for each test that was skipped.
    #[serde(default)]
    pub skipped: Vec<String>,
    /// The last lines that it wrote to stdout and stderr.
    pub output_tail: Vec<String>,
}

/// Names the file to which a test that is skipped adds a line (`flux-kernels/tests/skipped`).
const FLUX_SKIPPED: &str = "FLUX_SKIPPED";
/// Lines of output that a summary keeps.
const TAIL: usize = 60;

impl Step {
    /// Runs `command` for at most `limit`, with everything it writes in the file `log`, and what it skips in one beside it.
    pub fn run(name: &str, mut command: Command, limit: Duration, log: &Path) -> Self {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let shown = words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
        let skips = log.with_extension("skipped");
        let start = Instant::now();
        // Those of an earlier run would count.
        let ended = File::create(&skips).and_then(|_| limited::run(command.env(FLUX_SKIPPED, &skips), limit, log));
        let seconds = start.elapsed().as_secs_f64();
        let (outcome, status) = match ended {
            Ok(Some(status)) if status.success() => (Outcome::Passed, String::new()),
            Ok(Some(status)) => (Outcome::Failed, status.to_string()),
            Ok(None) => (Outcome::TimedOut, format!("killed after {} s", limit.as_secs_f64())),
            Err(error) => (Outcome::Failed, error.to_string()),
        };
        let skipped = limited::tail(&skips, usize::MAX);
        Self { name: name.to_owned(), command: shown, outcome, status, seconds, skipped, output_tail: limited::tail(log, TAIL) }
    }
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
    fn a_step_at_its_limit_says_so() {
        let (step, _folder) = shell("sleep 1000", Duration::from_millis(200));
        assert_eq!((step.outcome, step.status.as_str()), (Outcome::TimedOut, "killed after 0.2 s"));
    }

    #[test]
    fn a_program_that_is_missing_fails_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let step = Step::run("x", Command::new("/no/such/program"), Duration::from_secs(1), &folder.path().join("log"));
        assert_eq!(step.outcome, Outcome::Failed);
        assert!(step.status.contains("No such file"), "{}", step.status);
    }
}
