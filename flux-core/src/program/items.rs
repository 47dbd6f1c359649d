//! The items of a program while it is built: a tile becomes one item, or several that share its
//! `k`.
//!
//! Invariant: the partial items of a tile come before its fix-up item, right before it but where tiles are
//! shared by groups of workers; and the signals that partial items raise, in the order of tiles and of
//! `k`, come after all others of the pad.

use super::along_k::AlongK;
use super::stream_k::{StreamK, Turn};
use super::{Await, NONE, Schedule, WorkItem, sink};
use crate::Rank;
use std::ops::Range;

/// The lists of items and awaits.
#[derive(Debug)]
pub(super) struct Items {
    /// Every item, tile by tile.
    pub(super) all: Vec<WorkItem>,
    pub(super) awaits: Vec<Await>,
    /// Signals that are not partial items', and below them.
    other_signals: u32,
    /// Part slots taken.
    pub(super) split_k_slots: u32,
    /// Of a tile that is not shared so, the fix-up item's first.
    parts: Vec<Range<u32>>,
    stream_k: Option<StreamK>,
    /// Tiles so far.
    tiles: u64,
    /// When each item of the tiles that are shared has its turn.
    turns: Vec<Turn>,
    rank: Rank,
}

impl Items {
    /// None yet, of a program of `rank` that has `tiles` and uses `other_signals` signals besides
    /// those of partial items.
    pub(super) fn new(rank: Rank, tiles: u32, along_k: AlongK, schedule: &Schedule, other_signals: u32) -> Self {
        let parts = along_k.parts(schedule.split_k);
        let all = Vec::with_capacity(tiles as usize * parts.len());
        Self { all, awaits: Vec::new(), other_signals, split_k_slots: 0, parts, stream_k: None, tiles: 0, turns: Vec::new(), rank }
    }

    /// The same, of whose tiles some are shared so.
    pub(super) fn shared(self, stream_k: Option<StreamK>) -> Self {
        Self { stream_k, ..self }
    }

    /// Signals used so far.
    pub(super) const fn signals(&self) -> u32 {
        self.other_signals + self.split_k_slots
    }

    /// The first entry that is appended to the await list next. A list that is longer than a `u32`
    /// says is refused before it is built.
    pub(super) fn next_await(&self) -> u32 {
        self.awaits.len() as u32
    }

    /// Appends a tile: what is said of it here is its fix-up item's. `rows` gives the entries of the await
    /// list, first, count and how many stand together, for a part of `k`.
    pub(super) fn tile(&mut self, tile: WorkItem, rows: impl Fn(&Range<u32>) -> (u32, u32, u32)) {
        let shared = self.stream_k.filter(|stream_k| stream_k.has(self.tiles)).map(|stream_k| {
            let (mut turns, parts): (Vec<_>, Vec<_>) = stream_k.parts(self.tiles).unzip();
            // The fix-up item's is last in the list.
            turns.rotate_left(1);
            self.turns.append(&mut turns);
            parts
        });
        self.tiles += 1;
        let parts = shared.as_deref().unwrap_or(&self.parts);
        let part = self.split_k_slots;
        let item = |k: &Range<u32>| {
            let (await_first, await_count, await_group) = rows(k);
            WorkItem { await_first, await_count, await_group, k_first: k.start, k_steps: k.end - k.start, ..tile }
        };
        let partials_of = parts.len() as u32 - 1;
        for (i, k) in (0..).zip(&parts[1..]) {
            let (raise, part) = (self.other_signals + part + i, part + i);
            let (dest, slot, partials, partial_slot) = (self.rank.get(), NONE, 0, NONE);
            let of =
                WorkItem { sink: sink::PARTIAL, dest, slot, partials, partial_slot, raise, counter: NONE, raise_after: 1, part, ..item(k) };
            self.all.push(WorkItem { late_first: 0, late_count: 0, ..of });
        }
        let mut fix_up = item(&parts[0]);
        if partials_of > 0 {
            let late = fix_up.late_first as usize..(fix_up.late_first + fix_up.late_count) as usize;
            (fix_up.part, fix_up.parts) = (part, partials_of);
            (fix_up.late_first, fix_up.late_count) = (self.next_await(), partials_of + fix_up.late_count);
            let signals = self.other_signals + part..self.other_signals + part + partials_of;
            self.awaits.extend(signals.map(|signal| Await { signal, peer: self.rank.get(), k_step: 0 }));
            self.awaits.extend_from_within(late);
            self.split_k_slots += partials_of;
        }
        self.all.push(fix_up);
    }

    /// Every item, in the order in which they are worked on.
    pub(super) fn in_order(&mut self) -> Vec<WorkItem> {
        // Tiles before them are whole, one item each.
        let first = self.stream_k.map_or(0, |stream_k| stream_k.before()) as usize;
        let items = self.all.get_mut(first..).unwrap_or_default();
        let mut shared: Vec<_> = self.turns.drain(..).zip(&*items).map(|(turn, &item)| (turn, item)).collect();
        shared.sort_by_key(|&(turn, _)| turn);
        for (place, (_, item)) in items.iter_mut().zip(shared) {
            *place = item;
        }
        std::mem::take(&mut self.all)
    }
}
