use super::*;
use crate::harness::Times;
use crate::report::Head;
use flux_core::{DType, OpKind, Problem};
use half::bf16;

fn row(first_call_ms: f64) -> FirstCallRow {
    let warm = Times { p10: 0.9, median: 1.0, p90: 1.1 };
    let problem =
        Problem::new(OpKind::AllGatherGemm, 512, 48, 16, DType::Bf16, shapes::world(2).unwrap())
            .unwrap();
    FirstCallRow {
        head: Head::new("gpt3", &problem),
        first_call_ms,
        warm_ms: warm,
        first_enqueue_ms: 0.1,
        warm_enqueue_ms: warm,
    }
}

fn report(rows: Vec<FirstCallRow>) -> FirstCallReport {
    FirstCallReport {
        schema: SCHEMA,
        origin: Origin::of_a_test("a device", 2, "flux-bench first-call"),
        at_most: Some(2.0),
        rows,
    }
}

#[test]
fn one_slow_first_call_fails_the_whole_and_is_marked() {
    assert!(report(vec![row(1.9), row(2.0)]).kept());
    for slow in [2.1, f64::NAN] {
        let report = report(vec![row(1.9), row(slow)]);
        assert!(!report.kept());
        let text = table(&report);
        let marked: Vec<_> = text
            .lines()
            .filter(|l| l.starts_with("ag_gemm"))
            .map(|l| l.ends_with("TOO SLOW"))
            .collect();
        assert_eq!((marked, text.matches("TOO SLOW").count()), (vec![false, true], 1), "{text}");
    }
}

#[test]
fn the_host_is_not_judged_and_has_no_rests() {
    let on_gpus = report(vec![row(100.0)]);
    assert!(
        table(&on_gpus).contains("first/warm at most 2\nwarm: after as long a rest"),
        "{}",
        table(&on_gpus)
    );
    let mut on_host = FirstCallReport { at_most: None, ..on_gpus };
    on_host.origin.gpus = 0;
    let text = table(&on_host);
    assert!(
        on_host.kept()
            && !text.contains("TOO SLOW")
            && !text.contains("at most")
            && text.contains("\nno call after a rest\n"),
        "{text}"
    );
    let json = serde_json::to_value(&on_host).unwrap();
    assert!(
        json.get("at_most").is_none()
            && serde_json::from_value::<FirstCallReport>(json).unwrap() == on_host
    );
}

#[test]
fn a_first_call_is_timed_on_the_host_too() {
    let world = shapes::world(2).unwrap();
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        let problem = Problem::new(op, 16, 32, 32, DType::Bf16, world).unwrap();
        let row =
            timing::first_call::<bf16>("none", &problem, Select::Host, Defect::default()).unwrap();
        assert!(row.first_call_ms > 0.0 && row.warm_ms.median > 0.0, "{row:?}");
        assert_eq!((row.head.op.as_str(), row.head.m, row.head.tp), (op.name(), 16, 2));
        let error =
            timing::first_call::<bf16>("none", &problem, Select::Host, Defect { spoil: true })
                .unwrap_err()
                .to_string();
        assert!(error.contains("rank 1: the result of call 0 is wrong: "), "{error}");
    }
}
