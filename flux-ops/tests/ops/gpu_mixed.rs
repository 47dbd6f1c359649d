//! The ops on ranks of two nodes: peer memory within, NCCL between.
//!
//! Ranks are threads with a GPU each, and this machine is taken for two nodes: threads that share a
//! GPU hold up each other's NCCL kernels. Processes of a launch (`common/launched.rs`) take turns
//! on the GPUs. One line says what is skipped.

use crate::common::launched::places;
use crate::common::suite::{self, call};
use crate::common::{Case, Check, Machine, OPS, OpOptions, SHARDED, Values, build_case, skipped};
use flux_core::OpKind;
use flux_core::plan::{Chunk, CommMode, KSplit, Plan, RowMapping};
use flux_transport::internal::nccl;
use flux_transport::{Communicator, ConnectError, Options, Select, TransportKind, World};
use half::bf16;
use std::sync::Once;

/// Machines that there are here, and what is left out of them.
fn find() -> Result<(Vec<Machine>, Vec<String>), String> {
    let gpus = crate::common::gpus::count().map(places)?;
    if gpus < 2 {
        return Err("two nodes need a GPU each, and there is one".to_owned());
    }
    nccl::available().map_err(|why| why.to_string())?;
    let (mut machines, mut left_out) = (vec![Machine::TwoNodes { ranks: 2 }], Vec::new());
    match gpus {
        4.. => machines.push(Machine::TwoNodes { ranks: 4 }),
        _ => left_out.push(format!("a GPU for each of four ranks: there are {gpus}")),
    }
    Ok((machines, left_out))
}

fn on_nodes(test: impl Fn(Machine)) {
    static SAID: Once = Once::new();
    let say = |what: &[String]| {
        SAID.call_once(|| what.iter().for_each(|what| skipped::say("gpu_mixed", what)));
    };
    match find() {
        Ok((machines, left_out)) => {
            for what in &left_out {
                skipped::count_part("gpu_mixed", what);
            }
            say(&left_out);
            machines.into_iter().for_each(test);
        }
        Err(why) => {
            skipped::count("gpu_mixed", &why);
            say(&[why]);
        }
    }
}

tests_of_messages!(on_nodes);
tests_of_sequential_calls!(on_nodes);

/// For each machine, its one size of world.
fn on_worlds(test: impl Fn(Machine, u32)) {
    on_nodes(|machine| machine.worlds(&[2, 4]).into_iter().for_each(|world| test(machine, world)));
}

fn case(machine: Machine, op: OpKind, world: u32, values: Values, seed: u64) -> Case<bf16> {
    Case::new(op, suite::unaligned(machine, op, world), world, values, seed)
}

/// The op's own, and some of every kind that ranks of several nodes have.
fn plans(machine: Machine) -> [Option<Plan>; 4] {
    let [small, large] = [0, 1].map(|at| Plan::of(machine.tiles()[at]));
    let small = Plan { chunk: Chunk::Tiles(1), ..small };
    let grouped = Plan { chunk: Chunk::Tiles(2), rows: RowMapping::PerShard { group: 2 }, ..large };
    [None, Some(small), Some(grouped), Some(Plan { k: KSplit::SplitK(2), ..small })]
}

/// Collectives take equal shards, and of those only an AllReduce crosses nodes: messages bring the
/// same beside the kernel.
#[test]
fn a_sequential_plan_is_carried_out_by_messages() {
    on_worlds(|machine, world| {
        for op in SHARDED {
            let case = case(machine, op, world, Values::Integers, 79);
            let expected = case.expected_on(machine);
            let plan = Plan { comm: CommMode::Sequential, ..Plan::of(machine.tiles()[0]) };
            machine.run(world, suite::defaults, |node| {
                let op = build_case(&case, OpOptions::of(plan), node);
                assert!(
                    matches!(
                        op.plan(case.problem.m() as usize).unwrap().comm,
                        CommMode::Overlapped { .. }
                    ),
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
    });
}

/// On the workspace of calls whose kernels wait for peers, in both of its buffers.
#[test]
fn an_all_reduce_is_that_of_nccl_behind_the_gemm() {
    on_worlds(|machine, world| {
        let cases = OPS.map(|op| case(machine, op, world, Values::Integers, 83));
        let expected = cases.each_ref().map(|case| case.expected_on(machine));
        machine.run(world, suite::defaults, |node| {
            let ops = cases.each_ref().map(|case| build_case(case, OpOptions::default(), node));
            let [.., all_reduce] = &ops;
            let said = all_reduce.explain();
            assert!(said.contains("NCCL's AllReduce after the kernel"), "{said}");
            for _ in 0..5 {
                for ((case, op), expected) in cases.iter().zip(&ops).zip(&expected) {
                    let y = call(op, case, node).unwrap();
                    case.assert_equal(expected, op, node.rank, &y, "a call");
                }
            }
            for op in &ops {
                op.status().unwrap();
            }
        });
    });
}

#[test]
fn a_rank_that_never_makes_an_all_reduce_is_named() {
    on_nodes(suite::a_rank_that_never_makes_a_sequential_call_is_named);
}

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    on_nodes(suite::calls_in_different_orders_fail_on_every_rank);
}

#[test]
fn integers_give_the_exact_sums_of_nodes() {
    on_worlds(|machine, world| {
        for op in SHARDED {
            let case = case(machine, op, world, Values::Integers, 71);
            let expected = case.expected_on(machine);
            for plan in plans(machine) {
                machine.run(world, suite::defaults, |node| {
                    assert_eq!(
                        (node.comm.transport(), node.comm.nodes()),
                        (TransportKind::Mixed, machine.nodes(world))
                    );
                    let op = build_case(&case, OpOptions::of(plan), node);
                    for _ in 0..5 {
                        case.assert_equal(
                            &expected,
                            &op,
                            node.rank,
                            &call(&op, &case, node).unwrap(),
                            "a call",
                        );
                    }
                    op.status().unwrap();
                });
            }
        }
    });
}

#[test]
fn reals_stay_within_the_bound_and_are_the_same_bits_in_every_run() {
    on_worlds(|machine, world| {
        for op in SHARDED {
            let case = case(machine, op, world, Values::Reals, 73);
            let expected = case.expected_on(machine);
            let run = |plan: Option<Plan>| {
                machine.run(world, suite::defaults, |node| {
                    let op = build_case(&case, OpOptions::of(plan), node);
                    let ys: Vec<_> = (0..5).map(|_| call(&op, &case, node).unwrap()).collect();
                    assert!(ys.iter().all(|y| *y == ys[0]), "calls of {} differ", case.problem);
                    case.assert_close(&expected, &op, node.rank, &ys[0], "a call");
                    ys.into_iter().next().unwrap()
                })
            };
            assert!(run(None) == run(None), "{}: other bits in another run", case.problem);
            // Another tile adds along k alike.
            let [_, small, grouped, _] = plans(machine);
            assert!(run(small) == run(grouped), "{}: other bits with another plan", case.problem);
        }
    });
}

#[test]
fn one_node_is_refused_and_so_are_uneven_ones() {
    let refused = |nodes: Option<u32>| {
        let worlds = World::local(2).unwrap();
        std::thread::scope(|scope| {
            let rank = |world: World| {
                let options = Options { select: Select::Mixed, nodes, ..Options::default() };
                scope.spawn(move || {
                    Communicator::connect_blocking(&world, options).map(drop).unwrap_err()
                })
            };
            let ranks: Vec<_> = worlds.into_iter().map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for (nodes, word) in [
        (Some(1), "all ranks are of one node"),
        (None, "FLUX_NODES"),
        (Some(3), "cannot be dealt evenly"),
    ] {
        for error in refused(nodes) {
            assert!(
                matches!(&error, ConnectError::Unusable { select: Select::Mixed, why }
                    if why.contains(word)),
                "{error}"
            );
        }
    }
}
