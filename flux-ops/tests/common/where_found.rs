//! Tests that need more than a processor: run where it is found, and skipped out loud where not.

use super::{Machine, skipped};
use std::sync::Once;

/// Runs a test of module `module` on the machine; where there is none it is skipped, and why is
/// said once for all of them.
pub fn run(module: &str, found: Result<Machine, String>, test: fn(Machine)) {
    static SAID: Once = Once::new();
    match found {
        Ok(machine) => test(machine),
        Err(why) => {
            skipped::count(module, &why);
            SAID.call_once(|| skipped::say(module, &why));
        }
    }
}

/// A test for each of the suite's functions that are named, run by `$on`.
#[macro_export]
macro_rules! suite_tests {
    ($on:ident: $($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            $on($crate::common::suite::$name);
        })*
    };
}

/// Tests of what must hold on any machine, run by `$on`.
#[macro_export]
macro_rules! tests_of_any_machine {
    ($on:ident) => {
        suite_tests!(
            $on:
            bf16_integers_give_the_exact_result,
            f16_integers_give_the_exact_result,
            random_numbers_stay_within_the_derived_bound,
            no_chunk_and_no_group_changes_a_bit,
            runs_give_the_same_bits,
            all_ranks_of_an_all_reduce_have_the_same_bits,
            ops_share_a_communicator_and_its_workspace,
            a_late_rank_is_waited_for,
            row_strides_are_honoured,
            a_refused_call_launches_nothing,
            ranks_that_disagree_are_told_so,
            what_cannot_be_built_is_refused_on_every_rank,
            a_rank_that_cannot_build_is_named_to_the_others,
            a_rank_that_never_calls_is_named_by_the_others,
            a_rank_that_leaves_is_named_at_once,
            the_workspace_is_known_before_it_is_taken,
            an_integer_bias_is_added_exactly_once,
            activations_stay_within_the_derived_bound,
            ranks_agree_on_bias_and_activation,
            gates_multiply_their_ups,
            gated_rows_are_gathered_and_of_any_number,
            what_cannot_be_gated_is_refused,
            several_weights_share_the_gathered_rows,
            several_weights_take_any_number_of_rows,
            what_several_weights_cannot_be_is_refused,
            a_bias_that_does_not_fit_is_refused,
            an_integer_residual_is_added_exactly_once,
            residuals_stay_within_the_derived_bound,
            strides_of_a_residual_are_honoured,
            ranks_agree_on_the_residual,
            a_residual_that_does_not_fit_is_refused,
            finished_rows_are_normalised,
            a_norm_of_no_rows_is_nothing,
            ranks_agree_on_the_norm,
            a_norm_that_does_not_fit_is_refused,
            weights_of_k_and_n_give_the_same_bits,
            weights_that_do_not_lie_as_built_are_refused,
            gathered_rows_are_those_of_all_ranks,
            gathered_rows_of_calls_in_a_row_do_not_mix,
            a_call_without_rows_gathers_none,
            gathered_rows_that_do_not_fit_are_refused,
            small_shards_give_the_right_result_however_they_are_cut,
            rows_change_with_every_call,
            evicted_programs_are_made_again,
            prepared_programs_stay,
            rows_that_do_not_fit_are_refused,
            ops_hold_no_memory_of_their_own,
            rows_of_batch_invariant_ops_have_their_own_bits,
            tiles_change_no_bit_of_a_batch_invariant_op,
            the_owner_of_a_row_shows_in_its_bits_by_other_plans,
            plans_without_one_order_are_refused,
            f32_partials_give_the_exact_result_of_integers,
            f32_partials_are_rounded_once,
            f32_partials_overflow_only_where_the_total_does,
            f32_partials_of_batch_invariant_ops_have_their_own_bits,
            f32_partials_refuse_a_sum_by_the_library,
            ranks_with_other_partials_do_not_build,
            scaled_integers_give_the_exact_result,
            scaled_numbers_stay_within_the_bound,
            scaled_rows_change_with_every_call,
            quantised_rows_have_the_bits_of_the_host,
            quantised_rows_are_gathered_with_their_scales,
            what_cannot_be_quantised_is_refused,
            quantised_norms_have_the_bits_of_the_quantizer,
            scaled_products_have_quantised_norms,
            quantised_norms_are_gathered_as_they_are,
            quantised_norms_of_no_rows_are_nothing,
            a_quantised_norm_that_does_not_fit_is_refused,
            ranks_agree_on_the_form_of_the_norm,
            scales_that_do_not_fit_are_refused,
            unequal_parts_of_n_and_k_give_the_exact_result,
            unequal_parts_of_n_and_k_stay_within_the_bound,
            a_vocabulary_is_split_in_groups_of_8,
            operands_of_another_part_are_refused,
            fewer_groups_of_8_than_ranks_are_refused,
        );
    };
}

/// Tests of sequential calls, run by `$on`.
#[macro_export]
macro_rules! tests_of_sequential_calls {
    ($on:ident) => {
        suite_tests!(
            $on:
            sequential_calls_share_the_workspace_with_others,
            sequential_integers_of_two_ranks_are_exact,
            sequential_calls_finish_bf16,
            sequential_calls_finish_f16,
            sequential_calls_honour_row_strides,
            sequential_calls_normalise,
        );
    };
}

/// Tests of what must hold wherever messages carry, run by `$on`.
#[macro_export]
macro_rules! tests_of_messages {
    ($on:ident) => {
        suite_tests!(
            $on:
            ops_of_different_sizes_share_the_workspace_and_the_wrap_of_epochs,
            rows_with_gaps_are_sent_without_them,
            gathered_rows_are_those_of_all_ranks,
            gathered_rows_of_calls_in_a_row_do_not_mix,
            unequal_parts_of_n_and_k_give_the_exact_result,
            unequal_parts_of_n_and_k_stay_within_the_bound,
            what_messages_cannot_carry_is_refused_before_anything_is_sent,
            f32_partials_give_the_exact_result_of_integers,
            f32_partials_are_rounded_once,
            f32_partials_overflow_only_where_the_total_does,
            a_rank_that_never_calls_is_named_and_the_rest_make_a_new_group,
            streams_that_are_full_end_when_a_rank_never_calls,
            a_rank_that_leaves_is_named_at_once,
        );
    };
}
