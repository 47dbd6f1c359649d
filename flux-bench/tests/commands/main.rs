//! What the program does, command by command.
#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

mod bench;
mod bench_fp8;
mod bench_processes;
mod environment;
mod faults;
mod first_call;
mod interrupted;
#[path = "../../../flux-transport/tests/lateness/mod.rs"]
mod lateness;
mod launch;
mod output;
#[path = "../../../flux-transport/tests/processes/mod.rs"]
mod processes;
mod program;
mod run;
mod run_fp8;
#[path = "../run_support/mod.rs"]
mod run_support;
mod serving;
mod soak;
mod trace;
mod tune;
