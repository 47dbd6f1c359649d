mod peers;

use super::*;
use crate::atomic_file;
use crate::harness::{Times, Verdict};
use crate::record::{read_ops as read, read_peers};
use crate::report::{Each, Late, Measured, PEERS_SCHEMA, Row, SCHEMA};
use flux_core::{DType, OpKind, Problem, WorldSize};
use std::fs;

fn flat(ms: f64) -> Times {
    Times { p10: ms, median: ms, p90: ms }
}

fn row(op: OpKind, m: usize, op_ms: f64) -> Row {
    let problem =
        Problem::new(op, m, 49152, 12288, DType::Bf16, WorldSize::new(4).unwrap()).unwrap();
    let measured = Measured {
        times: Each { op: flat(op_ms), gemm: flat(1.0), comm: flat(0.5), serial: flat(1.5) },
        late: Late::default(),
        enqueue: None,
    };
    Row::new(
        "gpt3",
        &problem,
        "a plan".into(),
        measured,
        Verdict { max_error: 1e-3, max_reference: 1.0, ..Verdict::default() },
        30,
    )
}

fn report(gpus: u32, rows: Vec<Row>) -> Report {
    Report {
        schema: SCHEMA,
        origin: crate::report::Origin::of_a_test("A <GPU>", gpus, "flux-bench bench --tp 4"),
        transport: "nvlink".into(),
        placement: crate::report::Placement::THREADS,
        nccl: Some("2.28".into()),
        rows,
    }
}

fn both_ops() -> Report {
    report(
        4,
        vec![
            row(OpKind::AllGatherGemm, 512, 1.4),
            row(OpKind::AllGatherGemm, 1024, 1.2),
            row(OpKind::GemmReduceScatter, 512, 1.1),
        ],
    )
}

#[test]
fn the_table_has_every_row_and_says_what_ran_where() {
    let text = markdown(&both_ops(), None);
    assert!(
        text.starts_with("4 x A <GPU>, transport nvlink, TP 4, bf16, driver 580.1, NCCL 2.28.\n")
    );
    assert!(
        text.contains("\n30 rounds on 2026-11-21, commit `0123`: `flux-bench bench --tp 4`.\n"),
        "{text}"
    );
    assert!(
        text.contains("| ag_gemm | gpt3 | 512 | 1.400 | 1.000 | 1.500 | 1.07 | 0.400 | 20.0 |\n"),
        "{text}"
    );
    assert_eq!(
        text.lines().filter(|l| l.starts_with("| ag_gemm") || l.starts_with("| gemm_rs")).count(),
        3,
        "{text}"
    );
}

#[test]
fn an_efficiency_within_the_spread_is_a_dash() {
    let mut report = both_ops();
    report.rows[0].t_serial_ms.p90 += 0.6;
    assert!(
        markdown(&report, None).contains("| 1.07 | 0.400 | - |\n"),
        "{}",
        markdown(&report, None)
    );
}

#[test]
fn the_picture_has_a_panel_for_each_op_and_a_point_for_each_time() {
    let picture = svg(&both_ops(), None);
    let count = |what: &str| picture.matches(what).count();
    // Those of the legend come on top: two points and a line of each kind.
    assert_eq!((count("<circle"), count("<rect"), count("<polyline")), (3 + 2, 3 + 2, 2 * 2 + 2));
    assert_eq!(
        (count("n 49152, k 12288</text>"), count("A &lt;GPU&gt;"), count("<GPU>")),
        (2, 2, 0)
    );
}

#[test]
fn heights_are_proportional_to_time() {
    let picture = svg(&both_ops(), None);
    let heights: Vec<f64> = picture
        .lines()
        .filter_map(|l| {
            l.strip_prefix("<circle ")?.split("cy=\"").nth(1)?.split('"').next()?.parse().ok()
        })
        .skip(2)
        .collect();
    // 1.4, 1.2 and 1.1 on a scale from 1.0 to 1.5 over the same 180 pixels.
    assert_eq!(heights, [130.0, 202.0, 238.0]);
}

#[test]
fn one_row_is_a_picture_too() {
    let picture = svg(&report(0, vec![row(OpKind::AllGatherGemm, 512, 1.0)]), None);
    assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
}

#[test]
fn what_must_not_be_shown_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let refused = |change: fn(&mut Report)| {
        let mut report = both_ops();
        change(&mut report);
        atomic_file::write_json(&path, &report).unwrap();
        read(&path).unwrap_err().to_string()
    };
    assert!(
        refused(|r| r.rows[1].verified = false).ends_with(
            "ag_gemm gpt3 m 1024: the result was not verified, so its times are not shown"
        )
    );
    assert!(refused(|r| r.rows.clear()).ends_with("has no rows"));
    assert!(
        refused(|r| r.rows[2].head.dtype = "fp16".into())
            .ends_with("gemm_rs gpt3 m 512 is of TP 4, fp16, and the first row of TP 4, bf16")
    );
    assert!(
        refused(|r| r.rows[1].head.tp = 2)
            .ends_with("ag_gemm gpt3 m 1024 is of TP 2, bf16, and the first row of TP 4, bf16")
    );
    assert!(refused(|r| r.schema = SCHEMA + 1).contains(&format!("has schema {}", SCHEMA + 1)));
    for change in [
        |r: &mut Report| r.rows[0].t_gemm_ms.median = 0.0,
        |r: &mut Report| r.rows[0].t_op_ms.median = 1e12,
        |r: &mut Report| r.rows[0].t_serial_ms.median = f64::INFINITY,
    ] {
        let why = refused(change);
        assert!(why.contains("cannot be compared") || why.contains("is not what"), "{why}");
    }
    assert!(refused(|r| r.rows[0].head.m = 0).contains("is no shape"));
    assert!(refused(|r| r.rows[0].head.op = "gemm".into()).contains("is no shape"));
    assert!(
        refused(|r| r.rows[0].overlap_efficiency = Some(0.1))
            .contains("make an overlap efficiency of")
    );
    for change in [
        |r: &mut Report| r.rows[1].head.model = "gpt3\u{1b}[31m".into(),
        |r: &mut Report| r.rows[1].head.model = "gpt3 | 0.001".into(),
        |r: &mut Report| r.origin.device = "a\nb".into(),
    ] {
        assert!(refused(change).contains("has texts with control characters, or a model with `|`"));
    }
    let mut piped = both_ops();
    piped.origin.command = "flux-bench bench | tee log".into();
    atomic_file::write_json(&path, &piped).unwrap();
    assert_eq!(
        read(&path).unwrap().origin.command,
        piped.origin.command,
        "what is said of it may be a line of a shell"
    );
}

#[test]
fn a_file_of_another_kind_is_named_with_what_takes_it() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    let text = read(&results.join("h100-x4-peers.json")).unwrap_err().to_string();
    assert!(
        text.contains(
            "is what `flux-bench lab peers --json` writes, not `flux-bench bench --json`: name it \
             with --peers"
        ),
        "{text}"
    );
    let text =
        read_peers(&results.join("h100-x2-nvlink.json"), &both_ops()).unwrap_err().to_string();
    assert!(
        text.contains(
            "is what `flux-bench bench --json` writes, not `flux-bench lab peers --json`"
        ),
        "{text}"
    );
    let text = read(&results.join("h200-x4-first-call.json")).unwrap_err().to_string();
    assert!(text.contains("is what `flux-bench lab first-call --json` writes"), "{text}");
    for (name, command) in [
        ("h200-x4-nvlink-layers.json", "layers"),
        ("h200-x4-megatron.json", "megatron"),
        ("h200-x4-vllm.json", "vllm"),
    ] {
        let text = read(&results.join(name)).unwrap_err().to_string();
        assert!(
            text.ends_with(&format!(
                "is what `python -m flux_tp.bench {command} --json` writes, not `flux-bench bench \
                 --json`: show it with `python -m flux_tp.bench show`"
            )),
            "{text}"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.json");
    fs::write(&other, "{}").unwrap();
    assert!(
        read(&other)
            .unwrap_err()
            .to_string()
            .ends_with("is not what `flux-bench bench --json` writes")
    );
}

#[test]
fn efficiencies_have_a_cell_for_each_row() {
    let mut report = both_ops();
    report.rows[2].t_serial_ms.p90 += 0.6;
    let text = tables::efficiencies(&[("a", &report), ("b", &both_ops())]);
    let expected = "| record | op | model | 512 | 1024 |\n|---|---|---|--:|--:|\n\
                    | `a` | ag_gemm | gpt3 | 20 | 60 |\n| `a` | gemm_rs | gpt3 | - | - |\n\
                    | `b` | ag_gemm | gpt3 | 20 | 60 |\n| `b` | gemm_rs | gpt3 | 80 | - |\n";
    assert_eq!(text, expected);
}

#[test]
fn a_summary_has_a_line_for_each_record() {
    let other = report(2, vec![row(OpKind::AllGatherGemm, 2048, 0.9)]);
    let text = tables::summary(&[("a-x4-nvlink", &both_ops()), ("a-x2-nvlink", &other)]);
    let lines: Vec<&str> = text.lines().skip(2).collect();
    let expected = [
        "| `a-x4-nvlink` | - | 0.73 to 0.93 | 0.80 to 0.80 | 0 of 1 |",
        "| `a-x2-nvlink` | - | - | 0.60 to 0.60 | 1 of 1 |",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn only_rows_that_are_asked_for_are_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a-x4-nvlink.json");
    atomic_file::write_json(&path, &both_ops()).unwrap();
    let shown = |table, ms: &[u32]| {
        rendered(&Args {
            files: vec![path.clone()],
            table,
            ms: ms.to_vec(),
            svg: None,
            peers: None,
            compare: false,
        })
    };
    let rows = |text: String| {
        text.lines()
            .filter(|line| line.starts_with("| ag_gemm") || line.starts_with("| gemm_rs"))
            .count()
    };
    assert_eq!(rows(shown(None, &[]).unwrap()), 3);
    assert_eq!(rows(shown(Some(Table::Rows), &[512]).unwrap()), 2);
    assert!(shown(Some(Table::Summary), &[1024]).unwrap().contains("| `a-x4-nvlink` |"));
    assert!(shown(None, &[77]).unwrap_err().to_string().ends_with("has no rows with m of [77]"));
}
