//! The README's test command: everything that needs no GPU. Tests that do need one print a line and pass without it.

use crate::cargo::{cargo, check, has_subcommand, root};
use std::ffi::OsString;

/// Runs unit and integration tests, then documentation tests, then the example; stops at the first that fails.
pub(crate) fn run(args: &[OsString]) -> anyhow::Result<()> {
    let mut tests = cargo();
    if has_subcommand("nextest") {
        tests.args(["nextest", "run", "--workspace"]);
        if std::env::var_os("CI").is_some() {
            tests.args(["--profile", "ci"]);
        }
    } else {
        tests.args(["test", "--workspace", "--lib", "--bins", "--tests"]);
    }
    tests.args(args).current_dir(root());
    check(tests)?;
    // A filter names tests, not documentation or examples.
    if !args.is_empty() {
        return Ok(());
    }

    let mut doctests = cargo();
    doctests.args(["test", "--workspace", "--doc"]).current_dir(root());
    check(doctests)?;

    let mut example = cargo();
    example.args(["run", "--package", "flux-ops", "--example", "tp_mlp"]).current_dir(root());
    check(example)
}
