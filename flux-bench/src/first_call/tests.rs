use super::*;
use crate::report::Head;
use crate::stats::Times;
use flux_core::{DType, Problem};

fn row(first_call_ms: f64) -> FirstCall {
    let warm = Times { p10: 0.9, median: 1.0, p90: 1.1 };
    let problem = Problem::new(OpKind::AllGatherGemm, 512, 48, 16, DType::Bf16, shapes::world(2).unwrap()).unwrap();
    FirstCall {
        head: Head::new("gpt3", &problem),
        first_call_ms,
        warm_ms: warm,
        busy_ms: warm,
        first_enqueue_ms: 0.1,
        warm_enqueue_ms: warm,
    }
}

fn report(rows: Vec<FirstCall>) -> FirstCallReport {
    FirstCallReport { schema: SCHEMA, origin: crate::report::Origin::of_a_test("a device", 2, "flux-bench first-call"), at_most: 2.0, rows }
}

#[test]
fn one_slow_first_call_fails_the_whole_and_is_marked() {
    assert!(report(vec![row(1.9), row(2.0)]).kept());
    for slow in [2.1, f64::NAN] {
        let report = report(vec![row(1.9), row(slow)]);
        assert!(!report.kept());
        let marked: Vec<_> = table(&report).lines().map(|l| l.ends_with("TOO SLOW")).collect();
        assert_eq!(marked.iter().filter(|&&m| m).count(), 1);
        assert!(marked[marked.len() - 1]);
    }
}

#[test]
fn a_first_call_is_timed_on_the_host_too() {
    let world = shapes::world(2).unwrap();
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        let problem = Problem::new(op, 16, 32, 32, DType::Bf16, world).unwrap();
        let row = timing::first_call("none", &problem, Select::Host).unwrap();
        assert!(row.first_call_ms > 0.0 && row.warm_ms.median > 0.0 && row.busy_ms.median > 0.0, "{row:?}");
        assert_eq!((row.head.op.as_str(), row.head.m, row.head.tp), (op.name(), 16, 2));
    }
}
