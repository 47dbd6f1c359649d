//! A signal from outside, to a command that runs programs with a limit: nothing of them stays.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use processes::{gone_within, runs};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../flux-transport/tests/processes/mod.rs"]
mod processes;

#[test]
fn a_run_of_first_calls_that_a_signal_ends_leaves_no_folder_and_no_process() {
    for signal in [Signal::INT, Signal::TERM] {
        let folder = tempfile::tempdir().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        // Minutes, on a host.
        program.args(["lab", "first-call", "--transport", "host", "--tp", "2", "--ms", "65536", "--shapes", "gpt3/4", "--ops", "ag-gemm"]);
        let run = program.env("TMPDIR", folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let children = || {
            let listed = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap();
            listed.split_ascii_whitespace().map(|child| child.parse().unwrap()).collect::<Vec<i32>>()
        };
        let began = Instant::now();
        while children().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(30), "it has started none");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(300));
        let started = children();
        assert!(std::fs::read_dir(&folder).unwrap().next().is_some() && runs(started[0]), "nothing to leave behind");
        kill_process(Pid::from_raw(run.id().cast_signed()).unwrap(), signal).unwrap();
        let done = run.wait_with_output().unwrap();
        assert_eq!((done.status.signal(), done.stderr.is_empty()), (Some(signal.as_raw()), true), "{done:?}");
        assert!(std::fs::read_dir(&folder).unwrap().next().is_none(), "{:?}", std::fs::read_dir(&folder).unwrap().next());
        assert!(gone_within(&started, Duration::from_secs(5)), "{started:?}");
    }
}
