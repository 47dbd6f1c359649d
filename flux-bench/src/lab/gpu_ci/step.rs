//! One program of the checks, and how it ended.
//!
//! Invariant: a step passes only if its program succeeds in time, and if it has tests, one of them
//! ran.

use crate::limited;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Passed,
    /// So it did, and none of its tests ran.
    Skipped,
    /// It ended with another status, or could not be started.
    Failed,
    TimedOut,
}

/// A step that has been run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Step {
    /// What it is called in the summary.
    pub name: String,
    pub command: String,
    pub outcome: Outcome,
    /// Status or signal, in words; empty where it passed.
    pub status: String,
    pub seconds: f64,
    /// Tests, and parts of tests, that were skipped, a line each.
    #[serde(default)]
    pub skipped: Vec<String>,
    /// The last lines that it wrote to stdout and stderr.
    pub output_tail: Vec<String>,
}

/// Names the file to which a test that is skipped adds a line (`flux-kernels/tests/skipped`).
const FLUX_SKIPPED: &str = "FLUX_SKIPPED";
/// Stands in the line of a test of which only a part is skipped (the same).
const IN_PART: &str = ", in part: ";
/// Lines of output that a summary keeps.
const TAIL: usize = 60;

impl Step {
    /// Runs `command` for at most `limit`, with its output in the file `log`.
    pub(crate) fn run(name: &str, mut command: Command, limit: Duration, log: &Path) -> Self {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let shown = words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
        let skips = log.with_extension("skipped");
        let start = Instant::now();
        // Those of an earlier run would count.
        let ended = File::create(&skips)
            .and_then(|_| limited::run(command.env(FLUX_SKIPPED, &skips), limit, log));
        let seconds = start.elapsed().as_secs_f64();
        let skipped = limited::tail(&skips, usize::MAX);
        let whole = skipped.iter().filter(|line| !is_part(line)).count();
        let (outcome, status) = match ended {
            Ok(Some(status)) if status.success() && ran_nothing(tests_passed(log), whole) => {
                (Outcome::Skipped, String::new())
            }
            Ok(Some(status)) if status.success() => (Outcome::Passed, String::new()),
            Ok(Some(status)) => (Outcome::Failed, status.to_string()),
            Ok(None) => (Outcome::TimedOut, format!("killed after {} s", limit.as_secs_f64())),
            Err(error) => (Outcome::Failed, error.to_string()),
        };
        Self {
            name: name.to_owned(),
            command: shown,
            outcome,
            status,
            seconds,
            skipped,
            output_tail: limited::tail(log, TAIL),
        }
    }
}

/// Whether a line of what was skipped is of a test that ran but for a part.
pub(super) fn is_part(line: &str) -> bool {
    line.contains(IN_PART)
}

/// Whether no test ran, of so many passed and so many skipped.
fn ran_nothing(passed: Option<usize>, skipped: usize) -> bool {
    passed.is_some_and(|passed| passed <= skipped)
}

/// Tests that passed, by the test binaries' own summaries in a log; `None` without one. Each rank
/// of a launch has a summary.
fn tests_passed(log: &Path) -> Option<usize> {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    // Another rank's output may stand between the words and the number.
    let count = |(at, words): (usize, &str)| {
        let digits = text[..at].bytes().rev().take_while(u8::is_ascii_digit).count();
        let failed = text[at + words.len()..].split_once(" failed; ")?.0;
        failed.parse::<usize>().ok()?;
        text[at - digits..at].parse::<usize>().ok()
    };
    text.match_indices(" passed; ").filter_map(count).reduce(|sum, count| sum + count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;

    fn shell(script: &str, limit: Duration) -> (Step, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        (Step::run("step", command, limit, &folder.path().join("log")), folder)
    }

    #[test]
    fn success_and_failure_are_told_apart_and_output_is_kept() {
        let (step, _folder) = shell("echo out; echo err >&2", AMPLE);
        assert_eq!(
            (step.outcome, step.output_tail),
            (Outcome::Passed, vec!["out".to_owned(), "err".to_owned()])
        );
        let (step, _folder) = shell("exit 3", AMPLE);
        assert_eq!((step.outcome, step.status.as_str()), (Outcome::Failed, "exit status: 3"));
    }

    /// What a test binary says at its end.
    fn result(passed: usize) -> String {
        format!(
            "echo \"test result: ok. {passed} passed; 0 failed; 1 ignored; 0 measured; 0 filtered \
             out; finished in 0.00s\""
        )
    }

    #[test]
    fn a_step_is_skipped_where_as_many_tests_were_as_passed() {
        let outcome = |script: &str| shell(script, AMPLE).0.outcome;
        let skip = r#"echo "gpu_good: no GPU" >> "$FLUX_SKIPPED""#;
        let part = r#"echo "gpu_good, in part: one GPU" >> "$FLUX_SKIPPED""#;
        let [none, one, two] = [0, 1, 2].map(result);
        assert_eq!(outcome(&one), Outcome::Passed);
        assert_eq!(outcome(&format!("{skip}; {one}")), Outcome::Skipped);
        assert_eq!(outcome(&format!("{skip}; {two}")), Outcome::Passed, "one of two ran");
        assert_eq!(outcome(&format!("{skip}; {skip}; {two}")), Outcome::Skipped);
        assert_eq!(
            outcome(&format!("{part}; {part}; {one}")),
            Outcome::Passed,
            "what ran in part ran"
        );
        assert_eq!(outcome(&none), Outcome::Skipped, "there was no test");
        assert_eq!(outcome(&format!("{skip}; {one}; exit 1")), Outcome::Failed);
        assert_eq!(
            outcome("echo 42 cases passed, 0 failed"),
            Outcome::Passed,
            "not a step of tests"
        );
    }

    #[test]
    fn ranks_of_a_launch_are_counted_one_by_one_however_their_words_lie() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let passed = |text: &str| {
            std::fs::write(&log, text).unwrap();
            tests_passed(&log)
        };
        assert_eq!(
            passed(
                "ok\ntest result: ok. 7 passed; 0 failed; 0 ignored\ntest result: ok. 11 passed; 0 \
                 failed; 0 ignored\n"
            ),
            Some(18)
        );
        assert_eq!(
            passed(
                "test result: test result: okok. 7 passed; 0 failed; 0 ignored. 7 passed; 0 \
                 failed; 0 ignored\n"
            ),
            Some(14)
        );
        assert_eq!(
            passed(
                "42 cases passed, 0 failed; the time passed; nothing failed; 3 passed; all failed; "
            ),
            None
        );
        assert_eq!(passed(""), None);
        assert_eq!(tests_passed(&folder.path().join("no such log")), None);
    }

    #[test]
    fn a_step_at_its_limit_says_so() {
        let (step, _folder) = shell("sleep 1000", Duration::from_millis(200));
        assert_eq!((step.outcome, step.status.as_str()), (Outcome::TimedOut, "killed after 0.2 s"));
    }

    #[test]
    fn a_program_that_is_missing_fails_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let step =
            Step::run("x", Command::new("/no/such/program"), AMPLE, &folder.path().join("log"));
        assert_eq!(step.outcome, Outcome::Failed);
        assert!(step.status.contains("No such file"), "{}", step.status);
    }
}
