//! Random problems, schedules and workers on the host transport, against the exact result.

mod common;
#[path = "../../flux-core/tests/schedules/mod.rs"]
mod schedules;

use common::suite::{call, defaults};
use common::{AnyOp, Case, Machine, OPS, Plan, Values};
use flux_core::TileShape;
use flux_ops::Activation;
use half::bf16;
use proptest::prelude::*;
use schedules::chunks;

fn tiles() -> impl Strategy<Value = TileShape> {
    (1..40_u32, 1..40_u32, 1..20_u32).prop_map(|(m, n, k)| TileShape::new(m, n, k))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_of_every_problem_gives_the_exact_result(
        op in 0usize..2, world in 1u32..8, m in 1usize..50, n in 1usize..7, k in 1usize..5, schedule in schedules::schedules(tiles(), chunks(), |least| least..=least + 3), workers in 1u32..4, seed: u16,
        bias: bool, relu: bool,
    ) {
        let w = world as usize;
        let shape = if op == 0 { [m * w, 8 * n * w, 8 * k] } else { [m * w, 8 * n, 8 * k * w] };
        let case = Case::<bf16>::new(OPS[op], shape, world, Values::Integers, u64::from(seed));
        let activation = if relu && op == 0 { Activation::Relu } else { Activation::None };
        let case = case.finished(bias, Values::Integers, activation);
        let expected = case.expected_of(&schedule);
        let plan = Plan { schedule: Some(schedule), workers: Some(workers), ..Plan::default() };
        Machine::Host.run(world, defaults, |node| {
            let op = AnyOp::of(&case, plan, node);
            for _ in 0..3 {
                case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
            }
        });
    }
}
