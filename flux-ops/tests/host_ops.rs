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

suite_tests!(
    on_host:
    bf16_integers_give_the_exact_result,
    f16_integers_give_the_exact_result,
    random_numbers_stay_within_the_derived_bound,
    no_schedule_changes_a_bit,
    small_shards_give_the_right_result_however_they_are_cut,
    runs_give_the_same_bits,
    ops_share_a_communicator_and_its_workspace,
    a_late_rank_is_waited_for,
    row_strides_are_honoured,
    a_refused_call_launches_nothing,
    ranks_that_disagree_are_told_so,
    what_cannot_be_built_is_refused_on_every_rank,
    a_rank_that_cannot_build_is_named_to_the_others,
    a_rank_that_never_calls_is_named_by_the_others,
    the_workspace_is_known_before_it_is_taken,
    an_integer_bias_is_added_exactly_once,
    activations_stay_within_the_derived_bound,
    ranks_agree_on_bias_and_activation,
    a_bias_that_does_not_fit_is_refused,
);

#[test]
fn many_calls_in_a_row() {
    suite::many_calls_in_a_row(MACHINE, 500);
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
