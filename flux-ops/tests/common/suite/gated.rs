//! Gates and ups: multiplied in every element, in both layouts, and refused where they cannot lie.

use super::{Case, Check, Machine, Number, build, build_case, call, call_gathered, defaults};
use crate::common::{OPS, OpOptions, Values};
use flux_core::plan::{KSplit, Plan};
use flux_core::{OpKind, ProblemError, TileShape};
use flux_ops::{Activation, BuildError, GateLayout, WeightLayout};
use half::{bf16, f16};

const WORLDS: [u32; 4] = [1, 2, 3, 4];

/// Rows and columns that end within a tile, but not `m` within a shard. From three ranks on the
/// first has 16 gates and ups more than the last.
fn shape(machine: Machine, world: u32) -> [usize; 3] {
    let (w, more) = (world as usize, world as usize / 3 * 16);
    if machine == Machine::Host {
        [17 * w, 80 * w + more, 24]
    } else {
        [129 * w, 336 * w + more, 200]
    }
}

/// None, and one with split sums. The host's have tiles of whole gates.
fn plans(machine: Machine) -> [Option<Plan>; 2] {
    let tile =
        if machine == Machine::Host { TileShape::new(16, 32, 16) } else { machine.tiles()[0] };
    [None, Some(Plan { k: KSplit::SplitK(2), ..Plan::of(tile) })]
}

fn multiplies<T: Number>(machine: Machine, activations: &[Activation]) {
    for world in machine.worlds(&WORLDS) {
        let finishes = GateLayout::ALL
            .into_iter()
            .flat_map(|layout| activations.iter().map(move |&activation| (layout, activation)));
        let cases: Vec<_> = finishes
            .flat_map(|finish| [Values::Integers, Values::Reals].map(|values| (finish, values)))
            .filter(|((_, activation), values)| *values == Values::Reals || activation.is_exact())
            .map(|((layout, activation), values)| {
                let case = Case::<T>::new(
                    OpKind::AllGatherGemm,
                    shape(machine, world),
                    world,
                    values,
                    211,
                );
                let case = case.finished(values == Values::Reals, values, activation).gated(layout);
                (case.expected_on(machine), case, values)
            })
            .collect();
        machine.run(world, defaults, |node| {
            for ((expected, case, values), plan) in
                cases.iter().flat_map(|case| plans(machine).map(|plan| (case, plan)))
            {
                let op = build_case(case, OpOptions::of(plan), node);
                let y = call(&op, case, node).unwrap();
                let check = if *values == Values::Integers {
                    Case::assert_equal
                } else {
                    Case::assert_close
                };
                check(case, expected, &op, node.rank, &y, "a call");
            }
        });
    }
}

pub fn gates_multiply_their_ups(machine: Machine) {
    // Without a rounding, so that an up of another column shows; the others are as models use them.
    multiplies::<bf16>(machine, &[Activation::Relu, Activation::Silu]);
    multiplies::<f16>(machine, &[Activation::Gelu]);
}

pub fn gated_rows_are_gathered_and_of_any_number(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let [m, n, k] = shape(machine, world);
        let of_rows = |m| {
            let case =
                Case::<bf16>::new(OpKind::AllGatherGemm, [m, n, k], world, Values::Reals, 223);
            case.finished(true, Values::Reals, Activation::Silu).gated(GateLayout::Interleaved)
        };
        let cases: Vec<_> = [m, 1, 7, m - 1]
            .map(of_rows)
            .into_iter()
            .map(|case| (case.expected_on(machine), case))
            .collect();
        let gathers =
            Case::<bf16>::new(OpKind::AllGatherGemm, [m, n, k], world, Values::Reals, 227)
                .gated(GateLayout::Concatenated);
        machine.run(world, defaults, |node| {
            let op = build_case(&cases[0].1, OpOptions::default(), node);
            for (expected, case) in &cases {
                case.assert_close(
                    expected,
                    &op,
                    node.rank,
                    &call(&op, case, node).unwrap(),
                    &format!("m = {}", case.problem.m()),
                );
            }
            let op = build_case(&gathers, OpOptions::default(), node);
            assert!(
                call_gathered(&op, &gathers, node, 8).1 == gathers.all_x(),
                "other rows: {}",
                op.explain()
            );
        });
    }
}

pub fn what_cannot_be_gated_is_refused(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        let [m, n, k] = shape(machine, world);
        machine.run(world, defaults, |node| {
            let gated = OpOptions {
                gates: Some(GateLayout::Concatenated),
                workers: node.workers,
                ..OpOptions::default()
            };
            let refused =
                |shape, options| build::<bf16>(OPS[0], shape, options, &node.comm).unwrap_err();
            let w = world as usize;
            let error = refused([m, n + 8, k], gated);
            assert!(
                matches!(error, BuildError::Problem(ProblemError::Alignment { multiple: 16, .. })),
                "{error}"
            );
            let padded = |rows| format!("pad the gates and the ups with zeros to {rows} rows each");
            assert!(error.to_string().ends_with(&padded(n / 2 + 8)), "{error}");
            let error = refused([m, 16 * w - 8, k], gated).to_string();
            assert!(error.ends_with(&padded(8 * w)), "{error}");
            let error = refused([m, n, k], OpOptions { weights: WeightLayout::Kn, ..gated });
            assert!(
                matches!(error, BuildError::GatedWeights { weights: WeightLayout::Kn }),
                "{error}"
            );
            let error = refused(
                [m, n, k],
                OpOptions { plan: Some(Plan::of(TileShape::new(128, 24, 64))), ..gated },
            );
            assert!(matches!(error, BuildError::GatedTile { multiple: 16, .. }), "{error}");
            if world > 1 {
                let layout = if node.rank.get() == 1 {
                    GateLayout::Interleaved
                } else {
                    GateLayout::Concatenated
                };
                let error = refused([m, n, k], OpOptions { gates: Some(layout), ..gated });
                assert!(
                    matches!(error, BuildError::Disagreement { .. })
                        && error.to_string().contains("interleaved gates"),
                    "{error}"
                );
            }
            let op = build::<bf16>(OPS[0], [m, n, k], gated, &node.comm).unwrap();
            assert!(
                op.explain().contains("no bias, concatenated gates times ups"),
                "{}",
                op.explain()
            );
        });
    }
}
