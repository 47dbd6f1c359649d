//! Both ops on the host transport, with the programs of ranks in several nodes: one network less
//! than the real thing, the same sums.

use crate::common::suite::{call, call_gathered, unaligned};
use crate::common::{
    Case, Check, Machine, Meeting, Node, OPS, OpOptions, SHARDED, Values, build, build_case, scaled,
};
use flux_core::plan::{Chunk, KSplit, Plan, RowMapping};
use flux_core::program::ScheduleError;
use flux_core::{Nodes, OpKind, Partials, Rank, TileShape, WorldSize};
use flux_ops::{BuildError, CallError};
use flux_testkit::strategies::{per_shard, plans, side_by_side};
use flux_transport::{Communicator, ConnectError, Fault, Options, Select, World};
use half::{bf16, f16};
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

fn plan() -> Plan {
    Plan { chunk: Chunk::Tiles(2), ..Plan::of(MACHINE.tiles()[0]) }
}

#[test]
fn integers_give_the_exact_result_on_every_group() {
    for (count, world) in [(2, 4), (2, 8), (3, 6), (4, 4), (1, 3)] {
        for op in SHARDED {
            let case = Case::<bf16>::new(
                op,
                unaligned(MACHINE, op, world),
                world,
                Values::Integers,
                u64::from(world),
            );
            let expected = case.expected_across(nodes(count, world));
            let cut = Plan {
                rows: RowMapping::PerShard { group: 3 },
                k: KSplit::SplitK(2),
                k_slices: 2,
                ..plan()
            };
            MACHINE.run(world, in_nodes(count), |node| {
                assert_eq!(node.comm.nodes(), nodes(count, world));
                for plan in [None, Some(plan()), Some(cut)] {
                    let op = build_case(&case, OpOptions::of(plan), node);
                    for _ in 0..3 {
                        case.assert_equal(
                            &expected,
                            &op,
                            node.rank,
                            &call(&op, &case, node).unwrap(),
                            "a call",
                        );
                        if case.problem.op() == OPS[0] {
                            assert!(
                                call_gathered(&op, &case, node, 8).1 == case.all_x(),
                                "other rows: {}",
                                op.explain()
                            );
                        }
                    }
                }
            });
        }
    }
}

/// Relays add fp32 partial sums, and send their sum in fp32: fp16 would overflow.
#[test]
fn f32_partials_of_every_group_are_exact() {
    for (count, world) in [(2, 4), (3, 6)] {
        let op = OpKind::GemmReduceScatter;
        let case =
            Case::<f16>::new(op, unaligned(MACHINE, op, world), world, Values::Integers, 233)
                .with_large_partials();
        let case = case.with_partials(Partials::F32);
        let expected = case.expected_across(nodes(count, world));
        MACHINE.run(world, in_nodes(count), |node| {
            for plan in [None, Some(plan())] {
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

/// Shards of less than a tile have no flattened rows across nodes.
#[test]
fn an_op_of_few_rows_chooses_a_plan_for_nodes() {
    let (count, world) = (2, 4);
    for op in SHARDED {
        let case = Case::<bf16>::new(op, [8 * 4, 64 * 4, 64 * 4], world, Values::Integers, 41);
        let expected = case.expected_across(nodes(count, world));
        MACHINE.run(world, in_nodes(count), |node| {
            let op = build_case(&case, OpOptions::default(), node);
            assert!(
                !op.plan(case.problem.m() as usize).unwrap().is_flattened(),
                "{}",
                op.explain()
            );
            case.assert_equal(
                &expected,
                &op,
                node.rank,
                &call(&op, &case, node).unwrap(),
                "a call",
            );
        });
    }
}

/// What is added first is the own node's, then the others' sums: other bits than those of ranks
/// that all reach each other, within the derived bound.
#[test]
fn sums_of_nodes_are_rounded_in_a_fixed_order() {
    let (count, world) = (2, 6);
    for op in SHARDED {
        let case = Case::<bf16>::new(op, unaligned(MACHINE, op, world), world, Values::Reals, 3);
        let expected = case.expected_across(nodes(count, world));
        let run = |count, workers| {
            let options = OpOptions { workers: Some(workers), ..OpOptions::of(plan()) };
            MACHINE.run(world, in_nodes(count), |node| {
                let op = build_case(&case, options, node);
                let y = call(&op, &case, node).unwrap();
                if node.comm.nodes() == nodes(2, world) {
                    case.assert_close(&expected, &op, node.rank, &y, "two nodes");
                }
                y
            })
        };
        let ys = run(count, 1);
        assert!(ys == run(count, 3), "{op}: bits differ between runs");
        let (apart, together) = (run(world, 1), run(1, 1));
        assert!(apart == together, "{op}: nodes of one rank and a node of all are other programs");
        assert_eq!(ys == together, op == OPS[0], "{op}: only what is added has another order");
    }
}

#[test]
fn ranks_may_be_late_call_after_call() {
    for op in SHARDED {
        let world = 4;
        let cases = [5, 6, 7]
            .map(|seed| Case::<bf16>::new(op, [16 * 4, 32, 32], world, Values::Integers, seed));
        let fine = Plan { chunk: Chunk::Tiles(1), ..Plan::of(TileShape::new(8, 8, 8)) };
        let expected = cases.each_ref().map(|case| case.expected_across(nodes(2, world)));
        MACHINE.run(world, in_nodes(2), |node| {
            let op =
                build_case(&cases[0], OpOptions { workers: Some(2), ..OpOptions::of(fine) }, node);
            for i in 0..200 {
                if i % 17 == 4 * node.rank.index() {
                    std::thread::sleep(Duration::from_millis(3));
                }
                let (case, expected) = (&cases[i % 3], &expected[i % 3]);
                case.assert_equal(
                    expected,
                    &op,
                    node.rank,
                    &call(&op, case, node).unwrap(),
                    &format!("call {i}"),
                );
            }
        });
    }
}

/// Rank 1 is on the rail of rank 3, and passes its shard on to rank 0.
#[test]
fn a_rank_that_never_calls_is_the_one_that_is_late() {
    for op in SHARDED {
        let world = 4;
        let case =
            Case::<bf16>::new(op, unaligned(MACHINE, op, world), world, Values::Integers, 31);
        let together = Meeting::new(world as usize);
        let deadline = scaled(Duration::from_millis(1500));
        let short = |options: &mut Options| (options.nodes, options.deadline) = (Some(2), deadline);
        MACHINE.run(world, short, |node: &Node| {
            let op = build_case(&case, OpOptions::default(), node);
            call(&op, &case, node).unwrap();
            together.wait();
            if node.rank.get() != 1 {
                let Err(CallError::Fault(failure)) = call(&op, &case, node) else {
                    panic!("no fault")
                };
                match &failure.fault {
                    Fault::Timeout { late, .. } => {
                        assert_eq!(late.as_slice(), [Rank::new(1)], "{failure}");
                    }
                    other => panic!("{other}"),
                }
            }
            together.wait();
        });
    }
}

#[test]
fn flattened_rows_are_refused_across_nodes() {
    MACHINE.run(4, in_nodes(2), |node| {
        let plan = Plan { rows: RowMapping::Flattened, ..plan() };
        let refused =
            build::<bf16>(OPS[0], [32, 32, 16], OpOptions::of(plan), &node.comm).unwrap_err();
        assert!(
            matches!(refused, BuildError::Schedule(ScheduleError::FlattenedNodes { .. })),
            "{refused}"
        );
    });
}

#[test]
fn an_all_reduce_is_refused_across_nodes() {
    MACHINE.run(4, in_nodes(2), |node| {
        let refused = |plan| {
            build::<bf16>(OpKind::GemmAllReduce, [32, 32, 32], OpOptions::of(plan), &node.comm)
                .unwrap_err()
                .to_string()
        };
        let why = "gemm_ar stores rows at every rank, so nothing can be passed on between 2 nodes \
                   of 2: use the transport nccl, or mixed without batch_invariant and fp32 partials";
        assert_eq!([refused(Some(plan())), refused(None)], [why, why]);
    });
}

#[test]
fn ranks_agree_on_their_nodes() {
    let connect = |counts: [Option<u32>; 4]| {
        let worlds = World::local(4).unwrap();
        std::thread::scope(|scope| {
            let rank = |(world, nodes): (World, Option<u32>)| {
                let options = Options { select: Select::Host, nodes, ..Options::default() };
                scope.spawn(move || {
                    Communicator::connect_blocking(&world, options).map(|comm| comm.explain())
                })
            };
            let ranks: Vec<_> = worlds.into_iter().zip(counts).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for explained in connect([Some(2); 4]) {
        assert!(explained.unwrap().contains("programs are those of 2 nodes of 2"));
    }
    for refused in connect([Some(3); 4]) {
        assert!(matches!(
            refused,
            Err(ConnectError::Unusable { why, .. }) if why == "4 ranks cannot be dealt evenly to 3 \
                                                               nodes (Options::nodes, FLUX_NODES)",
        ));
    }
    for refused in connect([Some(2), Some(2), None, Some(2)]) {
        assert!(matches!(refused, Err(ConnectError::Disagreement { .. })));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_across_nodes_gives_the_exact_result(
        op in 0usize..2,
        count in 1u32..4,
        per_node in 1u32..4,
        m in 1usize..30,
        n in 1usize..4,
        k in 1usize..4,
        plan in plans(per_shard(), side_by_side()),
        workers in 1u32..3,
        seed: u16,
        bias: bool,
        residual: bool,
    ) {
        let world = count * per_node;
        let w = world as usize;
        let shape = if op == 0 { [m * w, 8 * n * w, 8 * k] } else { [m * w, 8 * n, 8 * k * w] };
        let case = Case::<bf16>::new(OPS[op], shape, world, Values::Integers, u64::from(seed));
        let case = case.finished(bias, Values::Integers, flux_ops::Activation::None);
        let case = if residual { case.with_residual(Values::Integers) } else { case };
        let expected = case.expected_across(nodes(count, world));
        let options = OpOptions { workers: Some(workers), ..OpOptions::of(plan) };
        Machine::Host.run(world, in_nodes(count), |node| {
            let op = build_case(&case, options, node);
            for _ in 0..3 {
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
