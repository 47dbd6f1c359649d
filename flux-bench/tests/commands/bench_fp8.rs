//! `flux-bench bench` and `trace` with 8-bit operands, on the host.

use crate::program::text;
use flux_bench::{Report, ServingReport};
use std::process::{Command, Output};

fn flux_bench(words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words.split_whitespace()).output().unwrap()
}

/// A run on the host, and its record.
fn measured(words: &str) -> (Output, Report) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let done = flux_bench(&format!(
        "bench --transport host --ops ag_gemm,gemm_rs,gemm_ar --samples 1 --json {} {words}",
        path.display()
    ));
    assert!(done.status.success(), "{words}: {}", text(&done));
    let report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    (done, report)
}

#[test]
fn every_op_is_verified_beside_its_serial_path_with_scales_of_every_form() {
    for tp in [1, 4] {
        for scales in ["tensor", "row", "block"] {
            let words =
                format!("--tp {tp} --dtype fp8 --scales {scales} --shapes 128x512 --ms 16,37");
            let (done, report) = measured(&words);
            assert_eq!(report.rows.len(), 6, "{words}");
            for row in &report.rows {
                assert!(row.verified && row.max_rel_err > 0.0, "{words}: {row:?}");
                assert_eq!(
                    (row.head.tp, &row.head.dtype[..]),
                    (tp, &format!("e4m3.{scales}:bf16")[..])
                );
                // Of 37 rows: in equal shards, and by 4 with scales of blocks.
                let shards = if row.head.op == "gemm_ar" { 1 } else { tp };
                let step = if scales == "block" { 4 } else { shards };
                let padded = row.head.m.next_multiple_of(step);
                assert_eq!(
                    row.serial_m,
                    (padded != row.head.m).then_some(padded),
                    "{words}: {row:?}"
                );
            }
            let heading = format!("transport host, TP {tp}, e4m3.{scales}:bf16");
            assert!(text(&done).contains(&heading), "{}", text(&done));
        }
    }
}

#[test]
fn epilogues_fast_sums_and_processes_are_measured_with_8_bit_operands() {
    for words in [
        "--scales row --bias --residual --norm 1e-6 --gates swiglu",
        "--scales tensor --fast-accumulation --processes",
    ] {
        let (_, report) = measured(&format!("--tp 2 --dtype fp8 --shapes 128x256 --ms 20 {words}"));
        assert!(report.rows.iter().all(|row| row.verified), "{words}: {report:?}");
        let fast = words.contains("fast");
        assert!(report.rows.iter().all(|row| row.head.dtype.contains(".fast") == fast));
    }
    let sums = "--tp 2 --dtype fp8 --scales block --shapes 128x256 --ms 20 --partials f32";
    let refused = flux_bench(&format!("bench --transport host {sums}"));
    assert!(text(&refused).contains("--partials f32 is of gemm_rs and gemm_ar"));
}

#[test]
fn a_record_of_8_bit_operands_is_shown_and_is_not_compared_with_one_of_16() {
    let folder = tempfile::tempdir().unwrap();
    let record = |name: &str, words: &str| {
        let path = folder.path().join(name).display().to_string();
        let words = format!(
            "bench --transport host --tp 2 --shapes 128x256 --ms 16 --samples 1 --json {path} {words}"
        );
        let done = flux_bench(&words);
        assert!(done.status.success(), "{}", text(&done));
        path
    };
    let [row, block, bf16] = [
        record("row", "--dtype fp8 --scales row"),
        record("block", "--dtype fp8 --scales block"),
        record("bf16", ""),
    ];
    let shown = text(&flux_bench(&format!("show {row}")));
    assert!(shown.contains("TP 2, e4m3.row:bf16"), "{shown}");
    let compared = |other: &str| text(&flux_bench(&format!("show --compare {row} {other}")));
    assert!(
        compared(&row).contains("| ag_gemm 128x256 m 16 e4m3.row:bf16 | "),
        "{}",
        compared(&row)
    );
    for other in [block, bf16] {
        let said = compared(&other);
        let lacks = format!("{other} lacks: ag_gemm 128x256 m 16 e4m3.row:bf16; ");
        assert!(said.contains(&lacks) && said.contains("0 rows are in both"), "{said}");
    }
    let page = folder.path().join("page.html");
    let made = flux_bench(&format!("report {row} --output {}", page.display()));
    assert!(made.status.success(), "{}", text(&made));
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("TP 2, e4m3.row:bf16") && page.contains("8-bit operands: "), "{page}");
}

#[test]
fn calls_with_the_rows_of_a_file_are_verified_and_a_wrong_element_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (steps, path) = (folder.path().join("steps"), folder.path().join("host.json"));
    std::fs::write(&steps, "64\n1\n7\n2\n").unwrap();
    for scales in ["tensor", "row", "block"] {
        let words = format!(
            "bench --transport host --tp 3 --shapes 128x384 --dtype fp8 --scales {scales} --calls 8 \
             --ops ag_gemm,gemm_rs,gemm_ar --trace-m {} --json {}",
            steps.display(),
            path.display()
        );
        let done = flux_bench(&words);
        assert!(done.status.success(), "{words}: {}", text(&done));
        let report: ServingReport = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert!(report.serving.len() == 3 && report.serving.iter().all(|row| row.verified));
        assert_eq!(report.serving[0].head.dtype, format!("e4m3.{scales}:bf16"));
    }
    let spoilt = "bench --transport host --tp 2 --shapes 128x256 --ms 16 --samples 1 --dtype fp8";
    let done = flux_bench(&format!("{spoilt} --spoil"));
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
    assert!(text(&done).contains("wrong elements, the first at row "), "{}", text(&done));
}

#[test]
fn what_8_bit_operands_cannot_have_is_refused_with_the_reason() {
    let bench = "bench --transport host --tp 2 --ms 16";
    for (words, why) in [
        ("--shapes 128x264 --dtype fp8 --ops ag_gemm", "264 is not a multiple of 16"),
        ("--shapes 128x320 --dtype fp8 --scales block", "320 is not a multiple of 128"),
        ("--shapes 128x256 --scales row", "--scales and --fast-accumulation are of --dtype fp8"),
        ("--shapes 128x256 --dtype fp8 --scales block --fast-accumulation", "leave the tensor"),
        ("--shapes 128x256 --dtype fp8 --scales none", "is none of tensor, row and block"),
    ] {
        let refused = flux_bench(&format!("{bench} {words}"));
        let said = text(&refused);
        assert!(!refused.status.success() && said.contains(why), "{words}: {said}");
    }
    let words = "lab first-call --transport host --shapes 128x256 --ms 16 --tp 2 --dtype fp8";
    let refused = flux_bench(words);
    let said = text(&refused);
    assert!(!refused.status.success() && said.contains("takes no fp8"), "{words}: {said}");
}

#[test]
fn a_call_with_8_bit_operands_is_traced() {
    for scales in ["tensor", "row", "block"] {
        let words = format!(
            "trace --transport host --ops ag_gemm --shapes 128x512 --ms 64 --tp 2 --calls 3 \
             --dtype fp8 --scales {scales} --summary"
        );
        let done = flux_bench(&words);
        assert!(done.status.success(), "{words}: {}", text(&done));
        assert!(text(&done).contains(&format!("e4m3.{scales}:bf16")), "{}", text(&done));
    }
}
