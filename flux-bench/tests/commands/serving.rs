//! `flux-bench bench --trace-m` on the host: calls whose `m` changes.

use crate::program::{flux_bench, text};
use flux_bench::ServingReport;
use std::process::Output;

/// Of a trace on three ranks, whose shards are uneven or empty.
fn served(more: &[&str]) -> (Output, Option<ServingReport>) {
    let folder = tempfile::tempdir().unwrap();
    let (trace, path) = (folder.path().join("steps"), folder.path().join("host.json"));
    std::fs::write(&trace, "# a prefill chunk, then decode\n64\n1\n7 # three ranks\n2\n").unwrap();
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "3",
        "--shapes",
        "48x96",
        "--trace-m",
        trace.to_str().unwrap(),
        "--json",
    ];
    let done = flux_bench(&[words.as_slice(), &[path.to_str().unwrap()], more].concat());
    let report = std::fs::read(&path).ok().map(|json| serde_json::from_slice(&json).unwrap());
    (done, report)
}

#[test]
fn calls_with_the_rows_of_a_file_are_timed_beside_the_serial_path_and_each_is_verified() {
    for (more, ops) in [
        (&[][..], &["gemm_ar"][..]),
        (
            &["--ops", "ag_gemm,gemm_rs,gemm_ar", "--calls", "21"],
            &["ag_gemm", "gemm_rs", "gemm_ar"],
        ),
        (&["--processes", "--dtype", "fp16"], &["gemm_ar"]),
    ] {
        let (done, report) = served(more);
        assert!(done.status.success(), "{more:?}: {}", text(&done));
        let report = report.unwrap();
        assert_eq!(report.serving.iter().map(|row| row.head.op.as_str()).collect::<Vec<_>>(), ops);
        assert_eq!((report.schema, report.transport.as_str()), (1, "host"));
        for row in &report.serving {
            let calls = if more.contains(&"--calls") { 21 } else { 64 };
            assert_eq!(
                (row.calls, row.trace.as_str(), row.different_rows, row.head.tp),
                (calls, "steps", 4, 3)
            );
            assert_eq!(row.rows, calls / 4 * (64 + 1 + 7 + 2) + if calls == 21 { 64 } else { 0 });
            assert!(
                row.verified && row.checked >= 4 * row.calls && row.max_rel_err > 0.0,
                "{row:?}"
            );
            assert!(row.total_op_ms > 0.0 && row.total_serial_ms > 0.0, "{row:?}");
            for host in [row.host_us, row.host_serial_us] {
                assert!(0.0 < host.p50 && host.p50 <= host.p99, "{row:?}");
            }
            assert!(row.memory.host.before > 0 && row.memory.device.after == 0, "{row:?}");
            assert!(
                text(&done).contains(&format!("rows of steps, 4 numbers of rows in {calls} calls")),
                "{}",
                text(&done)
            );
        }
    }
}

#[test]
fn a_wrong_element_of_a_call_of_a_trace_is_found() {
    for op in ["ag_gemm", "gemm_rs", "gemm_ar"] {
        let (done, report) = served(&["--ops", op, "--calls", "4", "--spoil"]);
        assert_eq!(done.status.code(), Some(1), "{}", text(&done));
        assert!(text(&done).contains("wrong elements, the first at row "), "{}", text(&done));
        assert!(!report.unwrap().serving[0].verified);
    }
}

#[test]
fn the_mix_serves_on_the_host_and_bad_traces_are_refused_with_line_and_value() {
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "2",
        "--shapes",
        "16x32",
        "--calls",
        "24",
        "--trace-m",
    ];
    let done = flux_bench(&[words.as_slice(), &["mix"]].concat());
    assert!(done.status.success() && text(&done).contains("rows of mix, "), "{}", text(&done));
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("steps");
    std::fs::write(&trace, "16\nmany\n").unwrap();
    let refused = flux_bench(&[words.as_slice(), &[trace.to_str().unwrap()]].concat());
    assert!(
        !refused.status.success()
            && text(&refused).contains("line 2: \"many\" is no number of rows"),
        "{}",
        text(&refused)
    );
    for more in
        ["--ms 16", "--samples 3", "--sustained 1", "--bias", "--norm 1e-6", "--gates swiglu"]
    {
        let more: Vec<&str> = more.split(' ').collect();
        let refused = flux_bench(&[words.as_slice(), &["mix"], &more].concat());
        assert!(
            !refused.status.success() && text(&refused).contains("cannot be used with"),
            "{}",
            text(&refused)
        );
    }
    let refused = flux_bench(&["bench", "--calls", "4"]);
    assert!(
        !refused.status.success() && text(&refused).contains("--trace-m"),
        "{}",
        text(&refused)
    );
}
