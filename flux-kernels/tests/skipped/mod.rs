//! Tests of what a machine may not have: skipped out loud, and counted, as whoever runs them takes
//! a skipped test for one that has passed.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Names a file to which every test that is skipped adds a line: `cargo xtask test` and
/// `flux-bench lab gpu-ci` count them.
const FLUX_SKIPPED: &str = "FLUX_SKIPPED";

/// Stands behind the name of a test of which only a part is skipped; both programs look for it.
const IN_PART: &str = ", in part";

/// Says that a test does not run, and counts it. Once in a test: `gpu-ci` takes as many tests as
/// lines for skipped.
pub(crate) fn skip(test: &str, why: &dyn Display) {
    say(test, why);
    count(test, why);
}

/// Says it past the capture of a test's output, so that it is seen.
pub(crate) fn say(test: &str, why: &dyn Display) {
    std::io::stderr().write_all(format!("\n{test}: skipped, {why}\n").as_bytes()).unwrap_or_default();
}

/// Counts a test of which a part does not run.
pub(crate) fn count_part(test: &str, why: &dyn Display) {
    count(&format!("{test}{IN_PART}"), why);
}

/// Counts it, for whoever asks.
pub(crate) fn count(test: &str, why: &dyn Display) {
    let Some(path) = std::env::var_os(FLUX_SKIPPED) else { return };
    let line = format!("{test}: {why}").replace('\n', " ") + "\n";
    let added = OpenOptions::new().append(true).create(true).open(path).and_then(|mut file| file.write_all(line.as_bytes()));
    added.expect("the file that FLUX_SKIPPED names takes a line");
}

/// Whether the kernels run on a device of this name and compute capability, or why they do not.
pub(crate) fn suits(name: &str, (major, minor): (impl Into<i64>, impl Into<i64>)) -> Result<(), String> {
    match (major.into(), minor.into()) {
        (9, 0) => Ok(()),
        (major, minor) => Err(format!("{name} has compute capability {major}.{minor}, the kernels need 9.0")),
    }
}
