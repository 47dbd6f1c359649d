//! Weights of `[k, n]`: the bits of those of `[n, k]`, and refused where they are not.

use super::{
    Case, Check, Machine, Number, build, build_case, call, defaults, few_rows, layouts, unaligned,
};
use crate::common::{Node, OpOptions, Values};
use flux_core::plan::{CommMode, KSplit, Plan};
use flux_ops::{BuildError, CallError, FusedLinear, Layout, WeightLayout};
use half::{bf16, f16};

/// A call on the transpose of the case's weights, in rows with gaps of NaN.
fn call_transposed<T: Number>(op: &FusedLinear, case: &Case<T>, node: &Node) -> Vec<T> {
    let (lx, lw, ly) = layouts(case, node.rank);
    let w = case.w(node.rank);
    let transposed = Layout::strided(lw.cols, lw.rows, lw.rows + 8);
    let mut wide = vec![T::from_f32(f32::NAN); transposed.rows * transposed.row_stride];
    for (n, row) in w.chunks_exact(lw.cols).enumerate() {
        for (k, &v) in row.iter().enumerate() {
            wide[k * transposed.row_stride + n] = v;
        }
    }
    let (x, w, mut y) =
        (node.upload(&case.x(node.rank)), node.upload(&wide), node.poisoned(ly.span()));
    op.forward(
        &node.view(&x, lx),
        &node.view(&w, transposed),
        &mut node.view_mut(&mut y, ly),
        node.stream(),
    )
    .unwrap();
    node.download(&y)
}

fn gives_the_same_bits<T: Number>(machine: Machine) {
    for (world, &op) in machine
        .worlds(&[1, 2, 3, 4])
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |op| (world, op)))
    {
        for shape in [unaligned(machine, op, world), few_rows(machine, op, world)] {
            let case = Case::<T>::new(op, shape, world, Values::Reals, 163);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let split = Plan { k: KSplit::SplitK(2), ..Plan::of(machine.tiles()[0]) };
                for plan in [None, Some(split)] {
                    let options = OpOptions::of(plan);
                    let straight = build_case(&case, options, node);
                    let transposed =
                        build_case(&case, OpOptions { weights: WeightLayout::Kn, ..options }, node);
                    let y = call_transposed(&transposed, &case, node);
                    case.assert_close(&expected, &transposed, node.rank, &y, "transposed weights");
                    let same = straight.plan(case.problem.m() as usize).unwrap().comm
                        == CommMode::Sequential
                        || call(&straight, &case, node).unwrap() == y;
                    assert!(same, "other bits: {}", transposed.explain());
                }
            });
        }
    }
}

pub fn weights_of_k_and_n_give_the_same_bits(machine: Machine) {
    gives_the_same_bits::<bf16>(machine);
    gives_the_same_bits::<f16>(machine);
}

/// The layout is agreed on, and weights of the other one are refused before anything is launched.
pub fn weights_that_do_not_lie_as_built_are_refused(machine: Machine) {
    for (world, &op) in machine
        .worlds(&[1, 2])
        .into_iter()
        .flat_map(|world| machine.ops().iter().map(move |op| (world, op)))
    {
        let case =
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 167);
        machine.run(world, defaults, |node| {
            let p = &case.problem;
            let shape = [p.m() as usize, p.n() as usize, p.k() as usize];
            if world > 1 {
                let weights =
                    if node.rank.get() == 1 { WeightLayout::Kn } else { WeightLayout::Nk };
                let refused = build::<bf16>(
                    op,
                    shape,
                    OpOptions { weights, ..OpOptions::default() },
                    &node.comm,
                )
                .unwrap_err();
                assert!(
                    matches!(refused, BuildError::Disagreement { .. })
                        && refused.to_string().contains("weights [k, n]"),
                    "{refused}"
                );
            }
            let built = build_case(
                &case,
                OpOptions { weights: WeightLayout::Kn, ..OpOptions::default() },
                node,
            );
            let refused = call(&built, &case, node).unwrap_err();
            assert!(matches!(refused, CallError::Shape { operand: "w", .. }), "{refused}");
            call_transposed(&built, &case, node);
        });
    }
}
