//! The items of a program while it is built: a tile becomes one item, or several that share its
//! `k`.
//!
//! Invariant: the partial items of a tile precede its fix-up item, immediately unless stream-K
//! shares the tile. Signals of partial items follow all other signals of the pad.

use super::k_extent::KExtent;
use super::stream_k::{Position, StreamK};
use crate::program::{Await, NONE, Schedule, Sink, WorkItem};
use crate::{Nodes, Problem, Rank};
use std::ops::Range;

/// The lists of items and awaits.
#[derive(Debug)]
pub(super) struct Items {
    /// Every item, tile by tile.
    pub(super) all: Vec<WorkItem>,
    pub(super) awaits: Vec<Await>,
    /// Signals below those of partial items.
    other_signals: u32,
    /// Split-K slots in use.
    used_slots: u32,
    /// Split-K slots of the rank with the most, so that all have the same workspace.
    pub(super) split_k_slots: u32,
    /// The parts of a tile outside stream-K, the fix-up item's first.
    parts: Vec<Range<u32>>,
    stream_k: Option<StreamK>,
    /// Tiles so far.
    tiles: u64,
    /// Sort keys of the shared tiles' items.
    positions: Vec<Position>,
    rank: Rank,
}

/// Entries of the await list: the first, how many, and how many form a group.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AwaitRange {
    pub(super) first: u32,
    pub(super) count: u32,
    pub(super) group: u32,
}

impl Items {
    /// An empty list for the tiles of `rank`, whose partial items' signals begin at
    /// `other_signals`, with room for `other_items`.
    pub(super) fn new(
        problem: &Problem,
        rank: Rank,
        schedule: &Schedule,
        nodes: Nodes,
        other_signals: u32,
        other_items: u32,
    ) -> Self {
        // All ranks split into equally many parts.
        let split_k = schedule.split_k.min(KExtent::least(problem, schedule).steps());
        let parts = KExtent::new(problem, rank, schedule).parts(split_k);
        let stream_k = |rank| schedule.stream_k_tiles(problem, rank).filter(|_| !nodes.are_mixed());
        let slots = |rank| {
            let split = schedule.tiles(problem, rank) * (parts.len() as u64 - 1);
            stream_k(rank).map_or(split, |stream_k| stream_k.partial_items())
        };
        let most_slots = problem.distinct_ranks().map(slots).max().unwrap_or(0);
        let items = schedule.tiles(problem, rank) + slots(rank) + u64::from(other_items);
        Self {
            all: Vec::with_capacity(items as usize),
            awaits: Vec::new(),
            other_signals,
            used_slots: 0,
            split_k_slots: u32::try_from(most_slots).unwrap_or(u32::MAX),
            stream_k: stream_k(rank),
            parts,
            tiles: 0,
            positions: Vec::new(),
            rank,
        }
    }

    /// Signals in all.
    pub(super) const fn signals(&self) -> u32 {
        self.other_signals + self.split_k_slots
    }

    /// The index of the next entry of the await list, whose length fits a `u32` by the limits that
    /// are checked before building.
    pub(super) fn next_await(&self) -> u32 {
        self.awaits.len() as u32
    }

    /// Appends a tile, given as its fix-up item. `rows` gives the awaits of a range of steps.
    pub(super) fn tile(&mut self, tile: WorkItem, rows: impl Fn(&Range<u32>) -> AwaitRange) {
        let shared =
            self.stream_k.filter(|stream_k| stream_k.contains(self.tiles)).map(|stream_k| {
                let (mut positions, parts): (Vec<_>, Vec<_>) = stream_k.parts(self.tiles).unzip();
                // The fix-up item is the last in the list.
                positions.rotate_left(1);
                self.positions.append(&mut positions);
                parts
            });
        self.tiles += 1;
        let parts = shared.as_deref().unwrap_or(&self.parts);
        let first_slot = self.used_slots;
        let item = |k: &Range<u32>| {
            let AwaitRange { first: await_first, count: await_count, group: await_group } = rows(k);
            WorkItem {
                await_first,
                await_count,
                await_group,
                k_first: k.start,
                k_steps: k.end - k.start,
                ..tile
            }
        };
        let partial_items = parts.len() as u32 - 1;
        for (part, k) in (first_slot..).zip(&parts[1..]) {
            self.all.push(WorkItem {
                sink: Sink::Partial,
                dest: self.rank.get(),
                slot: NONE,
                partials: 0,
                partial_slot: NONE,
                raise: self.other_signals + part,
                counter: NONE,
                raise_after: 1,
                part,
                late_first: 0,
                late_count: 0,
                ..item(k)
            });
        }
        let mut fix_up = item(&parts[0]);
        if partial_items > 0 {
            let late = fix_up.late_first as usize..(fix_up.late_first + fix_up.late_count) as usize;
            (fix_up.part, fix_up.parts) = (first_slot, partial_items);
            (fix_up.late_first, fix_up.late_count) =
                (self.next_await(), partial_items + fix_up.late_count);
            let signals =
                self.other_signals + first_slot..self.other_signals + first_slot + partial_items;
            self.awaits.extend(signals.map(|signal| Await {
                signal,
                peer: self.rank.get(),
                k_step: 0,
            }));
            self.awaits.extend_from_within(late);
            self.used_slots += partial_items;
        }
        self.all.push(fix_up);
    }

    /// Every item, in the order of the program.
    pub(super) fn in_order(&mut self) -> Vec<WorkItem> {
        // Tiles before the shared ones are one item each.
        let first = self.stream_k.map_or(0, |stream_k| stream_k.first()) as usize;
        let items = self.all.get_mut(first..).unwrap_or_default();
        let mut shared: Vec<_> = self
            .positions
            .drain(..)
            .zip(&*items)
            .map(|(position, &item)| (position, item))
            .collect();
        shared.sort_by_key(|&(position, _)| position);
        for (place, (_, item)) in items.iter_mut().zip(shared) {
            *place = item;
        }
        std::mem::take(&mut self.all)
    }
}
