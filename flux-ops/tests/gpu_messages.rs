//! Both ops over NCCL's messages: the bits of peer memory, and faults as everywhere.
//!
//! Ranks are threads with a GPU each, as NCCL takes no two of a process on one; or processes of a
//! launch (`common/launched.rs`), with any number on each. Where there are not two GPUs and no
//! launch, or no NCCL, one line says why all are skipped.
#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]

mod common;

use common::launched::places;
use common::suite::{self, call, plain};
use common::{AnyOp, Case, Machine, Node, OPS, Plan, Values};
use flux_core::program::{Chunk, Schedule};
use flux_core::tile::Raster;
use flux_transport::TransportKind;
use flux_transport::internal::{cuda, nccl};
use half::bf16;

fn find() -> Result<Machine, String> {
    cuda::available().map_err(|why| why.to_string())?;
    let count = cuda::device_count().map(places).map_err(|e| e.to_string())?;
    if count < 2 {
        return Err("NCCL needs a GPU for each rank, and there is one".to_owned());
    }
    nccl::available().map_err(|why| why.to_string())?;
    Ok(Machine::Messages(count))
}

fn on_gpus(test: impl FnOnce(Machine)) {
    common::where_found::run("gpu_messages", find(), test);
}

tests_of_messages!(on_gpus);

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    on_gpus(suite::calls_in_different_orders_fail_on_every_rank);
}

tests_of_sequential_calls!(on_gpus);

#[test]
fn a_rank_that_never_makes_a_sequential_call_is_named() {
    on_gpus(suite::a_rank_that_never_makes_a_sequential_call_is_named);
}

/// Few rows and many, as the op chooses itself how they travel.
#[test]
fn ops_stay_within_the_bound_by_their_own_choice() {
    on_gpus(|machine| {
        for (world, op) in machine.worlds(&[2, 3, 4, 8]).into_iter().flat_map(|world| OPS.map(|op| (world, op))) {
            for shape in [suite::ragged(machine, op, world), suite::few_rows(machine, op, world)] {
                let case = Case::<bf16>::new(op, shape, world, Values::Reals, 79);
                let expected = case.expected_of_collective();
                machine.run(world, suite::defaults, |node| {
                    let op = AnyOp::build(op, shape, Plan::default(), &node.comm).unwrap();
                    case.assert_close(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
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
        for (world, op) in machine.worlds(&[2, 3, 4, 8]).into_iter().flat_map(|world| OPS.map(|op| (world, op))) {
            for shape in [suite::ragged(machine, op, world), suite::few_rows(machine, op, world)] {
                let case = Case::<bf16>::new(op, shape, world, Values::Reals, 51);
                let expected = case.expected_on(machine);
                // Whether tiles span shards decides what is rounded; else another tile adds along k
                // alike.
                let with = |schedule| {
                    let plan = Plan { schedule: Some(schedule), ..Plan::default() };
                    let one = |node: &Node| call(&AnyOp::of(&case, plan, node), &case, node).unwrap();
                    Machine::Gpus(count).run(world, suite::defaults, one)
                };
                let (own, tile_by_tile) = (with(machine.own_schedule(&case.problem)), with(plain(machine)));
                for schedule in schedules(machine) {
                    let mapped = if schedule.is_none() { &own } else { &tile_by_tile };
                    let carried = machine.run(world, suite::defaults, |node| {
                        assert_eq!(node.comm.transport(), TransportKind::Nccl);
                        let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                        let ys: Vec<_> = (0..5).map(|_| call(&op, &case, node).unwrap()).collect();
                        op.status().unwrap();
                        assert!(ys.iter().all(|y| *y == ys[0]), "calls of {} differ", case.problem);
                        case.assert_close(&expected, node.rank, &ys[0], &op.explain());
                        ys.into_iter().next().unwrap()
                    });
                    assert!(carried == *mapped, "{}: nccl's bits are others than nvlink's", case.problem);
                }
            }
        }
    });
}

#[test]
fn early_partial_tiles_have_the_same_bits() {
    on_gpus(|machine| {
        let Machine::Messages(count) = machine else { unreachable!("as found above") };
        suite::early_partial_tiles_have_the_same_bits_whoever_brings_them(Machine::Gpus(count), machine);
    });
}

fn schedules(machine: Machine) -> Vec<Option<Schedule>> {
    let of = |tile| Schedule { raster: Raster::RowGroups(2), ..Schedule::of(tile) };
    let tiles = machine.tiles();
    let small = Schedule { chunk: Chunk::Tiles(1), ..of(tiles[0]) };
    vec![None, Some(small), Some(Schedule { chunk: Chunk::Tiles(2), band: 2, ..of(tiles[1]) })]
}
