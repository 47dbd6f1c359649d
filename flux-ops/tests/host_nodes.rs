//! Both ops on the host transport, with the programs of ranks in several nodes: one network less
//! than the real thing, the same sums.

#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]

mod common;

use common::suite::{call, ragged};
use common::{AnyOp, Case, Machine, Meeting, Node, OPS, Plan, Values};
use flux_core::program::{Chunk, Schedule, ScheduleError};
use flux_core::tile::Raster;
use flux_core::{Nodes, Rank, TileShape, WorldSize};
use flux_ops::{BuildError, CallError};
use flux_transport::{Communicator, ConnectError, Fault, Options, Select, World};
use half::bf16;
use proptest::prelude::*;
use std::time::Duration;

const MACHINE: Machine = Machine::Host;

fn nodes(count: u32, world: u32) -> Nodes {
    Nodes::new(WorldSize::new(world).unwrap(), count).unwrap()
}

/// Options of `count` nodes.
fn in_nodes(count: u32) -> impl Fn(&mut Options) + Sync {
    move |options| options.nodes = Some(count)
}

fn schedule(tile: TileShape) -> Schedule {
    Schedule { chunk: Chunk::Tiles(2), raster: Raster::RowGroups(2), ..Schedule::of(tile) }
}

#[test]
fn integers_give_the_exact_result_on_every_group() {
    for (count, world) in [(2, 4), (2, 8), (3, 6), (4, 4), (1, 3)] {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(MACHINE, op, world), world, Values::Integers, u64::from(world));
            let plain = schedule(MACHINE.tiles()[0]);
            let expected = case.expected_across(&plain, nodes(count, world));
            MACHINE.run(world, in_nodes(count), |node| {
                assert_eq!(node.comm.nodes(), nodes(count, world));
                for schedule in [None, Some(plain), Some(Schedule { band: 3, splits: 2, k_slices: 2, ..plain })] {
                    let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                    for _ in 0..3 {
                        case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
                    }
                }
            });
        }
    }
}

/// Where ranks reach each other, tiles would span shards as small as these; across nodes an op
/// chooses another plan by itself.
#[test]
fn an_op_of_few_rows_chooses_a_plan_for_nodes() {
    let (count, world) = (2, 4);
    for op in OPS {
        let case = Case::<bf16>::new(op, [8 * 4, 64 * 4, 64 * 4], world, Values::Integers, 41);
        assert!(Schedule::heuristic(&case.problem).stack, "{op}");
        let expected = case.expected_across(&schedule(MACHINE.tiles()[0]), nodes(count, world));
        MACHINE.run(world, in_nodes(count), |node| {
            let op = AnyOp::of(&case, Plan::default(), node);
            case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
        });
    }
}

/// What is added first is the own node's, then the others' sums: other bits than those of ranks
/// that all reach each other, within the derived bound.
#[test]
fn sums_of_nodes_are_rounded_in_a_fixed_order() {
    let (count, world) = (2, 6);
    for op in OPS {
        let case = Case::<bf16>::new(op, ragged(MACHINE, op, world), world, Values::Reals, 3);
        let expected = case.expected_across(&schedule(MACHINE.tiles()[0]), nodes(count, world));
        let run = |count, workers| {
            let plan = Plan { schedule: Some(schedule(MACHINE.tiles()[0])), workers: Some(workers), ..Plan::default() };
            MACHINE.run(world, in_nodes(count), |node| call(&AnyOp::of(&case, plan, node), &case, node).unwrap())
        };
        let ys = run(count, 1);
        for (rank, y) in (0..).map(Rank::new).zip(&ys) {
            case.assert_close(&expected, rank, y, "two nodes");
        }
        assert!(ys == run(count, 3), "{op}: bits differ between runs");
        let (apart, together) = (run(world, 1), run(1, 1));
        assert!(apart == together, "{op}: nodes of one rank and a node of all are other programs");
        assert_eq!(ys == together, op == OPS[0], "{op}: only what is added has another order");
    }
}

#[test]
fn ranks_may_be_late_call_after_call() {
    for op in OPS {
        let world = 4;
        let cases = [5, 6, 7].map(|seed| Case::<bf16>::new(op, [16 * 4, 32, 32], world, Values::Integers, seed));
        let plain = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(8, 8, 8)) };
        let expected = cases.each_ref().map(|case| case.expected_across(&plain, nodes(2, world)));
        MACHINE.run(world, in_nodes(2), |node| {
            let op = AnyOp::of(&cases[0], Plan { schedule: Some(plain), workers: Some(2), ..Plan::default() }, node);
            for i in 0..200 {
                if i % 17 == 4 * node.rank.index() {
                    std::thread::sleep(Duration::from_millis(3));
                }
                let (case, expected) = (&cases[i % 3], &expected[i % 3]);
                case.assert_equal(expected, node.rank, &call(&op, case, node).unwrap(), &format!("call {i}"));
            }
        });
    }
}

/// Rank 1 is on the rail of rank 3, and passes its shard on to rank 0.
#[test]
fn a_rank_that_never_calls_is_the_one_that_is_late() {
    for op in OPS {
        let world = 4;
        let case = Case::<bf16>::new(op, ragged(MACHINE, op, world), world, Values::Integers, 31);
        let together = Meeting::new(world as usize);
        let short = |options: &mut Options| (options.nodes, options.deadline) = (Some(2), Duration::from_millis(1500));
        MACHINE.run(world, short, |node: &Node| {
            let op = AnyOp::of(&case, Plan::default(), node);
            call(&op, &case, node).unwrap();
            together.wait();
            if node.rank.get() != 1 {
                let Err(CallError::Fault(failure)) = call(&op, &case, node) else { panic!("no fault") };
                match &failure.fault {
                    Fault::Timeout { late, .. } => assert_eq!(late.as_slice(), [Rank::new(1)], "{failure}"),
                    other => panic!("{other}"),
                }
            }
            together.wait();
        });
    }
}

#[test]
fn tiles_that_span_shards_are_refused_across_nodes() {
    MACHINE.run(4, in_nodes(2), |node| {
        let schedule = Schedule { stack: true, ..Schedule::of(TileShape::new(16, 16, 16)) };
        let plan = Plan { schedule: Some(schedule), ..Plan::default() };
        let refused = AnyOp::<bf16>::build(OPS[0], [32, 32, 16], plan, &node.comm).unwrap_err();
        assert!(matches!(refused, BuildError::Schedule(ScheduleError::FlattenedNodes { .. })), "{refused}");
    });
}

#[test]
fn ranks_agree_on_their_nodes() {
    let connect = |counts: [Option<u32>; 4]| {
        let worlds = World::local(4).unwrap();
        std::thread::scope(|scope| {
            let rank = |(world, nodes): (World, Option<u32>)| {
                let options = Options { select: Select::Host, nodes, ..Options::default() };
                scope.spawn(move || Communicator::connect_blocking(&world, options).map(|comm| comm.explain()))
            };
            let ranks: Vec<_> = worlds.into_iter().zip(counts).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for explained in connect([Some(2); 4]) {
        assert!(explained.unwrap().contains("programs are those of 2 nodes of 2"));
    }
    for refused in connect([Some(3); 4]) {
        assert!(
            matches!(refused, Err(ConnectError::Unusable { why, .. }) if why == "4 ranks cannot be dealt evenly to 3 nodes (Options::nodes, FLUX_NODES)")
        );
    }
    for refused in connect([Some(2), Some(2), None, Some(2)]) {
        assert!(matches!(refused, Err(ConnectError::Disagreement { .. })));
    }
}

fn schedules() -> impl Strategy<Value = Schedule> {
    let tile = (1u32..20, 1u32..20, 1u32..10).prop_map(|(m, n, k)| TileShape::new(m, n, k));
    let chunk = prop_oneof![Just(Chunk::Shard), (1u32..6).prop_map(Chunk::Tiles)];
    let raster = prop_oneof![Just(Raster::RowsFastest), Just(Raster::ColumnsFastest), (1u32..4).prop_map(Raster::RowGroups)];
    (tile, chunk, raster, 1..5u32, (1..4u32, 1..4u32, 0..3u32)).prop_map(|(tile, chunk, raster, band, (k_slices, splits, early))| {
        Schedule { chunk, raster, band, k_slices, splits, early, ..Schedule::of(tile) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_across_nodes_gives_the_exact_result(
        op in 0usize..2, count in 1u32..4, per_node in 1u32..4, m in 1usize..30, n in 1usize..4, k in 1usize..4, schedule in schedules(),
        workers in 1u32..3, seed: u16, bias: bool,
    ) {
        let world = count * per_node;
        let w = world as usize;
        let shape = if op == 0 { [m * w, 8 * n * w, 8 * k] } else { [m * w, 8 * n, 8 * k * w] };
        let case = Case::<bf16>::new(OPS[op], shape, world, Values::Integers, u64::from(seed));
        let case = case.finished(bias, Values::Integers, flux_ops::Activation::None);
        let expected = case.expected_across(&schedule, nodes(count, world));
        let plan = Plan { schedule: Some(schedule), workers: Some(workers), ..Plan::default() };
        Machine::Host.run(world, in_nodes(count), |node| {
            let op = AnyOp::of(&case, plan, node);
            for _ in 0..3 {
                case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
            }
        });
    }
}
