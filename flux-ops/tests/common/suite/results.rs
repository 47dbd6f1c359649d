//! The numbers: exact where they can be, within the derived bound elsewhere, and always the same
//! bits.

use super::{AnyOp, Case, Machine, Number, call, defaults, ragged};
use crate::common::{OPS, Plan, Values};
use flux_core::TileShape;
use flux_core::program::{Chunk, Schedule};
use flux_core::tile::Raster;
use half::{bf16, f16};

const WORLDS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

fn equals_the_exact_result<T: Number>(machine: Machine) {
    for world in machine.worlds(&WORLDS) {
        for op in OPS {
            let case = Case::<T>::new(op, ragged(machine, op, world), world, Values::Integers, u64::from(world));
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                let y = call(&op, &case, node).unwrap();
                case.assert_equal(&expected, node.rank, &y, &op.explain());
                op.status().unwrap();
            });
        }
    }
}

pub fn bf16_integers_give_the_exact_result(machine: Machine) {
    equals_the_exact_result::<bf16>(machine);
}

pub fn f16_integers_give_the_exact_result(machine: Machine) {
    equals_the_exact_result::<f16>(machine);
}

fn stays_within_the_bound<T: Number>(machine: Machine) {
    for world in machine.worlds(&[1, 3, 4]) {
        for op in OPS {
            let case = Case::<T>::new(op, ragged(machine, op, world), world, Values::Reals, 7);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                case.assert_close(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
            });
        }
    }
}

pub fn random_numbers_stay_within_the_derived_bound(machine: Machine) {
    stays_within_the_bound::<bf16>(machine);
    stays_within_the_bound::<f16>(machine);
}

/// Chunks, rasters and bands, on shards of three by three tiles, the last ones ragged.
pub fn no_schedule_changes_a_bit(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3, 5]) {
        let ops = [(OPS[0], 0), (OPS[1], 0), (OPS[1], 2)];
        for ((op, early), tile) in ops.into_iter().flat_map(|op| machine.tiles().into_iter().map(move |tile| (op, tile))) {
            let (w, m, n) = (world as usize, 2 * tile.m as usize + 1, 2 * tile.n as usize + 8);
            let shape = if op == OPS[0] { [m * w, n * w, 72] } else { [m * w, n, (40 + room_for(early, tile)) * w] };
            let case = Case::<bf16>::new(op, shape, world, Values::Reals, 11);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let mut first: Option<Vec<bf16>> = None;
                for chunk in [Chunk::Shard, Chunk::Tiles(1), Chunk::Tiles(2), Chunk::Tiles(4)] {
                    for (raster, band) in [(Raster::RowsFastest, 1), (Raster::ColumnsFastest, 2), (Raster::RowGroups(2), 3)] {
                        let schedule = Schedule { chunk, raster, band, early, ..Schedule::of(tile) };
                        let plan = Plan { schedule: Some(schedule), ..Plan::default() };
                        let op = AnyOp::of(&case, plan, node);
                        let y = call(&op, &case, node).unwrap();
                        case.assert_close(&expected, node.rank, &y, &op.explain());
                        let first = first.get_or_insert_with(|| y.clone());
                        assert!(*first == y, "other bits with {}", op.explain());
                    }
                }
            });
        }
    }
}

/// Elements along `k` of a rank that so many partial tiles take to be added early.
fn room_for(early: u32, tile: TileShape) -> usize {
    (8 * early * tile.k) as usize
}

/// The sum has one order whoever brings its parts: on `mapped` ranks reach each other's memory, on
/// `carried` they do not.
pub fn early_partial_tiles_have_the_same_bits_whoever_brings_them(mapped: Machine, carried: Machine) {
    let tile = carried.tiles()[0];
    for world in carried.worlds(&[2, 3, 4, 8]) {
        let early = (world - 1).min(3);
        let (w, m, n) = (world as usize, 2 * tile.m as usize + 1, 2 * tile.n as usize + 8);
        let case = Case::<bf16>::new(OPS[1], [m * w, n, (40 + room_for(early, tile)) * w], world, Values::Reals, 61);
        let plan = Plan { schedule: Some(Schedule { early, chunk: Chunk::Tiles(2), ..Schedule::of(tile) }), ..Plan::default() };
        let results = |machine: Machine| {
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, plan, node);
                assert!(op.explain().contains(&format!("{early} partial tiles early")), "{}", op.explain());
                call(&op, &case, node).unwrap()
            })
        };
        assert!(results(mapped) == results(carried), "{}: the bits depend on who brings partial tiles", case.problem);
    }
}

/// What shards of less than a tile are given: tiles that span them, partial tiles without the rows
/// that do not exist, splits and slices of `k`. Each result is compared, and has the same bits
/// however late its slices come and whoever works.
pub fn small_shards_give_the_right_result_however_they_are_cut(machine: Machine) {
    let tile = machine.tiles()[0];
    for world in machine.worlds(&[1, 2, 3, 4, 8]) {
        let w = world as usize;
        let mut all = Vec::new();
        let sizes = [1, 5, 8, 16, 40, 75].into_iter().filter(|&m_shard| m_shard <= tile.m as usize);
        for (op, m_shard) in OPS.into_iter().flat_map(|op| sizes.clone().map(move |m_shard| (op, m_shard))) {
            // a tail of columns, and nine and a half steps along k of every rank
            let (n, k) = (tile.n as usize + 8, 9 * tile.k as usize + 8);
            let shape = if op == OPS[0] { [m_shard * w, n * w, k] } else { [m_shard * w, n, k * w] };
            let cases = [Values::Integers, Values::Reals].map(|values| Case::<bf16>::new(op, shape, world, values, 17));
            let cut = [(true, 1), (true, 3), (false, 1), (false, 2)].map(|(stack, splits)| {
                let plain = Schedule { stack, splits, ..Schedule::of(tile) };
                (plain, cases.each_ref().map(|case| case.expected_of(&plain)))
            });
            all.push((cases, cut));
        }
        // On one communicator: ranks take longer to connect than to call.
        machine.run(world, defaults, |node| {
            for ([integers, reals], plain, [exact, close]) in
                all.iter().flat_map(|(cases, cut)| cut.iter().map(move |(plain, expected)| (cases, plain, expected)))
            {
                let mut first: Option<Vec<bf16>> = None;
                for (k_slices, band) in [(1, 1), (3, 1), (4, 2)] {
                    let schedule = Schedule { k_slices, band, chunk: Chunk::Tiles(1), ..*plain };
                    let op = AnyOp::of(integers, Plan { schedule: Some(schedule), ..Plan::default() }, node);
                    let y = call(&op, integers, node).unwrap();
                    integers.assert_equal(exact, node.rank, &y, &op.explain());
                    let y = call(&op, reals, node).unwrap();
                    reals.assert_close(close, node.rank, &y, &op.explain());
                    let first = first.get_or_insert_with(|| y.clone());
                    assert!(*first == y, "other bits with {}", op.explain());
                }
            }
        });
    }
}

/// The same inputs on two communicators, with one worker and with several.
pub fn runs_give_the_same_bits(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(machine, op, world), world, Values::Reals, 13);
            let run = |workers| {
                let plan = Plan { workers: Some(workers), ..Plan::default() };
                machine.run(world, defaults, |node| call(&AnyOp::of(&case, plan, node), &case, node).unwrap())
            };
            let first = run(1);
            assert!(first == run(1) && first == run(3), "{}: bits differ between runs", case.problem);
        }
    }
}
