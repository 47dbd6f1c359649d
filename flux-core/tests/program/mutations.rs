//! Each rule, broken on purpose in valid programs: the report names that rule.

use crate::strategies::{Call, any_calls, calls, calls_in_groups, chunks, plain_calls};
use flux_core::OpKind::{AllGatherGemm, GemmReduceScatter};
use flux_core::program::check::{Violation, verify};
use flux_core::program::{Chunk, NONE, RowSource, Sink, TileProgram, WorkItem};
use proptest::prelude::*;
use proptest::sample::Index;

/// Fails unless the programs break the rule that `pattern` stands for.
macro_rules! assert_violates {
    ($call:expr, $pattern:pat $(if $guard:expr)?) => {
        match verify(&$call.0) {
            Err($pattern) $(if $guard)? => {}
            other => prop_assert!(false, "{other:?} instead of {}\n{:?}", stringify!($pattern), $call),
        }
    };
}

pub(crate) use assert_violates;

/// One of the ranks' programs.
pub(crate) fn pick(call: &mut Call, which: Index) -> &mut TileProgram {
    let rank = which.index(call.0.len());
    &mut call.0[rank]
}

/// One of the items that are `wanted`.
pub(crate) fn pick_item(
    items: &[WorkItem],
    which: Index,
    wanted: impl Fn(&WorkItem) -> bool,
) -> usize {
    let candidates: Vec<usize> = (0..items.len()).filter(|&index| wanted(&items[index])).collect();
    *which.get(&candidates)
}

fn is_send(item: &WorkItem) -> bool {
    item.sink == Sink::Send
}

fn is_gather(item: &WorkItem) -> bool {
    item.a_source == RowSource::Gather
}

proptest! {
    #[test]
    fn agreement(call in any_calls(2..=8), rank: Index, kind in 0..6) {
        let mut call = call;
        let p = pick(&mut call, rank);
        match kind {
            0 => p.tile.k += 1,
            1 => p.signals += 1,
            2 => p.counters += 1,
            3 => p.slots_per_source += 1,
            4 => p.rank = p.rank.after(1, p.problem.world()),
            _ => {
                let last = call.0.len() - 1;
                call.0.truncate(last);
            }
        }
        assert_violates!(
            call,
            Violation::Disagreement { .. } | Violation::Header { .. } | Violation::Count { .. }
        );
    }

    #[test]
    fn bounds_of_items(call in plain_calls(2..=8), rank: Index, item: Index, kind in 0..10) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let (tile, problem, signals, counters) = (p.tile, p.problem, p.signals, p.counters);
        let index = item.index(p.items.len());
        let item = &mut p.items[index];
        let expected = match kind {
            0 => {
                item.rows = tile.m + 1;
                "rows"
            }
            1 => {
                item.rows = 0;
                "rows"
            }
            2 => {
                item.row = problem.m_shard();
                "rows"
            }
            3 => {
                item.col = u32::MAX;
                "cols"
            }
            4 => {
                item.dest = problem.world().get();
                "dest"
            }
            5 => {
                item.a_outer = problem.world().get();
                "a_outer"
            }
            6 => {
                item.raise = signals;
                "raise"
            }
            7 => {
                item.counter = counters;
                "counter"
            }
            8 => {
                item.await_group = item.await_count + 1;
                "await_group"
            }
            _ => {
                item.await_count = u32::MAX;
                "await_first"
            }
        };
        assert_violates!(call, Violation::OutOfBounds { field, .. } if field == expected);
    }

    #[test]
    fn bounds_of_slots(
        call in calls(GemmReduceScatter, 2..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let slots = p.slots_per_source * p.problem.world().peers();
        let index = item.index(p.items.len());
        let (item, per_source) = (&mut p.items[index], p.slots_per_source);
        let expected = if is_send(item) {
            item.slot = slots;
            "slot"
        } else {
            // A reduction reads further slots too, so its first one lies in the first source's.
            item.partial_slot = per_source;
            "partial_slot"
        };
        assert_violates!(call, Violation::OutOfBounds { field, .. } if field == expected);
    }

    #[test]
    fn bounds_of_awaits_and_transfers(
        call in calls(AllGatherGemm, 2..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        which: Index,
        kind in 0..5,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let (world, signals, m_shard) = (p.problem.world(), p.signals, p.problem.m_shard());
        let which = which.index(p.transfers.len());
        let expected = match kind {
            0 => {
                p.awaits[which].signal = signals;
                "signal"
            }
            1 => {
                p.awaits[which].peer = world.get();
                "peer"
            }
            2 => {
                p.transfers[which].place = world.peers();
                "place"
            }
            3 => {
                p.transfers[which].rows = m_shard + 1;
                "rows"
            }
            _ => {
                p.transfers[which].raise = signals;
                "raise"
            }
        };
        assert_violates!(call, Violation::OutOfBounds { field, .. } if field == expected);
    }

    #[test]
    fn form_of_ag_gemm(
        call in calls(AllGatherGemm, 3..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        item: Index,
        kind in 0..6,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world();
        let index = pick_item(&p.items, item, is_gather);
        let item = &mut p.items[index];
        match kind {
            0 => item.a_outer = (item.a_outer + 1) % world.peers(),
            1 => {
                item.a_source = RowSource::Caller;
                item.a_outer = 0;
            }
            2 => item.dest = (item.dest + 1) % world.get(),
            3 => item.raise = 0,
            4 => p.transfers[0].place = (p.transfers[0].place + 1) % world.peers(),
            _ => p.transfers[0].dest = p.rank.get(),
        }
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn form_of_gemm_rs(
        call in calls(GemmReduceScatter, 2..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        item: Index,
        kind in 0..6,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world();
        let index = pick_item(&p.items, item, |item| is_send(item) == (kind < 3));
        let item = &mut p.items[index];
        match kind {
            0 => item.a_outer = (item.a_outer + 1) % world.get(),
            1 => {
                item.raise = NONE;
                item.counter = NONE;
            }
            2 | 3 => item.sink = Sink::Store,
            4 => item.partials -= 1,
            _ => item.raise = 0,
        }
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn cover(call in plain_calls(1..=8), rank: Index, item: Index, kind in 0..4) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = item.index(p.items.len());
        let copy = p.items[index];
        match kind {
            0 if copy.rows > 1 => p.items[index].rows -= 1,
            0 | 1 => drop(p.items.remove(index)),
            2 => {
                p.items[index].col += 1;
                p.items[index].cols -= 1;
            }
            _ => p.items.push(copy),
        }
        if kind < 3 {
            assert_violates!(call, Violation::NotCovered { missing: 1.., .. });
        } else {
            assert_violates!(call, Violation::CoveredTwice { first, .. } if first == index);
        }
    }

    #[test]
    fn cover_by_tiles_that_are_shifted_onto_each_other(
        call in calls(AllGatherGemm, 1..=4, 2..=4, 1..=3, chunks()),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, |item| item.row > 0);
        p.items[index].row -= 1;
        assert_violates!(call, Violation::CoveredTwice { .. });
    }

    #[test]
    fn counters(
        call in calls(GemmReduceScatter, 3..=8, 2..=4, 2..=3, chunks()),
        rank: Index,
        item: Index,
        kind in 0..3,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, is_send);
        let first = p.items[index];
        match kind {
            0 => {
                // One item too few, or too many.
                p.items
                    .iter_mut()
                    .filter(|i| i.raise == first.raise && i.dest == first.dest)
                    .for_each(|i| i.raise_after += 1);
                assert_violates!(call, Violation::Miscounted { items, raise_after, .. }
                    if raise_after == items + 1);
            }
            1 => {
                p.items[index].counter = NONE;
                p.items[index].raise_after = 2;
                assert_violates!(call, Violation::Miscounted { items: 1, raise_after: 2, .. });
            }
            _ => {
                // Two owners' chunks share a counter.
                let other = pick_item(&p.items, item, |i| is_send(i) && i.dest != first.dest);
                for p in &mut call.0 {
                    p.counters += 1;
                }
                let p = pick(&mut call, rank);
                for index in [index, other] {
                    p.items[index].counter = p.counters - 1;
                }
                assert_violates!(call, Violation::CounterShared { .. });
            }
        }
    }

    #[test]
    fn signals_raised_by_transfers(
        call in calls_in_groups(AllGatherGemm, 3..=8, 1..=4, 1..=3, chunks(), 1..=1),
        rank: Index,
        which: Index,
        kind in 0..4,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world();
        let which = which.index(p.transfers.len());
        match kind {
            0 => {
                let (dest, raise) = (p.transfers[which].dest, p.transfers[which].raise);
                p.transfers.remove(which);
                assert_violates!(call, Violation::NeverRaised { rank, signal, .. }
                    if (rank.get(), signal) == (dest, raise));
            }
            1 => {
                p.transfers[which].raise = (p.transfers[which].raise + 1) % p.signals;
                assert_violates!(call, Violation::RaisedTwice { .. });
            }
            2 => {
                let entry = &mut p.awaits[which];
                entry.peer = (entry.peer + 1) % world.get();
                assert_violates!(call, Violation::WrongPeer { named, raiser, .. }
                    if named == raiser.after(1, world));
            }
            _ => {
                p.items
                    .iter_mut()
                    .filter(|item| item.await_first as usize == which)
                    .for_each(|item| (item.await_count, item.await_group) = (0, 0));
                let (owner_rank, unawaited) = (p.rank, p.awaits[which].signal);
                assert_violates!(call, Violation::NeverAwaited { owner, signal, .. }
                    if (owner, signal) == (owner_rank, unawaited));
            }
        }
    }

    #[test]
    fn signals_raised_by_items(
        call in calls(GemmReduceScatter, 3..=8, 2..=4, 1..=3, Just(Chunk::Shard)),
        rank: Index,
        kind in 0..2,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let signals = p.signals;
        let dest = p.items[0].dest;
        let chunk = p.items.iter_mut().filter(|item| item.dest == dest);
        if kind == 0 {
            chunk.for_each(|item| item.raise = (item.raise + 1) % signals);
        } else {
            // Each item raises by itself.
            chunk.for_each(|item| {
                item.counter = NONE;
                item.raise_after = 1;
            });
        }
        assert_violates!(call, Violation::RaisedTwice { owner, .. } if owner.get() == dest);
    }

    #[test]
    fn writers_of_slots(
        call in calls(GemmReduceScatter, 3..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let slots = p.slots_per_source * p.problem.world().peers();
        let index = pick_item(&p.items, item, is_send);
        let dest = p.items[index].dest;
        let slot = (p.items[index].slot + 1) % slots;
        p.items[index].slot = slot;
        assert_violates!(call, Violation::WrittenTwice { owner, what: "slot", index, .. }
            if (owner.get(), index) == (dest, slot));
    }

    #[test]
    fn writers_of_gather_rows(
        call in calls(AllGatherGemm, 2..=8, 2..=4, 1..=3, Just(Chunk::Tiles(1))),
        rank: Index,
        which: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let candidates: Vec<usize> =
            (0..p.transfers.len()).filter(|&index| p.transfers[index].row > 0).collect();
        let transfer = &mut p.transfers[*which.get(&candidates)];
        transfer.row -= 1;
        transfer.rows += 1;
        let dest = transfer.dest;
        assert_violates!(call, Violation::WrittenTwice { owner, what: "gather row", .. }
            if owner.get() == dest);
    }

    #[test]
    fn reads_of_rows_that_are_not_awaited(
        call in calls_in_groups(AllGatherGemm, 2..=8, 2..=4, 2..=3, Just(Chunk::Tiles(1)), 1..=1),
        rank: Index,
        item: Index,
        kind in 0..3,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, is_gather);
        match kind {
            // Other tiles of the row block still await the chunk.
            0 => (p.items[index].await_count, p.items[index].await_group) = (0, 0),
            1 => p.items[index].await_first = (p.items[index].await_first + 1) % p.signals,
            _ => {
                // The first two chunks that this rank sends arrive under each other's signal.
                let [first, second] = [p.transfers[0], p.transfers[1]];
                p.transfers[0].raise = second.raise;
                p.transfers[1].raise = first.raise;
            }
        }
        assert_violates!(call, Violation::Unguarded { what: "gather row", .. });
    }

    #[test]
    fn reads_of_partial_tiles_that_are_not_awaited(
        call in calls(GemmReduceScatter, 3..=8, 2..=4, 1..=3, Just(Chunk::Shard)),
        rank: Index,
        item: Index,
        kind in 0..2,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        if kind == 0 {
            let index = pick_item(&p.items, item, |item| !is_send(item));
            p.items[index].late_count -= 1;
        } else {
            // Two sources use each other's slot.
            let (dest, at_dest) = (p.items[0].dest, p.items[0].slot);
            let other = p.rank.before(1, p.problem.world()).index();
            let theirs = call.0[other].items.iter_mut().find(|item| item.dest == dest).unwrap();
            let slot = std::mem::replace(&mut theirs.slot, at_dest);
            pick(&mut call, rank).items[0].slot = slot;
        }
        assert_violates!(call, Violation::Unguarded { what: "slot", .. });
    }

    #[test]
    fn partial_tiles_that_are_awaited_in_another_order_than_they_are_added(
        call in calls(GemmReduceScatter, 3..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, |item| !is_send(item));
        let first = p.items[index].late_first as usize;
        p.awaits.swap(first, first + 1);
        assert_violates!(call, Violation::Unguarded { what: "slot", .. });
    }

    #[test]
    fn more_partial_tiles_that_are_awaited_than_there_are(
        call in calls(GemmReduceScatter, 2..=8, 2..=4, 1..=3, chunks()),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, |item| !is_send(item));
        let entry = p.awaits[p.items[index].late_first as usize];
        p.items[index].late_count += 1;
        p.awaits.push(entry);
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn reads_of_partial_tiles_of_other_elements(
        call in calls(GemmReduceScatter, 2..=8, 2..=4, 1..=3, chunks()),
        rank: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let dest = p.items[0].dest;
        let next = 1 + p.items[1..].iter().position(|item| item.dest == dest).expect(
            "a shard of two tiles",
        );
        let [first, second] = [p.items[0].slot, p.items[next].slot];
        p.items[0].slot = second;
        p.items[next].slot = first;
        let sender = p.rank;
        assert_violates!(call, Violation::WrongPartial { peer, .. } if peer == sender);
    }

    #[test]
    fn order(
        call in calls(GemmReduceScatter, 2..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
        distance: Index,
    ) {
        let mut call = call;
        let world = call.0.len();
        // Two ranks work on their own shard first.
        let one = rank.index(world);
        let other = (one + 1 + distance.index(world - 1)) % world;
        for rank in [one, other] {
            let per_shard = call.0[rank].items.len() / world;
            call.0[rank].items.rotate_right(per_shard);
        }
        assert_violates!(call, Violation::Deadlock { rank, item: 0, .. }
            if [one, other].contains(&rank.index()));
    }

    #[test]
    fn destinations_of_items(
        call in calls(GemmReduceScatter, 3..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let sender = p.rank;
        let dest = p.items[0].dest;
        let other = p.items.iter().position(|item| item.dest != dest).expect("two peers");
        p.items.swap(0, other);
        assert_violates!(call, Violation::SameDestination { step, first, second, .. }
            if (step == 0 || step == other) && (first == sender || second == sender));
    }

    #[test]
    fn destinations_of_transfers(
        call in calls(AllGatherGemm, 3..=8, 1..=3, 1..=3, chunks()),
        rank: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        for transfer in &mut p.transfers {
            transfer.step = match transfer.step {
                1 => 2,
                2 => 1,
                step => step,
            };
        }
        let sender = p.rank;
        assert_violates!(call, Violation::SameDestination { step: 1..=2, first, second, .. }
            if first == sender || second == sender);
    }
}
