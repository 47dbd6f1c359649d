//! The numbers: exact where they can be, within the derived bound elsewhere, and always the same
//! bits.

use super::{Case, Check, Machine, Number, build_case, call, defaults, few_rows, unaligned};
use crate::common::{OPS, OpOptions, Values};
use flux_core::OpKind;
use flux_core::plan::{Chunk, KSplit, Plan, RowMapping, Target};
use half::{bf16, f16};
use std::hash::{DefaultHasher, Hasher};

const WORLDS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

fn equals_the_exact_result<T: Number>(machine: Machine) {
    for world in machine.worlds(&WORLDS) {
        for op in OPS {
            let case = Case::<T>::new(
                op,
                unaligned(machine, op, world),
                world,
                Values::Integers,
                u64::from(world),
            );
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = build_case(&case, OpOptions::default(), node);
                let y = call(&op, &case, node).unwrap();
                case.assert_equal(&expected, &op, node.rank, &y, "a call");
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
            let case = Case::<T>::new(op, unaligned(machine, op, world), world, Values::Reals, 7);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = build_case(&case, OpOptions::default(), node);
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
}

pub fn random_numbers_stay_within_the_derived_bound(machine: Machine) {
    stays_within_the_bound::<bf16>(machine);
    stays_within_the_bound::<f16>(machine);
}

/// Chunks and shard groups, on shards of three by three tiles, the last ones partial.
pub fn no_chunk_and_no_group_changes_a_bit(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3, 5]) {
        for (op, tile) in
            OPS.into_iter().flat_map(|op| machine.tiles().into_iter().map(move |tile| (op, tile)))
        {
            let (w, m, n) = (world as usize, 2 * tile.m as usize + 1, 2 * tile.n as usize + 8);
            let shape = if op == OPS[0] { [m * w, n * w, 72] } else { [m * w, n, 72 * w] };
            let case = Case::<bf16>::new(op, shape, world, Values::Reals, 11);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let mut first: Option<Vec<bf16>> = None;
                let chunks = [Chunk::Shard, Chunk::Tiles(1), Chunk::Tiles(2), Chunk::Tiles(4)];
                for (chunk, group) in
                    chunks.into_iter().flat_map(|chunk| [1, 2, 3].map(|group| (chunk, group)))
                {
                    let plan =
                        Plan { chunk, rows: RowMapping::PerShard { group }, ..Plan::of(tile) };
                    let op = build_case(&case, OpOptions::of(plan), node);
                    let y = call(&op, &case, node).unwrap();
                    case.assert_close(&expected, &op, node.rank, &y, "a call");
                    let first = first.get_or_insert_with(|| y.clone());
                    assert!(*first == y, "other bits with {}", op.explain());
                }
            });
        }
    }
}

/// Shards of less than a tile: flattened rows, partial tiles, split-K and slices of `k`. Each
/// result is compared, and has the same bits however late its slices come and whoever works.
pub fn small_shards_give_the_right_result_however_they_are_cut(machine: Machine) {
    let tile = machine.tiles()[0];
    for world in machine.worlds(&[1, 2, 3, 4, 8]) {
        let w = world as usize;
        let mut all = Vec::new();
        // Some have shards without rows, or that differ by a row.
        let sizes = [1, 5, 8 * w, 16 * w - 1, 40 * w + 1, 75 * w]
            .into_iter()
            .filter(|&m| m <= tile.m as usize * w);
        for (op, m) in OPS.into_iter().flat_map(|op| sizes.clone().map(move |m| (op, m))) {
            // a tail of columns, and nine and a half steps along k of every rank
            let (n, k) = (tile.n as usize + 8, 9 * tile.k as usize + 8);
            let shape = if op == OPS[0] { [m, n * w, k] } else { [m, n, k * w] };
            let cases = [Values::Integers, Values::Reals]
                .map(|values| Case::<bf16>::new(op, shape, world, values, 17));
            let expected = cases.each_ref().map(|case| case.expected_on(machine));
            all.push((cases, expected));
        }
        // On one communicator: ranks take longer to connect than to call.
        machine.run(world, defaults, |node| {
            let cuts = [
                (true, KSplit::Whole),
                (true, KSplit::SplitK(3)),
                (false, KSplit::Whole),
                (false, KSplit::SplitK(2)),
            ];
            for (([integers, reals], [exact, close]), (flattened, k)) in
                all.iter().flat_map(|(cases, expected)| cuts.map(|cut| ((cases, expected), cut)))
            {
                let mut first: Option<Vec<bf16>> = None;
                for (k_slices, group) in [(1, 1), (3, 1), (4, 2)] {
                    let rows = if flattened {
                        RowMapping::Flattened
                    } else {
                        RowMapping::PerShard { group }
                    };
                    let plan = Plan { rows, k, k_slices, chunk: Chunk::Tiles(1), ..Plan::of(tile) };
                    let op = build_case(integers, OpOptions::of(plan), node);
                    let y = call(&op, integers, node).unwrap();
                    integers.assert_equal(exact, &op, node.rank, &y, "a call");
                    let y = call(&op, reals, node).unwrap();
                    reals.assert_close(close, &op, node.rank, &y, "a call");
                    let first = first.get_or_insert_with(|| y.clone());
                    assert!(*first == y, "other bits with {}", op.explain());
                }
            }
        });
    }
}

/// One row of each shard, few and many; sums of reals, whose bits tell the order of additions.
pub fn all_ranks_of_an_all_reduce_have_the_same_bits(machine: Machine) {
    let op = OpKind::GemmAllReduce;
    for world in machine.worlds(&[2, 3, 4, 8]) {
        let [_, n, k] = unaligned(machine, op, world);
        for shape in
            [[world as usize, n, k], few_rows(machine, op, world), unaligned(machine, op, world)]
        {
            let case = Case::<bf16>::new(op, shape, world, Values::Reals, 23);
            let expected = case.expected_on(machine);
            let plain = Plan::of(machine.tiles()[0]);
            let by_tile = Plan { chunk: Chunk::Tiles(1), ..plain };
            let split = Plan { rows: RowMapping::Flattened, k: KSplit::SplitK(2), ..by_tile };
            let two_exchanges = Plan { rows: RowMapping::FlattenedTwoExchanges, ..by_tile };
            let shared = [
                two_exchanges,
                Plan { chunk: Chunk::Shard, ..two_exchanges },
                Plan { k: KSplit::SplitK(2), ..two_exchanges },
            ];
            let plans: Vec<_> = [None, Some(plain), Some(by_tile), Some(split)]
                .into_iter()
                .chain(shared.map(Some))
                .collect();
            // On one communicator: ranks take longer to connect than to call.
            machine.run(world, defaults, |node| {
                for op in plans.iter().map(|&plan| build_case(&case, OpOptions::of(plan), node)) {
                    for _ in 0..3 {
                        let y = call(&op, &case, node).unwrap();
                        case.assert_close(&expected, &op, node.rank, &y, "a call");
                        let mut bits = DefaultHasher::new();
                        for y in &y {
                            bits.write_u16(y.to_bits());
                        }
                        let all = node.comm.exchange(&bits.finish().to_le_bytes()).unwrap();
                        assert!(
                            all.iter().all(|other| *other == all[0]),
                            "rank {}: others have other bits: {}",
                            node.rank,
                            op.explain()
                        );
                    }
                }
            });
        }
    }
}

/// The same inputs on two communicators, with one worker and with several.
pub fn runs_give_the_same_bits(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        for op in OPS {
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Reals, 13);
            let run = |workers| {
                let options = OpOptions { workers: Some(workers), ..OpOptions::default() };
                machine.run(world, defaults, |node| {
                    call(&build_case(&case, options, node), &case, node).unwrap()
                })
            };
            let first = run(1);
            assert!(
                first == run(1) && first == run(3),
                "{}: bits differ between runs",
                case.problem
            );
        }
    }
}
