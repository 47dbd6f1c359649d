//! The ops over NCCL's messages: the bits of peer memory, and faults as everywhere.
//!
//! Ranks are threads with a GPU each, as NCCL takes no two of a process on one; or processes of a
//! launch (`common/launched.rs`), with any number on each. Where there are not two GPUs and no
//! launch, or no NCCL, one line says why all are skipped.

use crate::common::launched::places;
use crate::common::suite::{self, call};
use crate::common::{
    Case, Check, Machine, Node, OPS, OpOptions, SHARDED, Values, build, build_case,
};
use flux_core::plan::{Chunk, CommMode, KSplit, Plan, RowMapping};
use flux_transport::TransportKind;
use flux_transport::internal::nccl;
use half::bf16;

fn find() -> Result<Machine, String> {
    flux_cuda::available().map_err(|why| why.to_string())?;
    let count = flux_cuda::device_count().map(places).map_err(|e| e.to_string())?;
    if count < 2 {
        return Err("NCCL needs a GPU for each rank, and there is one".to_owned());
    }
    nccl::available().map_err(|why| why.to_string())?;
    Ok(Machine::Messages(count))
}

fn on_gpus(test: fn(Machine)) {
    crate::common::where_found::run("gpu_messages", find(), test);
}

tests_of_messages!(on_gpus);

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    on_gpus(suite::calls_in_different_orders_fail_on_every_rank);
}

tests_of_sequential_calls!(on_gpus);

#[test]
fn a_stream_that_is_held_up_ahead_of_a_sequential_call_blames_nobody() {
    on_gpus(suite::a_stream_that_is_held_up_ahead_of_a_sequential_call_blames_nobody);
}

#[test]
fn a_rank_that_never_makes_a_sequential_call_is_named() {
    on_gpus(suite::a_rank_that_never_makes_a_sequential_call_is_named);
}

/// Few rows and many, by the op's own plan.
#[test]
fn ops_stay_within_the_bound_by_their_own_choice() {
    on_gpus(|machine| {
        for (world, op) in
            machine.worlds(&[2, 3, 4, 8]).into_iter().flat_map(|world| OPS.map(|op| (world, op)))
        {
            for shape in [suite::unaligned(machine, op, world), suite::few_rows(machine, op, world)]
            {
                let case = Case::<bf16>::new(op, shape, world, Values::Reals, 79);
                let expected = case.expected_on(machine);
                machine.run(world, suite::defaults, |node| {
                    let options = OpOptions { workers: node.workers, ..OpOptions::default() };
                    let op = build::<bf16>(op, shape, options, &node.comm).unwrap();
                    case.assert_close(
                        &expected,
                        &op,
                        node.rank,
                        &call(&op, &case, node).unwrap(),
                        "a call",
                    );
                });
            }
        }
    });
}

/// The sum is in one order whoever brings its parts.
#[test]
fn messages_give_the_bits_of_peer_memory() {
    on_gpus(|machine| {
        let Machine::Messages(count) = machine else { unreachable!("as found above") };
        for (world, op) in machine
            .worlds(&[2, 3, 4, 8])
            .into_iter()
            .flat_map(|world| SHARDED.map(|op| (world, op)))
        {
            for shape in [suite::unaligned(machine, op, world), suite::few_rows(machine, op, world)]
            {
                let case = Case::<bf16>::new(op, shape, world, Values::Reals, 51);
                let expected = case.expected_on(machine);
                for plan in plans(machine) {
                    let carried = machine.run(world, suite::defaults, |node| {
                        assert_eq!(node.comm.transport(), TransportKind::Nccl);
                        let op = build_case(&case, OpOptions::of(plan), node);
                        let ys: Vec<_> = (0..5).map(|_| call(&op, &case, node).unwrap()).collect();
                        op.status().unwrap();
                        assert!(ys.iter().all(|y| *y == ys[0]), "calls of {} differ", case.problem);
                        case.assert_close(&expected, &op, node.rank, &ys[0], "a call");
                        (
                            ys.into_iter().next().unwrap(),
                            op.plan(case.problem.m() as usize).unwrap(),
                        )
                    });
                    let plan = carried.first().map(|&(_, plan)| plan);
                    let one = |node: &Node| {
                        call(&build_case(&case, OpOptions::of(plan), node), &case, node).unwrap()
                    };
                    let mapped = Machine::Gpus(count).run(world, suite::defaults, one);
                    // NCCL adds in an order of its own. Rows that arrive in another order have
                    // other tiles in the last wave, which stream-K splits.
                    let same_order = |plan: Plan| {
                        plan.comm != CommMode::Sequential
                            && (op == OPS[1] || plan.k != KSplit::StreamK)
                    };
                    if plan.is_some_and(same_order) {
                        let same = carried
                            .iter()
                            .zip(&mapped)
                            .all(|((carried, _), mapped)| carried == mapped);
                        assert!(same, "{}: nccl's bits are others than nvlink's", case.problem);
                    }
                }
            }
        }
    });
}

suite_tests!(
    on_gpus:
    rows_of_batch_invariant_ops_have_their_own_bits,
    tiles_change_no_bit_of_a_batch_invariant_op,
    plans_without_one_order_are_refused,
);

#[test]
fn messages_change_no_bit_of_a_batch_invariant_op() {
    on_gpus(|machine| {
        let Machine::Messages(count) = machine else { unreachable!("as found above") };
        suite::transports_change_no_bit_of_a_batch_invariant_op(machine, Machine::Gpus(count));
    });
}

/// The op's own, and some of every row mapping.
fn plans(machine: Machine) -> Vec<Option<Plan>> {
    let [small, large] = [0, 1].map(|at| Plan::of(machine.tiles()[at]));
    let by_tile = Plan { chunk: Chunk::Tiles(1), k: KSplit::StreamK, ..small };
    let grouped = Plan { chunk: Chunk::Tiles(2), rows: RowMapping::PerShard { group: 2 }, ..large };
    let one_peer = Plan { comm: CommMode::Overlapped { peers: 1 }, ..small };
    let flattened = Plan { rows: RowMapping::Flattened, k: KSplit::SplitK(2), ..small };
    vec![None, Some(by_tile), Some(grouped), Some(one_peer), Some(flattened)]
}
