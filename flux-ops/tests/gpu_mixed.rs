//! Both ops on ranks of two nodes: peer memory within, NCCL between.
//!
//! Ranks are threads, and this machine is taken for two. Two nodes of one rank need two GPUs, two
//! of two need four: threads that share a GPU hold up each other's NCCL kernels, so that is soaked
//! on small problems only (`flux-bench lab soak --nodes 2 --ranks-per-gpu 2`). Processes of a launch
//! (`common/launched.rs`) take turns on what GPUs there are. One line says what is skipped.
#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]

mod common;

use common::launched::places;
use common::suite::{self, call};
use common::{AnyOp, Case, Machine, OPS, Plan, Values, skipped};
use flux_core::OpKind;
use flux_core::program::{Chunk, Schedule, Sending};
use flux_core::tile::Raster;
use flux_ops::BuildError;
use flux_transport::internal::nccl;
use flux_transport::{Communicator, ConnectError, Options, Select, TransportKind, World};
use half::bf16;
use std::sync::Once;

/// Machines that there are here, and what is left out of them.
fn find() -> Result<(Vec<Machine>, Vec<String>), String> {
    let gpus = common::gpus::count().map(places)?;
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
    let say = |what: &[String]| SAID.call_once(|| what.iter().for_each(|what| skipped::say("gpu_mixed", what)));
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

/// For each machine, its one size of world.
fn on_worlds(test: impl Fn(Machine, u32)) {
    on_nodes(|machine| machine.worlds(&[2, 4]).into_iter().for_each(|world| test(machine, world)));
}

fn case(machine: Machine, op: OpKind, world: u32, values: Values, seed: u64) -> Case<bf16> {
    Case::new(op, suite::ragged(machine, op, world), world, values, seed)
}

#[test]
fn sequential_calls_are_refused() {
    on_worlds(|machine, world| {
        let shape = suite::ragged(machine, OPS[0], world);
        machine.run(world, suite::defaults, |node| {
            let plan = Plan { sending: Some(Sending::Before), ..Plan::default() };
            let refused = AnyOp::<bf16>::build(OPS[0], shape, plan, &node.comm).unwrap_err();
            assert!(matches!(refused, BuildError::NotSequential { .. }), "{refused}");
        });
    });
}

fn schedules(machine: Machine) -> Vec<Option<Schedule>> {
    let of = |tile| Schedule { raster: Raster::RowGroups(2), ..Schedule::of(tile) };
    let tiles = machine.tiles();
    let small = Schedule { chunk: Chunk::Tiles(1), ..of(tiles[0]) };
    let banded = Schedule { chunk: Chunk::Tiles(2), band: 2, ..of(tiles[1]) };
    vec![None, Some(small), Some(banded), Some(Schedule { splits: 2, ..small })]
}

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    on_nodes(suite::calls_in_different_orders_fail_on_every_rank);
}

#[test]
fn integers_give_the_exact_sums_of_nodes() {
    on_worlds(|machine, world| {
        for op in OPS {
            let case = case(machine, op, world, Values::Integers, 71);
            for schedule in schedules(machine) {
                let of = schedule.unwrap_or_else(|| machine.own_schedule(&case.problem));
                let expected = case.expected_across(&of, machine.nodes(world));
                machine.run(world, suite::defaults, |node| {
                    assert_eq!((node.comm.transport(), node.comm.nodes()), (TransportKind::Mixed, machine.nodes(world)));
                    let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                    for _ in 0..5 {
                        case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
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
        for op in OPS {
            let case = case(machine, op, world, Values::Reals, 73);
            // By whether tiles span shards, which decides what is rounded.
            let mut first: [Option<Vec<Vec<bf16>>>; 2] = [None, None];
            for schedule in schedules(machine).into_iter().take(3) {
                let of = schedule.unwrap_or_else(|| machine.own_schedule(&case.problem));
                let expected = case.expected_across(&of, machine.nodes(world));
                let ys = machine.run(world, suite::defaults, |node| {
                    let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                    let ys: Vec<_> = (0..5).map(|_| call(&op, &case, node).unwrap()).collect();
                    assert!(ys.iter().all(|y| *y == ys[0]), "calls of {} differ", case.problem);
                    case.assert_close(&expected, node.rank, &ys[0], &op.explain());
                    ys.into_iter().next().unwrap()
                });
                // Another tile adds along k alike, and orders change nothing.
                let first = first[usize::from(of.stack)].get_or_insert_with(|| ys.clone());
                assert!(*first == ys, "{}: other bits with another schedule", case.problem);
            }
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
                scope.spawn(move || Communicator::connect_blocking(&world, options).map(drop).unwrap_err())
            };
            let ranks: Vec<_> = worlds.into_iter().map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for (nodes, word) in [(Some(1), "all ranks are of one node"), (None, "FLUX_NODES"), (Some(3), "cannot be dealt evenly")] {
        for error in refused(nodes) {
            assert!(matches!(&error, ConnectError::Unusable { select: Select::Mixed, why } if why.contains(word)), "{error}");
        }
    }
}
