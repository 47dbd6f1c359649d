//! The rules of slices, split-K and stream-K, broken on purpose.

use crate::mutations::{assert_violates, pick, pick_item};
use crate::strategies::{Call, Knobs, knob_calls};
use flux_core::OpKind::{self, AllGatherGemm, GemmReduceScatter};
use flux_core::layout::RowLayout;
use flux_core::program::check::{Record, Violation, verify};
use flux_core::program::{Await, NONE, RowSource, Sink, TileProgram, WorkItem};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::BTreeMap;
use std::ops::Range;

/// Calls of either operation whose tiles are several items each.
fn split_calls() -> impl Strategy<Value = Call> {
    split_calls_in_slices(3)
}

/// The same, with at most `most` slices.
fn split_calls_in_slices(most: u32) -> impl Strategy<Value = Call> {
    let knobs = move || {
        (1..=most, 2..=3_u32, prop::sample::select(vec![RowLayout::PerShard, RowLayout::Flattened]))
            .prop_map(|(k_slices, split_k, rows)| Knobs { k_slices, split_k, rows, ..Knobs::PLAIN })
    };
    let of = move |op: OpKind| knob_calls(op, 1..=5, 3..=5, knobs());
    prop_oneof![of(AllGatherGemm), of(GemmReduceScatter)]
}

/// Calls of AllGather-GEMM that announce slices, with shards in places of their own or flattened.
fn sliced_calls(rows: RowLayout) -> impl Strategy<Value = Call> {
    knob_calls(
        AllGatherGemm,
        2..=5,
        4..=6,
        (2..=3_u32, 1..=2_u32).prop_map(move |(k_slices, split_k)| Knobs {
            k_slices,
            split_k,
            rows,
            ..Knobs::PLAIN
        }),
    )
}

fn is_partial(item: &WorkItem) -> bool {
    item.sink == Sink::Partial
}

fn is_fix_up(item: &WorkItem) -> bool {
    item.parts > 0
}

fn is_gather(item: &WorkItem) -> bool {
    item.a_source == RowSource::Gather
}

proptest! {
    #[test]
    fn bounds_along_k(call in split_calls(), rank: Index, item: Index, kind in 0..5) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let (k_steps, split_k_slots) = (p.k_steps(), p.split_k_slots);
        let index = pick_item(&p.items, item, |item| {
            if kind < 3 {
                item.k_steps > 0
            } else {
                is_partial(item) == (kind == 3) && item.part != NONE
            }
        });
        let item = &mut p.items[index];
        let expected = match kind {
            0 => {
                item.k_steps = 0;
                "k_steps"
            }
            1 => {
                item.k_first = k_steps;
                "k_steps"
            }
            2 => {
                item.k_steps = u32::MAX;
                "k_steps"
            }
            3 => {
                item.part = split_k_slots;
                "part"
            }
            _ => {
                item.parts = split_k_slots + 1;
                "part"
            }
        };
        assert_violates!(call, Violation::OutOfBounds { field, .. } if field == expected);
    }

    #[test]
    fn bounds_of_slices(
        call in sliced_calls(RowLayout::PerShard),
        rank: Index,
        which: Index,
        kind in 0..3,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let (k_steps, k) = (p.k_steps(), p.problem.k());
        let (transfer, entry) = (which.index(p.transfers.len()), which.index(p.awaits.len()));
        let expected = match kind {
            0 => {
                p.transfers[transfer].cols = k + 1;
                "cols"
            }
            1 => {
                p.transfers[transfer].col = k;
                "cols"
            }
            _ => {
                p.awaits[entry].k_step = k_steps;
                "k_step"
            }
        };
        assert_violates!(call, Violation::OutOfBounds { field, .. } if field == expected);
    }

    #[test]
    fn form_of_parts(call in split_calls(), rank: Index, item: Index, kind in 0..6) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let rank = p.rank.get();
        let world = p.problem.world().get();
        let partial = pick_item(&p.items, item, is_partial);
        let fix_up = pick_item(&p.items, item, is_fix_up);
        match kind {
            0 => p.items[partial].raise = NONE,
            1 => p.items[partial].parts = 1,
            2 if world > 1 => p.items[partial].dest = (rank + 1) % world,
            // A tile of one item names no split-K slot.
            2 | 3 => p.items[fix_up].parts = 0,
            4 => {
                // A late await has no step.
                let entry = p.items[fix_up].late_first as usize;
                p.awaits[entry].k_step = 1;
            }
            _ => {
                // A partial item has no late awaits.
                let late = (p.items[fix_up].late_first, p.items[fix_up].late_count);
                (p.items[partial].late_first, p.items[partial].late_count) = late;
            }
        }
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn form_of_slices(
        call in sliced_calls(RowLayout::PerShard),
        rank: Index,
        which: Index,
        kind in 0..4,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let transfer =
            pick_transfer(&p.transfers.iter().map(|t| t.col > 0).collect::<Vec<_>>(), which);
        let index = pick_item(&p.items, which, |item| is_gather(item) && item.await_count > 0);
        let item = p.items[index];
        let (first, last) =
            (item.await_first as usize, (item.await_first + item.await_count - 1) as usize);
        match kind {
            0 => {
                p.transfers[transfer].col += 1;
                p.transfers[transfer].cols -= 1;
            }
            1 => {
                let before = pick_transfer(
                    &p.transfers.iter().map(|t| t.col == 0).collect::<Vec<_>>(),
                    which,
                );
                p.transfers[before].cols -= 1;
            }
            2 => {
                prop_assume!(p.awaits[first].k_step < p.awaits[last].k_step);
                p.awaits.swap(first, last);
            }
            _ => p.awaits[first].k_step = item.k_first + item.k_steps,
        }
        match kind {
            3 if item.k_first + item.k_steps == call.0[0].k_steps() => {
                assert_violates!(call, Violation::OutOfBounds { field: "k_step", .. });
            }
            _ => assert_violates!(call, Violation::Form { .. }),
        }
    }

    #[test]
    fn parts_that_do_not_partition_k(
        call in split_calls_in_slices(1),
        rank: Index,
        item: Index,
        kind in 0..3,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let k_steps = p.k_steps();
        match kind {
            // A step is missing at the end of `k`, or multiplied twice.
            0 => {
                let index = pick_item(&p.items, item, |item| {
                    is_partial(item) && item.k_first + item.k_steps == k_steps
                });
                if p.items[index].k_steps > 1 {
                    p.items[index].k_steps -= 1;
                } else {
                    p.items[index].k_first -= 1;
                }
            }
            1 => {
                let index = pick_item(&p.items, item, is_partial);
                p.items[index].k_first -= 1;
            }
            _ => {
                let index = pick_item(&p.items, item, is_fix_up);
                p.items[index].k_steps += 1;
            }
        }
        assert_violates!(call, Violation::KNotCovered { .. });
    }

    #[test]
    fn parts_that_are_taken_twice_or_not_at_all(
        call in split_calls(),
        rank: Index,
        item: Index,
        kind in 0..4,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let partial = pick_item(&p.items, item, is_partial);
        let fix_ups: Vec<usize> =
            (0..p.items.len()).filter(|&index| is_fix_up(&p.items[index])).collect();
        match kind {
            0 => {
                prop_assume!(fix_ups.len() > 1);
                let one = item.index(fix_ups.len() - 1);
                p.items[fix_ups[one + 1]].part = p.items[fix_ups[one]].part;
                assert_violates!(call, Violation::PartReadTwice { first, second, .. }
                    if (first, second) == (fix_ups[one], fix_ups[one + 1]));
            }
            1 => {
                // Every rank has one more slot, which nobody reads.
                for p in &mut call.0 {
                    p.split_k_slots += 1;
                }
                let p = pick(&mut call, rank);
                p.items[partial].part = p.split_k_slots - 1;
                assert_violates!(call, Violation::PartMissing { item, .. } if item > partial);
            }
            2 => {
                // The tile's last steps are multiplied twice, and added once.
                let fix_up = *item.get(&fix_ups);
                prop_assume!(p.items[fix_up].parts > 1);
                p.items[fix_up - 2].k_steps += p.items[fix_up - 1].k_steps;
                let WorkItem { await_group, k_first, parts, .. } = p.items[fix_up];
                // Its signal is still awaited, with rows, as only an AllGather-GEMM does.
                let mut rows = p.awaits_of(&p.items[fix_up]).to_vec();
                let k_step = rows.last().map_or(k_first, |row| row.k_step);
                let unread =
                    Await { k_step, ..p.late_awaits_of(&p.items[fix_up])[parts as usize - 1] };
                rows.resize(rows.len() + await_group.max(1) as usize, unread);
                let fix_up_item = &mut p.items[fix_up];
                (fix_up_item.parts, fix_up_item.late_count) =
                    (parts - 1, fix_up_item.late_count - 1);
                (fix_up_item.await_first, fix_up_item.await_count) =
                    (p.awaits.len() as u32, rows.len() as u32);
                fix_up_item.await_group = await_group.max(1);
                p.awaits.extend(rows);
                match p.problem.op() {
                    AllGatherGemm => {
                        assert_violates!(call, Violation::PartNotRead { item, .. }
                            if item == fix_up - 1);
                    }
                    _ => assert_violates!(call, Violation::Form { .. }),
                }
            }
            _ => {
                let partials: Vec<usize> =
                    (0..p.items.len()).filter(|&index| is_partial(&p.items[index])).collect();
                prop_assume!(partials.len() > 1);
                let other =
                    partials[(partials.iter().position(|&index| index == partial).unwrap() + 1)
                        % partials.len()];
                p.items[partial].part = p.items[other].part;
                let (rank, slot) = (p.rank, p.items[other].part);
                assert_violates!(call, Violation::WrittenTwice { owner, what: "split-K slot", index, .. } if (owner, index) == (rank, slot));
            }
        }
    }

    #[test]
    fn parts_of_other_tiles(call in split_calls(), rank: Index, item: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let fix_ups: Vec<usize> =
            (0..p.items.len()).filter(|&index| is_fix_up(&p.items[index])).collect();
        prop_assume!(fix_ups.len() > 1);
        let one = item.index(fix_ups.len());
        let (first, second) = (fix_ups[one], fix_ups[(one + 1) % fix_ups.len()]);
        prop_assume!(p.items[first].parts == p.items[second].parts);
        let part = p.items[first].part;
        p.items[first].part = p.items[second].part;
        p.items[second].part = part;
        assert_violates!(call, Violation::WrongPart { .. });
    }

    #[test]
    fn parts_that_are_not_awaited(call in split_calls(), rank: Index, item: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let fix_ups: Vec<usize> =
            (0..p.items.len()).filter(|&index| is_fix_up(&p.items[index])).collect();
        prop_assume!(fix_ups.len() > 1);
        let one = item.index(fix_ups.len());
        // Two tiles await each other's first part.
        let [first, second] = [fix_ups[one], fix_ups[(one + 1) % fix_ups.len()]]
            .map(|index| p.items[index].late_first as usize);
        p.awaits.swap(first, second);
        let rank = p.rank;
        assert_violates!(call, Violation::Unguarded { rank: unguarded, what: "split-K slot", peer, .. } if (unguarded, peer) == (rank, rank));
    }

    #[test]
    fn parts_that_are_awaited_in_another_order_than_they_are_added(
        call in split_calls(),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let fix_up = p.items[pick_item(&p.items, item, is_fix_up)];
        prop_assume!(fix_up.parts > 1);
        let first = fix_up.late_first as usize;
        p.awaits.swap(first, first + 1);
        let rank = p.rank;
        assert_violates!(call, Violation::Unguarded { rank: unguarded, what: "split-K slot", index, .. } if (unguarded, index) == (rank, fix_up.part));
    }

    #[test]
    fn more_that_is_awaited_than_there_are_parts(call in split_calls(), rank: Index, item: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, is_fix_up);
        let mut late = p.late_awaits_of(&p.items[index]).to_vec();
        late.push(late[0]);
        let (first, count) = (p.awaits.len() as u32, late.len() as u32);
        p.awaits.extend(late);
        (p.items[index].late_first, p.items[index].late_count) = (first, count);
        let more = "more awaits after the multiplication than additions";
        assert_violates!(call, Violation::Form { record: Record::Item(wrong), what, .. }
            if (wrong, what) == (index, more));
    }

    #[test]
    fn partial_tiles_of_who_adds_none(
        call in split_calls(),
        rank: Index,
        item: Index,
        partials in 1..=4_u32,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        // A partial item, or a fix-up item that stores or scatters.
        let index = pick_item(&p.items, item, |item| {
            matches!(item.sink, Sink::Partial | Sink::Store | Sink::Scatter)
        });
        (p.items[index].partials, p.items[index].partial_slot) = (partials, 0);
        assert_violates!(call, Violation::Form { record: Record::Item(wrong), what: "only an item \
                                                                                     that adds \
                                                                                     partial \
                                                                                     results \
                                                                                     counts them", .. } if wrong == index);
    }

    #[test]
    fn a_fix_up_item_before_its_partial_items(call in split_calls(), rank: Index, item: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let fix_up = pick_item(&p.items, item, is_fix_up);
        let partials = p.items[fix_up].parts as usize;
        p.items[fix_up - partials..=fix_up].rotate_right(1);
        let rank = p.rank;
        assert_violates!(call, Violation::Deadlock { rank: stuck, item, peer, .. }
            if (stuck, item, peer) == (rank, fix_up - partials, rank));
    }

    #[test]
    fn slices_that_overlap(call in sliced_calls(RowLayout::Flattened), rank: Index, which: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let which =
            pick_transfer(&p.transfers.iter().map(|t| t.col > 0).collect::<Vec<_>>(), which);
        let transfer = &mut p.transfers[which];
        transfer.col -= p.tile.k;
        transfer.cols += p.tile.k;
        let dest = transfer.dest;
        assert_violates!(call, Violation::WrittenTwice { owner, what: "gather row", .. }
            if owner.get() == dest);
    }

    #[test]
    fn slices_that_are_not_brought(
        call in sliced_calls(RowLayout::Flattened),
        rank: Index,
        which: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let which = pick_transfer(
            &p.transfers.iter().map(|t| t.cols > p.tile.k).collect::<Vec<_>>(),
            which,
        );
        let transfer = &mut p.transfers[which];
        transfer.col += p.tile.k;
        transfer.cols -= p.tile.k;
        let (source, dest) = (p.rank, transfer.dest);
        assert_violates!(call, Violation::Unguarded { rank, what: "gather row", peer, .. }
            if (rank.get(), peer) == (dest, source));
    }

    #[test]
    fn slices_that_are_awaited_late(
        call in sliced_calls(RowLayout::Flattened),
        rank: Index,
        item: Index,
        kind in 0..2,
    ) {
        let mut call = call;
        let announced = announced(&call);
        let p = pick(&mut call, rank);
        if kind == 0 {
            // The item loses its last await, which others of its range still have.
            let index = pick_item(&p.items, item, |_| true);
            let shared = p.items.iter().filter(|other| {
                let (a, b) = (
                    other.await_first + other.await_count,
                    p.items[index].await_first + p.items[index].await_count,
                );
                a == b
            });
            prop_assume!(shared.count() > 1);
            // The await covers the item's own rows, not only those of its raster group.
            let item = &mut p.items[index];
            let last = p.awaits[(item.await_first + item.await_count - 1) as usize].signal;
            let rows = announced.get(&(p.rank.get(), last)).cloned().unwrap_or(0..0);
            prop_assume!(rows.start < item.row + item.rows && item.row < rows.end);
            item.await_count -= 1;
            item.await_group = item.await_group.min(item.await_count);
        } else {
            let later = p
                .awaits
                .iter()
                .map(|entry| entry.k_step > 0 && entry.k_step + 1 < p.k_steps())
                .collect::<Vec<_>>();
            prop_assume!(later.contains(&true));
            let which = pick_transfer(&later, item);
            // All awaits of this step move.
            let step = p.awaits[which].k_step;
            let next =
                p.awaits.iter().map(|entry| entry.k_step).filter(|&k_step| k_step > step).min();
            prop_assume!(next.is_none_or(|next| next > step + 1));
            p.awaits
                .iter_mut()
                .filter(|entry| entry.k_step == step)
                .for_each(|entry| entry.k_step += 1);
        }
        // The new step may be outside the item.
        assert_violates!(
            call,
            Violation::Unguarded { what: "gather row", .. } | Violation::Form { .. }
        );
    }
}

/// Rows that each signal announces, by rank and signal.
fn announced(call: &Call) -> BTreeMap<(u32, u32), Range<u32>> {
    let of_rank = |program: &TileProgram| {
        let first = program.problem.shard_rows(program.rank).start;
        program
            .transfers
            .iter()
            .map(|t| ((t.dest, t.raise), first + t.row..first + t.row + t.rows))
            .collect::<Vec<_>>()
    };
    call.0.iter().flat_map(of_rank).collect()
}

/// One of the records that are `wanted`.
fn pick_transfer(wanted: &[bool], which: Index) -> usize {
    let candidates: Vec<usize> = (0..wanted.len()).filter(|&index| wanted[index]).collect();
    *which.get(&candidates)
}
