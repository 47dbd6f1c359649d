mod peers;

use super::*;
use crate::harness::Times;
use crate::report::{Enqueue, Late, Measured, Row, Verified};
use flux_core::{DType, OpKind, Problem, WorldSize};

fn flat(ms: f64) -> Times {
    Times { p10: ms, median: ms, p90: ms }
}

fn row(op: OpKind, m: usize, op_ms: f64) -> Row {
    let problem = Problem::new(op, m, 49152, 12288, DType::Bf16, WorldSize::new(4).unwrap()).unwrap();
    let measured = Measured { op: flat(op_ms), gemm: flat(1.0), comm: flat(0.5), serial: flat(1.5), late: Late::default(), enqueue: None };
    Row::new("gpt3", &problem, "a plan".into(), measured, Verified { max_rel_err: 1e-3, ok: true }, 30)
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
    report(4, vec![row(OpKind::AllGatherGemm, 512, 1.4), row(OpKind::AllGatherGemm, 1024, 1.2), row(OpKind::GemmReduceScatter, 512, 1.1)])
}

#[test]
fn the_table_has_every_row_and_says_what_ran_where() {
    let text = markdown(&both_ops(), None);
    assert!(text.starts_with("4 x A <GPU>, transport nvlink, TP 4, bf16, driver 580.1, NCCL 2.28.\n"));
    assert!(text.contains("\n30 rounds on 2026-11-21, commit `0123`: `flux-bench bench --tp 4`.\n"), "{text}");
    assert!(text.contains("| ag_gemm | gpt3 | 512 | 1.400 | 1.000 | 1.500 | 1.07 | 0.400 | 20.0 |\n"), "{text}");
    assert_eq!(text.lines().filter(|l| l.starts_with("| ag_gemm") || l.starts_with("| gemm_rs")).count(), 3, "{text}");
}

#[test]
fn an_efficiency_within_the_spread_is_a_dash() {
    let mut report = both_ops();
    report.rows[0].t_serial_ms.p90 += 0.6;
    assert!(markdown(&report, None).contains("| 1.07 | 0.400 | - |\n"), "{}", markdown(&report, None));
}

#[test]
fn the_picture_has_a_panel_for_each_op_and_a_point_for_each_time() {
    let picture = svg(&both_ops(), None);
    let count = |what: &str| picture.matches(what).count();
    // Those of the legend come on top: two points and a line of each kind.
    assert_eq!((count("<circle"), count("<rect"), count("<polyline")), (3 + 2, 3 + 2, 2 * 2 + 2));
    assert_eq!((count("n 49152, k 12288</text>"), count("A &lt;GPU&gt;"), count("<GPU>")), (2, 2, 0));
}

#[test]
fn heights_are_proportional_to_time() {
    let picture = svg(&both_ops(), None);
    let heights: Vec<f64> = picture
        .lines()
        .filter_map(|l| l.strip_prefix("<circle ")?.split("cy=\"").nth(1)?.split('"').next()?.parse().ok())
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
        report.write(&path).unwrap();
        read(&path).unwrap_err().to_string()
    };
    assert!(
        refused(|r| r.rows[1].verified = false).ends_with("ag_gemm gpt3 m 1024: the result was not verified, so its times are not shown")
    );
    assert!(refused(|r| r.rows.clear()).ends_with("has no rows"));
    assert!(
        refused(|r| r.rows[2].head.dtype = "fp16".into()).ends_with("gemm_rs gpt3 m 512 is of TP 4, fp16, and the first row of TP 4, bf16")
    );
    assert!(refused(|r| r.rows[1].head.tp = 2).ends_with("ag_gemm gpt3 m 1024 is of TP 2, bf16, and the first row of TP 4, bf16"));
    assert!(refused(|r| r.schema = 2).contains("has schema 2"));
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
    assert!(refused(|r| r.rows[0].overlap_efficiency = Some(0.1)).contains("make an overlap efficiency of"));
    for change in [
        |r: &mut Report| r.rows[1].head.model = "gpt3\u{1b}[31m".into(),
        |r: &mut Report| r.rows[1].head.model = "gpt3 | 0.001".into(),
        |r: &mut Report| r.origin.device = "a\nb".into(),
    ] {
        assert!(refused(change).contains("has texts with control characters, or a model with `|`"));
    }
    let mut piped = both_ops();
    piped.origin.command = "flux-bench bench | tee log".into();
    piped.write(&path).unwrap();
    assert_eq!(read(&path).unwrap().origin.command, piped.origin.command, "what is said of it may be a line of a shell");
}

/// The same of fp16.
fn of_fp16(mut report: Report) -> Report {
    report.rows.iter_mut().for_each(|row| row.head.dtype = "fp16".into());
    report
}

#[test]
fn results_of_fp16_are_said_to_be_and_stand_behind_those_of_bf16() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir(at("results")).unwrap();
    fs::write(at("README.md"), "<!-- results:begin -->\n<!-- results:end -->\n").unwrap();
    both_ops().write(&at("results/a-x4-nvlink.json")).unwrap();
    of_fp16(both_ops()).write(&at("results/a-x4-fp16-nvlink.json")).unwrap();
    report(2, vec![row(OpKind::AllGatherGemm, 512, 1.2)]).write(&at("results/a-x2-nvlink.json")).unwrap();
    let files = publish::render(root.path()).unwrap();
    let paths: Vec<_> = files.iter().map(|f| f.path.strip_prefix(root.path()).unwrap().to_str().unwrap()).collect();
    assert_eq!(paths, ["README.md", "docs/results.md", "docs/a-x4-nvlink.svg", "docs/a-x4-fp16-nvlink.svg", "docs/a-x2-nvlink.svg"]);
    let readme = &files[0].content;
    assert!(
        readme.contains("Measured on 4 and 2 GPUs because 8 were not available.\n\n4 x A <GPU>, transport nvlink, TP 4, bf16, "),
        "{readme}"
    );
    assert!(
        readme.contains(
            "\n| 4 x A <GPU>, transport nvlink, TP 4, fp16 | 1.07 to 1.36 | [a-x4-fp16-nvlink](docs/results.md#a-x4-fp16-nvlink)"
        ),
        "{readme}"
    );
    let title = |picture: &str, dtype: &str| picture.contains(&format!("<title>4 x A &lt;GPU&gt;, transport nvlink, TP 4, {dtype}: "));
    assert!(title(&files[2].content, "bf16") && title(&files[3].content, "fp16"));
}

#[test]
fn only_the_readme_between_its_marks_is_replaced() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir(at("results")).unwrap();
    fs::write(at("README.md"), "before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n").unwrap();
    assert!(publish::render(root.path()).is_err(), "no results");
    report(2, vec![row(OpKind::AllGatherGemm, 512, 1.2)]).write(&at("results/a-x2-nvlink.json")).unwrap();
    both_ops().write(&at("results/a-x4-nvlink.json")).unwrap();
    fs::write(at("results/links.json"), "{}").unwrap();
    report(2, vec![row(OpKind::AllGatherGemm, 512, 1.2)]).write(&at("results/a-x2-pcie.json")).unwrap();

    let files = publish::render(root.path()).unwrap();
    let paths: Vec<_> = files.iter().map(|f| f.path.strip_prefix(root.path()).unwrap().to_str().unwrap()).collect();
    assert_eq!(paths, ["README.md", "docs/results.md", "docs/a-x4-nvlink.svg", "docs/a-x2-nvlink.svg"]);
    let readme = &files[0].content;
    assert!(readme.starts_with("before\n<!-- results:begin -->\nMeasured on 4 and 2 GPUs because 8 were not available.\n"), "{readme}");
    assert!(readme.ends_with("\n<!-- results:end -->\nafter\n") && !readme.contains("old"), "{readme}");
    let line = |record: &str| format!("\n| 2 x A <GPU>, transport nvlink, TP 4, bf16 | 1.25 to 1.25 | {record} |\n");
    assert!(readme.contains(&line("[a-x2-nvlink](docs/results.md#a-x2-nvlink), [picture](docs/a-x2-nvlink.svg)")), "{readme}");
    assert!(!readme.contains("a-x2-pcie") && files[1].content.contains(&line("[a-x2-pcie](#a-x2-pcie)")), "{readme}");

    fs::write(at("README.md"), readme).unwrap();
    assert_eq!(publish::render(root.path()).unwrap(), files, "rendering what was rendered changes nothing");
}

#[test]
fn the_document_of_all_records_has_a_cell_for_each_row() {
    let mut report = both_ops();
    report.rows[1].enqueue_ms = Some(Enqueue { op: flat(0.0234), gemm: flat(0.004), comm: flat(0.009), serial: flat(0.013) });
    report.rows[1].late = Late { op: 2, ..Late::default() };
    report.rows[2].t_serial_ms.p90 += 0.6;
    let text = overview::overview(std::iter::once(("a-x4-nvlink", &report)));
    let expected = "\n## a-x4-nvlink\n\n4 x A <GPU>, transport nvlink, TP 4, bf16; 30 rounds on 2026-11-21, commit `0123` ([`results/a-x4-nvlink.json`](../results/a-x4-nvlink.json)).\n\n\
                    ```sh\nflux-bench bench --tp 4\n```\n\n\
                    | m | gpt3 ag_gemm | gpt3 gemm_rs |\n|--:|---|---|\n\
                    | 512 | 1.400 · 1.07 · 20 | 1.100 · 1.36 · - |\n\
                    | 1024 | 1.200 · 1.25 · 60 · 23 (2 late) | - |\n";
    assert!(text.ends_with(expected), "{text}");
}
