//! The README's test command: every test that needs no GPU. Skipped tests are counted at the end.

use crate::cargo::{build, cargo, check, has_subcommand, root};
use crate::kernels;
use anyhow::Context;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Names the file to which a skipped test adds a line (`flux-kernels/tests/skipped`).
const FLUX_SKIPPED: &str = "FLUX_SKIPPED";
/// Follows the name of a test of which a part is skipped.
const IN_PART: &str = ", in part: ";

/// Examples that fail where something is not as they say.
const EXAMPLES: [&str; 3] = ["tp_mlp", "decode", "survive"];

/// Runs unit and integration tests, then documentation tests, then the examples; stops at the first
/// that fails.
pub(crate) fn run(args: &[OsString]) -> anyhow::Result<()> {
    let in_ci = std::env::var_os("CI").is_some();
    if in_ci {
        // In CI, tests that compile need a compiler.
        kernels::provide_nvrtc()?;
    }
    let mut tests = cargo();
    if has_subcommand("nextest") {
        tests.args(["nextest", "run", "--workspace"]);
        if in_ci {
            // Most tests take two of them (.config/nextest.toml).
            let threads = 2 * std::thread::available_parallelism().map_or(1, usize::from);
            tests.args(["--profile", "ci", "--test-threads", &threads.to_string()]);
        }
    } else {
        tests.args(["test", "--workspace", "--lib", "--bins", "--tests"]);
    }
    tests.args(args).current_dir(root());
    counting_skips(tests)?;
    // A filter names tests, not documentation or examples.
    if !args.is_empty() {
        return Ok(());
    }

    let mut doctests = cargo();
    doctests.args(["test", "--workspace", "--doc"]).current_dir(root());
    check(doctests)?;

    let built = build("dev", &["--examples"])?;
    EXAMPLES.iter().try_for_each(|name| {
        let example = built
            .iter()
            .find(|artifact| artifact.name == *name)
            .with_context(|| format!("there is no example {name}"))?;
        check(Command::new(&example.path))
    })
}

/// Runs tests, and prints the skipped ones at the end.
fn counting_skips(mut tests: Command) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("no place to count skipped tests")?;
    let path = folder.path().join("skipped");
    tests.env(FLUX_SKIPPED, &path);
    let done = check(tests);
    print!("{}", skips(&path));
    done
}

/// The skipped tests, each reason with its count; empty without any.
fn skips(path: &Path) -> String {
    let lines = fs::read_to_string(path).unwrap_or_default();
    let mut counts = BTreeMap::<&str, usize>::new();
    lines.lines().for_each(|line| *counts.entry(line).or_default() += 1);
    if counts.is_empty() {
        return String::new();
    }
    let (parts, whole): (Vec<_>, Vec<_>) = lines.lines().partition(|line| line.contains(IN_PART));
    let parts = if parts.is_empty() {
        String::new()
    } else {
        format!(", and {} parts of others", parts.len())
    };
    let mut text = format!("\n{} of these tests were skipped{parts}:\n", whole.len());
    for (line, count) in counts {
        let _infallible = writeln!(text, "  {count:>3}  {line}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_skipped_test_is_counted_and_each_reason_said_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("skipped");
        assert_eq!(skips(&path), "");
        let script = r#"for test in gpu_ops nvrtc gpu_ops; do echo "$test: no reason" >> "$FLUX_SKIPPED"; done; cp "$FLUX_SKIPPED" "$0""#;
        let mut tests = Command::new("sh");
        tests.args(["-c", script]).arg(&path);
        counting_skips(tests).unwrap();
        assert_eq!(
            skips(&path),
            "\n3 of these tests were skipped:\n    2  gpu_ops: no reason\n    1  nvrtc: no reason\n"
        );
        fs::write(&path, "nvrtc: no reason\ngpu_leaks, in part: one GPU\n").unwrap();
        let both = "\n1 of these tests were skipped, and 1 parts of others:\n    1  gpu_leaks, in \
                    part: one GPU\n    1  nvrtc: no reason\n";
        assert_eq!(skips(&path), both);
        let mut failing = Command::new("sh");
        failing.args(["-c", "exit 1"]);
        assert!(counting_skips(failing).is_err());
    }
}
