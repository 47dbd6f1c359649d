//! `flux-bench lab first-call` on the host.

use crate::program::{flux_bench, text};
use flux_bench::FirstCallReport;

#[test]
fn each_first_call_has_a_process_of_its_own_and_a_slow_one_fails() {
    let words = [
        "lab",
        "first-call",
        "--transport",
        "host",
        "--tp",
        "2",
        "--ms",
        "16,32",
        "--shapes",
        "gpt3/128",
        "--ops",
        "ag-gemm",
    ];
    let done = flux_bench(&[words.as_slice(), &["--at-most", "1e9"]].concat());
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!(
        text(&done).lines().filter(|l| l.starts_with("ag_gemm")).count(),
        2,
        "{}",
        text(&done)
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("first.json");
    let of_fp16 = flux_bench(
        &[words.as_slice(), &["--dtype", "fp16", "--json", path.to_str().unwrap()]].concat(),
    );
    assert!(
        of_fp16.status.success() && text(&of_fp16).contains(", TP 2, fp16\n"),
        "{}",
        text(&of_fp16)
    );
    let report: FirstCallReport = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(
        report.rows.len() == 2 && report.rows.iter().all(|row| row.head.dtype == "fp16"),
        "{report:?}"
    );
    let unjudged = flux_bench(&words);
    assert!(
        unjudged.status.success() && !text(&unjudged).contains("at most"),
        "{}",
        text(&unjudged)
    );
    let slow = flux_bench(&[words.as_slice(), &["--at-most", "0"]].concat());
    assert_eq!(
        (slow.status.code(), text(&slow).matches("TOO SLOW").count()),
        (Some(1), 2),
        "{}",
        text(&slow)
    );
}
