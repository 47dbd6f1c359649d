//! `flux-bench tune` on the host: rows, resume, budget, interrupt and refusals.

use crate::lateness::{AMPLE, assert_soon};
use crate::program::text;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const TINY: [&str; 10] = [
    "--transport",
    "host",
    "--shapes",
    "64x128,ag_gemm:n=64,k=64",
    "--ms",
    "16..32",
    "--candidates",
    "2",
    "--samples",
    "3",
];

fn tune(table: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
    command.arg("tune").env("FLUX_PLAN_TABLE", table);
    command
}

fn rows(table: &Path) -> usize {
    let text = std::fs::read_to_string(table).unwrap_or_default();
    text.lines().filter(|line| line.starts_with("host,sm_90a,host,host,2,")).count()
}

#[test]
fn each_row_is_printed_and_kept_and_a_second_run_finds_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    let first = tune(&table).args(TINY).output().unwrap();
    assert!(first.status.success(), "{}", text(&first));
    let said = String::from_utf8_lossy(&first.stdout).into_owned();
    assert_eq!(
        said.lines().filter(|line| line.contains(" us -> ") && line.contains(" (before: ")).count(),
        6,
        "{said}"
    );
    assert!(said.contains("(before: by the cost model)"), "{said}");
    assert!(said.contains("6 rows tuned, 0 known, 0 failed, 0 left; gained "), "{said}");
    assert!(
        said.ends_with(&format!(
            "plan table: {}: 6 of 6 rows are for host with kernel sm_90a and driver host\n",
            table.display()
        )),
        "{said}"
    );
    assert_eq!(rows(&table), 6);

    let kept = std::fs::read_to_string(&table).unwrap();
    // Processes find the rows that threads have written.
    let second = tune(&table).args(TINY).args(["--tp", "2", "--processes"]).output().unwrap();
    assert!(
        second.status.success()
            && text(&second).contains("0 rows tuned, 6 known, 0 failed, 0 left\n"),
        "{}",
        text(&second)
    );
    assert_eq!(std::fs::read_to_string(&table).unwrap(), kept);

    let again = tune(&table)
        .args(TINY)
        .args(["--again", "--ops", "gemm_rs", "--processes"])
        .output()
        .unwrap();
    assert!(
        text(&again).contains("2 rows tuned, 0 known")
            && text(&again).contains("(before: from the user's plan table)"),
        "{}",
        text(&again)
    );
    assert_eq!(rows(&table), 6);

    let doctor = Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .arg("doctor")
        .env("FLUX_PLAN_TABLE", &table)
        .output()
        .unwrap();
    assert!(
        text(&doctor).contains(&format!("plan table   {}: ", table.display())),
        "{}",
        text(&doctor)
    );
}

#[test]
fn a_named_file_is_used_in_place_of_the_users() {
    let folder = tempfile::tempdir().unwrap();
    let [users, named] = ["users.csv", "named.csv"].map(|name| folder.path().join(name));
    let done = tune(&users)
        .args(TINY)
        .args(["--ms", "16", "--ops", "ag_gemm", "--table"])
        .arg(&named)
        .output()
        .unwrap();
    assert!(!done.status.success(), "--ms twice: {}", text(&done));
    let words =
        ["--transport", "host", "--shapes", "64x128", "--ms", "16", "--ops", "ag_gemm", "--table"];
    let done = tune(&users).args(words).arg(&named).output().unwrap();
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!((rows(&named), users.exists()), (1, false));
}

#[test]
fn a_damaged_table_is_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    std::fs::write(&table, "a shopping list\n").unwrap();
    let done = tune(&table).args(TINY).output().unwrap();
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
    let refusal = format!("rank 0: {} is no plan table: the first lines are not", table.display());
    assert!(text(&done).contains(&refusal), "{}", text(&done));
    assert!(text(&done).contains("the plan table is ignored"), "a warning, too: {}", text(&done));
    assert_eq!(std::fs::read_to_string(&table).unwrap(), "a shopping list\n");
}

#[test]
fn a_spent_budget_leaves_rows_for_the_next_run() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    let words = [
        "--transport",
        "host",
        "--shapes",
        "512x1024",
        "--ms",
        "64..2048",
        "--samples",
        "1000",
        "--budget",
        "2s",
    ];
    let begun = Instant::now();
    let done = tune(&table).args(words).output().unwrap();
    assert!(done.status.success(), "{}", text(&done));
    assert_soon(begun.elapsed(), Duration::from_secs(30));
    assert!(text(&done).contains(" left for another run of this command"), "{}", text(&done));
    assert!((1..12).contains(&rows(&table)), "{}", text(&done));
}

#[test]
fn an_interrupt_keeps_finished_rows_and_the_next_run_goes_on_behind_them() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    let words = [
        "--transport",
        "host",
        "--shapes",
        "64x128,256x512",
        "--ms",
        "16..512",
        "--candidates",
        "1",
        "--samples",
        "20",
    ];
    for processes in [&[][..], &["--processes"]] {
        let before = rows(&table);
        let run = tune(&table)
            .args(words)
            .args(processes)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while rows(&table) < before + 3 {
            assert!(begun.elapsed() < AMPLE, "no rows");
            std::thread::sleep(Duration::from_millis(1));
        }
        kill_process(Pid::from_raw(run.id().cast_signed()).unwrap(), Signal::INT).unwrap();
        let done = run.wait_with_output().unwrap();
        let ended_by = done.status.signal().or(done.status.code().map(|code| code - 128));
        assert_eq!(ended_by, Some(Signal::INT.as_raw()), "{:?}, {}", done.status, text(&done));
    }
    let kept = rows(&table);
    assert!((6..24).contains(&kept), "{kept}");
    let next = tune(&table).args(words).output().unwrap();
    assert!(
        text(&next).contains(&format!("{} rows tuned, {kept} known, 0 failed, 0 left", 24 - kept)),
        "{}",
        text(&next)
    );
}
