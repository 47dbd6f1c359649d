//! Both ops on the host transport.

mod common;

use common::{AnyOp, Case, Machine, OPS, Plan, Values, suite};
use flux_ops::{BuildError, Location, TimelineError};
use half::bf16;

const MACHINE: Machine = Machine::Host;

#[test]
fn bf16_integers_give_the_exact_result() {
    suite::bf16_integers_give_the_exact_result(MACHINE);
}

#[test]
fn f16_integers_give_the_exact_result() {
    suite::f16_integers_give_the_exact_result(MACHINE);
}

#[test]
fn random_numbers_stay_within_the_derived_bound() {
    suite::random_numbers_stay_within_the_derived_bound(MACHINE);
}

#[test]
fn no_schedule_changes_a_bit() {
    suite::no_schedule_changes_a_bit(MACHINE);
}

#[test]
fn runs_give_the_same_bits() {
    suite::runs_give_the_same_bits(MACHINE);
}

#[test]
fn ops_share_a_communicator_and_its_workspace() {
    suite::ops_share_a_communicator_and_its_workspace(MACHINE);
}

#[test]
fn many_calls_in_a_row() {
    suite::many_calls_in_a_row(MACHINE, 500);
}

#[test]
fn a_late_rank_is_waited_for() {
    suite::a_late_rank_is_waited_for(MACHINE);
}

#[test]
fn row_strides_are_honoured() {
    suite::row_strides_are_honoured(MACHINE);
}

#[test]
fn a_refused_call_launches_nothing() {
    suite::a_refused_call_launches_nothing(MACHINE);
}

#[test]
fn ranks_that_disagree_are_told_so() {
    suite::ranks_that_disagree_are_told_so(MACHINE);
}

#[test]
fn what_cannot_be_built_is_refused_on_every_rank() {
    suite::what_cannot_be_built_is_refused_on_every_rank(MACHINE);
}

#[test]
fn a_rank_that_cannot_build_is_named_to_the_others() {
    suite::a_rank_that_cannot_build_is_named_to_the_others(MACHINE);
}

#[test]
fn a_rank_that_never_calls_is_named_by_the_others() {
    suite::a_rank_that_never_calls_is_named_by_the_others(MACHINE);
}

#[test]
fn the_workspace_is_known_before_it_is_taken() {
    suite::the_workspace_is_known_before_it_is_taken(MACHINE);
}

#[test]
fn an_integer_bias_is_added_exactly_once() {
    suite::an_integer_bias_is_added_exactly_once(MACHINE);
}

#[test]
fn activations_stay_within_the_derived_bound() {
    suite::activations_stay_within_the_derived_bound(MACHINE);
}

#[test]
fn ranks_agree_on_bias_and_activation() {
    suite::ranks_agree_on_bias_and_activation(MACHINE);
}

#[test]
fn a_bias_that_does_not_fit_is_refused() {
    suite::a_bias_that_does_not_fit_is_refused(MACHINE);
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
