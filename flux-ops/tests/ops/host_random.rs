//! Random problems, plans and workers on the host transport, against the exact result.

use crate::common::suite::{call, call_gathered, defaults};
use crate::common::{Case, Check, Machine, OPS, OpOptions, Values, build_case};
use flux_core::TileShape;
use flux_core::plan::Plan;
use flux_ops::{Activation, GateLayout};
use flux_testkit::strategies::{comm_modes, plans, rows};
use half::bf16;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_of_every_problem_gives_the_exact_result(
        op in 0usize..3,
        world in 1u32..8,
        m in 1usize..300,
        n in 1usize..7,
        k in 1usize..5,
        more in 0usize..7,
        plan in plans(rows(), comm_modes()),
        workers in 1u32..4,
        seed: u16,
        bias: bool,
        residual: bool,
        relu: bool,
        gates in 0usize..4,
    ) {
        let w = world as usize;
        let split = |groups| 8 * (groups * w + more % w);
        let shape = if op == 0 { [m, split(n), 8 * k] } else { [m, 8 * n, split(k)] };
        let case = Case::<bf16>::new(OPS[op], shape, world, Values::Integers, u64::from(seed));
        let activation = if relu && op == 0 { Activation::Relu } else { Activation::None };
        let case = case.finished(bias, Values::Integers, activation);
        let case = if residual { case.with_residual(Values::Integers) } else { case };
        // Of half of the AllGather-GEMMs with groups of 16 for every rank; tiles then have whole
        // gates.
        let layout = GateLayout::ALL
            .get(gates)
            .copied()
            .filter(|_| case.problem.op() == OPS[0] && case.problem.with_gates().is_ok());
        let case = if let Some(layout) = layout { case.gated(layout) } else { case };
        let tile = if layout.is_some() {
            TileShape { n: plan.tile.n.next_multiple_of(16), ..plan.tile }
        } else {
            plan.tile
        };
        let expected = case.expected_on(Machine::Host);
        let options = OpOptions { workers: Some(workers), ..OpOptions::of(Plan { tile, ..plan }) };
        Machine::Host.run(world, defaults, |node| {
            let op = build_case(&case, options, node);
            for turn in 0..3 {
                if case.problem.op() == OPS[0] && case.bias(node.rank).is_none() {
                    assert!(
                        call_gathered(&op, &case, node, 8 * turn).1 == case.all_x(),
                        "other rows: {}",
                        op.explain(),
                    );
                }
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
