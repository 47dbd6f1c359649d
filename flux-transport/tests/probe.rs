//! The program `flux-probe`, as a library's user has it.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::process::{Command, Output};

const FLUX_PROBE: &str = env!("CARGO_BIN_EXE_flux-probe");

fn run(request: Option<&str>) -> Output {
    let mut command = Command::new(FLUX_PROBE);
    command.env_remove("FLUX_PROBE_REQUEST");
    if let Some(request) = request {
        // No such devices, on any machine.
        command
            .env("FLUX_PROBE_REQUEST", request)
            .env("CUDA_VISIBLE_DEVICES", "GPU-00000000-0000-0000-0000-000000000000");
    }
    command.output().unwrap()
}

#[test]
fn what_cannot_be_asked_is_said_in_one_whole_answer() {
    let nobody =
        "GPU-00000000-0000-0000-0000-000000000000,GPU-01010101-0101-0101-0101-010101010101";
    for request in [&format!("{} prove {nobody}", env!("CARGO_PKG_VERSION")), "of another version"]
    {
        let Output { status, stdout, .. } = run(Some(request));
        let answer = String::from_utf8(stdout).unwrap();
        assert!(status.success(), "{status}");
        let lines: Vec<&str> = answer.lines().collect();
        let [header, cannot, end] = lines[..] else { panic!("{answer}") };
        assert_eq!((header, end), (concat!("flux-probe 1 ", env!("CARGO_PKG_VERSION")), "end"));
        assert!(cannot.starts_with("cannot "), "{answer}");
    }
}

#[test]
fn whoever_starts_it_by_hand_is_told_what_it_is() {
    let Output { status, stdout, stderr } = run(None);
    assert_eq!((status.code(), stdout.is_empty()), (Some(2), true));
    assert!(String::from_utf8(stderr).unwrap().contains("flux-bench doctor"));
}
