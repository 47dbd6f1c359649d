//! What the program does, command by command.
#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

mod bench;
mod bench_fp8;
mod bench_processes;
mod faults;
mod interrupted;
#[path = "../../../flux-transport/tests/lateness/mod.rs"]
mod lateness;
mod output;
#[path = "../../../flux-transport/tests/processes/mod.rs"]
mod processes;
mod run;
mod run_fp8;
#[path = "../run_support/mod.rs"]
mod run_support;
mod trace;
mod tune;
