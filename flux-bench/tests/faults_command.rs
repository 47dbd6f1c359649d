//! `flux-bench faults` on the host, with few faults: the whole count is a step of its own (`cargo xtask faults`).

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use std::process::Command;

#[test]
fn a_descriptor_that_is_kept_at_each_rebuild_is_found_and_named() {
    let words = ["faults", "--transport", "host", "--ranks", "3", "--kills", "6", "--stops", "0", "--missing", "0", "--leak"];
    let done = Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert_eq!(done.status.code(), Some(1), "{text}");
    let residue: Vec<_> = text.lines().filter(|line| line.starts_with("Residue: ")).collect();
    assert!(!residue.is_empty() && residue.iter().all(|line| line.contains("descriptor of /dev/null: ")), "{text}");
    assert!(text.contains("\n0 hangs, 0 wrong results, 0 misnamed, 0 mistimed, "), "{text}");
}

#[test]
fn ranks_that_are_killed_stopped_or_missing_are_named_and_the_group_is_rebuilt() {
    let words = ["faults", "--transport", "host", "--ranks", "4", "--kills", "6", "--stops", "4", "--missing", "2"];
    let done = Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{text}");
    assert!(text.contains("6 kills, 2 short and 2 long stops, 2 missing; 5 rebuilds with survivors, 10 with replacements"), "{text}");
    assert!(text.contains("\n0 hangs, 0 wrong results, 0 misnamed, 0 mistimed, 0 residue, 0 broken\n"), "{text}");
}

#[test]
fn a_rank_that_lingers_until_its_successor_is_stopped_harms_nobody() {
    let words = ["faults", "--transport", "host", "--ranks", "3", "--kills", "0", "--stops", "4", "--missing", "0", "--linger"];
    let done = Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{text}");
    assert!(text.contains("0 kills, 2 short and 2 long stops, 0 missing; 2 rebuilds with survivors, 2 with replacements"), "{text}");
    assert!(text.contains("\n0 hangs, 0 wrong results, 0 misnamed, 0 mistimed, 0 residue, 0 broken\n"), "{text}");
}

#[test]
fn a_rank_that_does_not_answer_is_shown_by_its_threads_and_in_its_own_words() {
    let words = ["faults", "--transport", "host", "--ranks", "2", "--kills", "0", "--stops", "0", "--missing", "1", "--patience", "2"];
    let done = Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words).args(["--deadline-ms", "500", "--stall"]).output().unwrap();
    let (out, own) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    let text = format!("{out}{own}");
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(out.contains("Hang: rank 1 does not answer\n"), "{text}");
    for thread in ["flux-control", "witness"] {
        let shown = |rank| {
            out.lines().any(|line| line.starts_with(&format!("  rank {rank}: thread ")) && line.contains(&format!(" {thread}, state ")))
        };
        assert!(shown(0) && shown(1), "{text}");
    }
    let said = own.lines().find(|line| line.starts_with("flux-bench: rank 1: stalls, for ")).unwrap_or_else(|| panic!("{text}"));
    assert!(said.contains("; call 6 (") && said.contains(": Done, begun at "), "{text}");
    assert!(own.lines().any(|line| line.starts_with("flux-bench: rank 0: ")), "{text}");
}
