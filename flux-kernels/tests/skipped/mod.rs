//! Skips tests of hardware that a machine lacks. A skip is printed and counted, because a silent
//! one would pass for a success.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;

/// Names a file to which a skipped test adds a line, for `cargo xtask test` and `flux-bench lab
/// gpu-ci`.
const FLUX_SKIPPED: &str = "FLUX_SKIPPED";

/// Follows the name of a test of which a part is skipped; both programs look for it.
const IN_PART: &str = ", in part";

/// Skips a test, once: `gpu-ci` counts one skipped test for each line.
pub(crate) fn skip(test: &str, why: &dyn Display) {
    say(test, why);
    count(test, why);
}

/// Prints past the capture of a test's output.
pub(crate) fn say(test: &str, why: &dyn Display) {
    std::io::stderr()
        .write_all(format!("\n{test}: skipped, {why}\n").as_bytes())
        .unwrap_or_default();
}

/// Counts a test of which a part does not run.
pub(crate) fn count_part(test: &str, why: &dyn Display) {
    count(&format!("{test}{IN_PART}"), why);
}

/// Counts it, for whoever asks.
pub(crate) fn count(test: &str, why: &dyn Display) {
    let Some(path) = std::env::var_os(FLUX_SKIPPED) else { return };
    let line = format!("{test}: {why}").replace('\n', " ") + "\n";
    let added = OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    added.expect("the file that FLUX_SKIPPED names takes a line");
}
