//! Runs the program, and returns what it prints.

use std::process::{Command, Output};

pub(crate) fn flux_bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words).output().unwrap()
}

/// Both streams.
pub(crate) fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}
