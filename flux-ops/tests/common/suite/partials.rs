//! Partial sums in fp32: one rounding, no overflow before the total, the same bits everywhere.

use super::{Case, Check, Machine, build, build_case, call, defaults, few_rows, unaligned};
use crate::common::{OpOptions, Values};
use flux_core::plan::{CommMode, KSplit, Plan, RowMapping};
use flux_core::{OpKind, Partials};
use flux_ops::BuildError;
use half::{bf16, f16};

const WORLDS: [u32; 7] = [2, 3, 4, 5, 6, 7, 8];

/// The worlds and ops that the machine has.
fn calls(machine: Machine) -> impl Iterator<Item = (u32, OpKind)> {
    let ops = move || machine.ops().iter().copied().filter(|op| op.reduces());
    machine.worlds(&WORLDS).into_iter().flat_map(move |world| ops().map(move |op| (world, op)))
}

/// The op's own choice, and every way in which partial sums are sent.
fn plans(machine: Machine, op: OpKind) -> Vec<Option<Plan>> {
    let per_shard = [1, 2].map(|group| RowMapping::PerShard { group });
    let flattened = [RowMapping::Flattened, RowMapping::FlattenedTwoExchanges];
    let rows = match (machine, op) {
        // Messages carry all rows of an AllReduce at once, and nodes have no flattened rows.
        (Machine::Messages(_), OpKind::GemmAllReduce) => vec![RowMapping::Flattened],
        (Machine::TwoNodes { .. }, _) => per_shard.to_vec(),
        _ => per_shard.into_iter().chain(flattened).collect(),
    };
    let of_tile = |tile| {
        let cut = move |rows| {
            [KSplit::Whole, KSplit::SplitK(2)].map(|k| Some(Plan { rows, k, ..Plan::of(tile) }))
        };
        rows.clone().into_iter().flat_map(cut)
    };
    machine.tiles().into_iter().take(1).flat_map(of_tile).chain([None]).collect()
}

pub fn f32_partials_give_the_exact_result_of_integers(machine: Machine) {
    for (world, op) in calls(machine) {
        let case =
            Case::<bf16>::new(op, few_rows(machine, op, world), world, Values::Integers, 211)
                .with_residual(Values::Integers);
        let case = case.with_partials(Partials::F32);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            for plan in plans(machine, op) {
                let op = build_case(&case, OpOptions::of(plan), node);
                case.assert_equal(
                    &expected,
                    &op,
                    node.rank,
                    &call(&op, &case, node).unwrap(),
                    "a call",
                );
            }
        });
    }
}

/// Within the bound of one rounding, with the same bits in every run and, of an AllReduce, on every
/// rank.
pub fn f32_partials_are_rounded_once(machine: Machine) {
    for (world, op) in calls(machine) {
        let case = Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Reals, 223)
            .with_partials(Partials::F32);
        let expected = case.expected_on(machine);
        let outputs = machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::default(), node);
            let y = call(&op, &case, node).unwrap();
            case.assert_close(&expected, &op, node.rank, &y, "a call");
            assert!(call(&op, &case, node).unwrap() == y, "another run has other bits");
            y
        });
        assert!(
            op != OpKind::GemmAllReduce || outputs.iter().all(|y| *y == outputs[0]),
            "ranks have different bits"
        );
    }
}

pub fn f32_partials_overflow_only_where_the_total_does(machine: Machine) {
    for (world, op) in calls(machine) {
        let case = Case::<f16>::new(op, few_rows(machine, op, world), world, Values::Integers, 227)
            .with_large_partials();
        let exact = case.clone().with_partials(Partials::F32);
        let expected = exact.expected_on(machine);
        machine.run(world, defaults, |node| {
            for plan in plans(machine, op) {
                let rounded = build_case(&case, OpOptions::of(plan), node);
                let y = call(&rounded, &case, node).unwrap();
                assert!(
                    y.iter().all(|y| !y.is_finite()),
                    "{op}: fp16 partial sums of {world} ranks are beyond fp16"
                );
                let op = build_case(&exact, OpOptions::of(plan), node);
                exact.assert_equal(
                    &expected,
                    &op,
                    node.rank,
                    &call(&op, &exact, node).unwrap(),
                    "a call",
                );
            }
        });
    }
}

/// Equal rows have equal bits, in calls of any `m`.
pub fn f32_partials_of_batch_invariant_ops_have_their_own_bits(machine: Machine) {
    for (world, op) in calls(machine).filter(|&(world, _)| world <= 4) {
        let [_, n, k] = unaligned(machine, op, world);
        let of = |m| {
            let case = Case::<bf16>::new(op, [m, n, k], world, Values::Reals, 229)
                .with_partials(Partials::F32);
            case.with_rows_of(Values::Reals, |_| 1)
        };
        let cases = [1, 7, 33, 200].map(of);
        let rows = machine.run(world, defaults, |node| {
            let mut rows = Vec::new();
            for case in &cases {
                let op = build_case(
                    case,
                    OpOptions { batch_invariant: true, ..OpOptions::default() },
                    node,
                );
                rows.extend(call(&op, case, node).unwrap().chunks_exact(n).map(<[bf16]>::to_vec));
            }
            rows
        });
        let rows: Vec<_> = rows.into_iter().flatten().collect();
        assert!(
            rows.iter().all(|row| *row == rows[0]),
            "{op} of {world} ranks: equal rows have different bits"
        );
    }
}

pub fn f32_partials_refuse_a_sum_by_the_library(machine: Machine) {
    machine.run(2, defaults, |node| {
        let plan = Plan {
            comm: CommMode::Sequential,
            rows: RowMapping::Flattened,
            ..Plan::of(machine.tiles()[0])
        };
        let options = OpOptions { partials: Partials::F32, ..OpOptions::of(plan) };
        for op in machine.ops().iter().copied().filter(|op| op.reduces()) {
            let refused = build::<bf16>(op, few_rows(machine, op, 2), options, &node.comm);
            assert!(matches!(refused, Err(BuildError::SequentialPartials { .. })), "{refused:?}");
        }
    });
}

pub fn ranks_with_other_partials_do_not_build(machine: Machine) {
    machine.run(2, defaults, |node| {
        let partials = if node.rank.get() == 0 { Partials::F32 } else { Partials::Output };
        let options = OpOptions { partials, ..OpOptions::default() };
        let error = build::<bf16>(OpKind::GemmReduceScatter, [16, 64, 64], options, &node.comm)
            .unwrap_err()
            .to_string();
        assert!(error.contains("bf16+f32"), "{error}");
    });
}
