//! The items of a program while it is built: a tile becomes one item, or several that share its
//! `k`.
//!
//! Invariant: the lenders of a tile come before its lead, right before it but where tiles are
//! shared by groups of workers; and the signals that lenders raise, in the order of tiles and of
//! `k`, come after all others of the pad.

use super::along_k::AlongK;
use super::shares::{Shares, Turn};
use super::{Await, NONE, Schedule, WorkItem, sink};
use crate::Rank;
use std::ops::Range;

/// The lists of items and awaits.
#[derive(Debug)]
pub(super) struct Items {
    /// Every item, tile by tile.
    pub(super) all: Vec<WorkItem>,
    pub(super) awaits: Vec<Await>,
    /// Signals that are not lenders', and below them.
    other_signals: u32,
    /// Part slots taken.
    pub(super) split_k_slots: u32,
    /// Of a tile that is not shared so, the lead's first.
    parts: Vec<Range<u32>>,
    shares: Option<Shares>,
    /// Tiles so far.
    tiles: u64,
    /// When each item of the tiles that are shared has its turn.
    turns: Vec<Turn>,
    rank: Rank,
}

impl Items {
    /// None yet, of a program of `rank` that has `tiles` and uses `other_signals` signals besides
    /// those of lenders.
    pub(super) fn new(rank: Rank, tiles: u32, along_k: AlongK, schedule: &Schedule, other_signals: u32) -> Self {
        let parts = along_k.parts(schedule.splits);
        let all = Vec::with_capacity(tiles as usize * parts.len());
        Self { all, awaits: Vec::new(), other_signals, split_k_slots: 0, parts, shares: None, tiles: 0, turns: Vec::new(), rank }
    }

    /// The same, of whose tiles some are shared so.
    pub(super) fn shared(self, shares: Option<Shares>) -> Self {
        Self { shares, ..self }
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

    /// Appends a tile: what is said of it here is its lead's. `rows` gives the entries of the await
    /// list, first, count and how many stand together, for a part of `k`.
    pub(super) fn tile(&mut self, tile: WorkItem, rows: impl Fn(&Range<u32>) -> (u32, u32, u32)) {
        let shared = self.shares.filter(|shares| shares.has(self.tiles)).map(|shares| {
            let (mut turns, parts): (Vec<_>, Vec<_>) = shares.parts(self.tiles).unzip();
            // The lead's is last in the list.
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
        let lenders = parts.len() as u32 - 1;
        for (i, k) in (0..).zip(&parts[1..]) {
            let (raise, part) = (self.other_signals + part + i, part + i);
            let (dest, slot, partials, partial_slot) = (self.rank.get(), NONE, 0, NONE);
            let of =
                WorkItem { sink: sink::PARTIAL, dest, slot, partials, partial_slot, raise, counter: NONE, raise_after: 1, part, ..item(k) };
            self.all.push(WorkItem { late_first: 0, late_count: 0, ..of });
        }
        let mut lead = item(&parts[0]);
        if lenders > 0 {
            let late = lead.late_first as usize..(lead.late_first + lead.late_count) as usize;
            (lead.part, lead.parts) = (part, lenders);
            (lead.late_first, lead.late_count) = (self.next_await(), lenders + lead.late_count);
            let signals = self.other_signals + part..self.other_signals + part + lenders;
            self.awaits.extend(signals.map(|signal| Await { signal, peer: self.rank.get(), k_step: 0 }));
            self.awaits.extend_from_within(late);
            self.split_k_slots += lenders;
        }
        self.all.push(lead);
    }

    /// Every item, in the order in which they are worked on.
    pub(super) fn in_order(&mut self) -> Vec<WorkItem> {
        // Tiles before them are whole, one item each.
        let first = self.shares.map_or(0, |shares| shares.before()) as usize;
        let items = self.all.get_mut(first..).unwrap_or_default();
        let mut shared: Vec<_> = self.turns.drain(..).zip(&*items).map(|(turn, &item)| (turn, item)).collect();
        shared.sort_by_key(|&(turn, _)| turn);
        for (place, (_, item)) in items.iter_mut().zip(shared) {
            *place = item;
        }
        std::mem::take(&mut self.all)
    }
}
