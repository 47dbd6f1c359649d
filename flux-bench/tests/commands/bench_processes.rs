//! `flux-bench bench` with ranks as processes, on the host: the same rows as with threads, and an
//! end in time where a rank fails.

use crate::lateness::assert_soon;
use crate::program::text;
use flux_bench::{Placement, Ranks, Report};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const BENCH: [&str; 9] =
    ["bench", "--transport", "host", "--ms", "24", "--shapes", "gpt3/128", "--samples", "3"];
/// Long before the ranks' deadlines of 30 s and 60 s.
const SOON: Duration = Duration::from_secs(15);

/// Without a variable that the tests themselves may have: a record's command names it.
fn flux_bench() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
    program.env_remove("FLUX_NVRTC_LIB");
    program
}

fn report(path: &Path) -> Report {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Both ops over `tp` processes, each with all of its rounds.
fn assert_measured(done: &Output, path: &Path, tp: u32, samples: u32) {
    assert!(done.status.success(), "{}", text(done));
    let report = report(path);
    assert_eq!(report.placement, Placement { ranks: Ranks::Processes, hosts: 1, machines: 1 });
    assert!(
        report.origin.device.starts_with(&format!("host ({tp} ranks as processes on ")),
        "{}",
        report.origin.device
    );
    let rows: Vec<_> = report
        .rows
        .iter()
        .map(|row| (row.head.op.as_str(), row.head.m, row.head.tp, row.samples, row.verified))
        .collect();
    assert_eq!(rows, ["ag_gemm", "gemm_rs"].map(|op| (op, 24, tp, samples, true)));
    for row in &report.rows {
        for times in [row.t_op_ms, row.t_gemm_ms, row.t_comm_ms, row.t_serial_ms] {
            assert!(
                0.0 < times.p10 && times.p10 <= times.median && times.median <= times.p90,
                "{times:?}"
            );
        }
        assert!(row.max_rel_err > 0.0, "{row:?}");
    }
    assert_eq!(
        text(done).matches("transport host, TP").count(),
        1,
        "rank 0 alone prints: {}",
        text(done)
    );
}

#[test]
fn processes_measure_what_threads_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b.json");
    let done = flux_bench()
        .args(BENCH)
        .args(["--tp", "3", "--processes", "--sustained", "0.1", "--json"])
        .arg(&path)
        .output()
        .unwrap();
    assert_measured(&done, &path, 3, 3);
    let report = report(&path);
    assert!(
        report.origin.command.starts_with("flux-bench bench --transport host "),
        "{}",
        report.origin.command
    );
    assert!(
        report.origin.command.contains(" --tp 3 --processes --sustained 0.1 "),
        "{}",
        report.origin.command
    );
    assert!(
        report
            .rows
            .iter()
            .all(|row| row.sustained.is_some_and(|s| s.blocks == 1 && s.t_op_ms.median > 0.0))
    );
}

#[test]
fn under_a_launcher_the_ranks_are_those_that_were_launched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b.json");
    let program = env!("CARGO_BIN_EXE_flux-bench");
    let done = flux_bench()
        .args(["launch", "--ranks", "2", "--", program])
        .args(BENCH)
        .arg("--json")
        .arg(&path)
        .output()
        .unwrap();
    assert_measured(&done, &path, 2, 3);
    let command = report(&path).origin.command;
    assert!(
        command.starts_with("flux-bench launch --ranks 2 -- flux-bench bench --transport host "),
        "{command}"
    );

    let done = flux_bench()
        .args(["launch", "--ranks", "2", "--", program])
        .args(BENCH)
        .args(["--tp", "4"])
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
    assert!(text(&done).contains("--tp 4 is asked for in a launch of 2 ranks"), "{}", text(&done));
}

#[test]
fn a_rank_that_cannot_take_part_fails_the_launch_with_its_words() {
    let began = Instant::now();
    // Rank 1 of three alone is asked for a layer that cannot be split.
    let script = "if [ $FLUX_RANK = 1 ]; then exec \"$0\" \"$@\" --shapes 16x16; else exec \"$0\" \
                  \"$@\" --shapes gpt3/128; fi";
    let words = ["bench", "--transport", "host", "--ms", "24", "--samples", "3"];
    let program = env!("CARGO_BIN_EXE_flux-bench");
    let done = flux_bench()
        .args(["launch", "--ranks", "3", "--", "sh", "-c", script, program])
        .args(words)
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
    assert!(
        text(&done).contains(
            "flux-bench: rank 1: ag_gemm of 16x16: n = 16 is too small for 3 ranks of at least 8 \
             each"
        ),
        "{}",
        text(&done)
    );
    assert_soon(began.elapsed(), SOON);
}

#[test]
fn hosts_that_share_no_memory_are_refused_by_a_transport_that_shares_it() {
    let began = Instant::now();
    let done = flux_bench()
        .args(BENCH)
        .args(["--tp", "2", "--processes", "--hosts", "2"])
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
    assert!(text(&done).contains("rank 0 and rank 1 are on different hosts"), "{}", text(&done));
    assert_soon(began.elapsed(), SOON);
}

/// A rank as a launcher would start it that kills nobody; measures for minutes.
fn endless_rank(rank: u32, directory: &Path) -> Child {
    let mut command = flux_bench();
    command.args([
        "bench",
        "--transport",
        "host",
        "--ms",
        "24",
        "--shapes",
        "gpt3/128",
        "--samples",
        "100000",
    ]);
    command
        .env("FLUX_RANK", rank.to_string())
        .env("FLUX_LOCAL_RANK", rank.to_string())
        .env("FLUX_WORLD_SIZE", "2");
    command
        .env("FLUX_RENDEZVOUS", directory)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_rank_whose_peer_is_killed_ends_by_itself_and_names_it() {
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let folder = tempfile::Builder::new().permissions(private).tempdir().unwrap();
    let [survivor, mut victim] = [0, 1].map(|rank| endless_rank(rank, folder.path()));
    std::thread::sleep(Duration::from_millis(1500));
    victim.kill().unwrap();
    victim.wait().unwrap();
    let killed = Instant::now();
    let done = survivor.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
    assert!(text(&done).contains("rank 1"), "{}", text(&done));
    assert_soon(killed.elapsed(), SOON);
}
