//! Both ops on the host transport.

mod common;

use common::{AnyOp, Case, Machine, OPS, Plan, Values, suite};
use flux_ops::{BuildError, Location, TimelineError};
use half::bf16;

const MACHINE: Machine = Machine::Host;

/// Runs a test with ranks as threads.
fn on_host(test: impl FnOnce(Machine)) {
    test(MACHINE);
}

tests_of_any_machine!(on_host);

#[test]
fn many_calls_in_a_row() {
    suite::many_calls_in_a_row(MACHINE, 500);
}

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    suite::calls_in_different_orders_fail_on_every_rank(MACHINE);
}

#[test]
fn a_time_line_is_for_gpus_and_for_ops_that_trace() {
    let case = Case::<bf16>::new(OPS[0], [16, 16, 16], 1, Values::Integers, 1);
    MACHINE.run(1, suite::defaults, |node| {
        let traced = AnyOp::<bf16>::build(OPS[0], [16, 16, 16], Plan { trace: true, ..Plan::default() }, &node.comm);
        assert!(matches!(traced, Err(BuildError::Trace { place: Location::Host })));
        let op = AnyOp::of(&case, Plan::default(), node);
        assert_eq!(op.timeline(node.stream()), Err(TimelineError::NotTraced));
    });
}

/// Ops are shared between threads, as a model's layers are.
#[test]
fn an_op_can_be_used_from_any_thread() {
    fn shared<T: Send + Sync>() {}
    shared::<flux_ops::AllGatherGemm<bf16>>();
    shared::<flux_ops::GemmReduceScatter<half::f16>>();
}
