//! Tests that need more than a processor: run where it is found, and skipped out loud where not.

use super::Machine;
use std::io::Write;
use std::sync::Once;

/// Runs a test of binary `binary` on the machine, or says once why all of them are skipped.
pub fn run(binary: &str, found: Result<Machine, String>, test: impl FnOnce(Machine)) {
    static SAID: Once = Once::new();
    match found {
        Ok(machine) => test(machine),
        // Past the capture of a test's output, so that it is seen.
        Err(why) => SAID.call_once(|| std::io::stderr().write_all(format!("\n{binary}: skipped, {why}\n").as_bytes()).unwrap_or_default()),
    }
}

/// A test for each of the suite's functions that are named, run by `$on`.
#[macro_export]
macro_rules! suite_tests {
    ($on:ident: $($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            $on(common::suite::$name);
        })*
    };
}
