//! A rank while it works.
//!
//! Invariant: a rank has as many workers as there are multiprocessors, or tiles if those are fewer,
//! and counts what is there of a chunk up to the whole chunk.

use super::pad::Pad;
use super::phases::{self, Phase};
use super::worker::Worker;
use super::{Machine, Mover, RankTotals, waves};
use crate::Rank;
use crate::program::{NONE, TileProgram, WorkItem, sink};

#[derive(Debug)]
pub(super) struct RankState<'a> {
    pub(super) program: &'a TileProgram,
    pub(super) workers: Vec<Worker>,
    pub(super) pad: Pad,
    /// Whether copy engines push the shard.
    pub(super) copied: bool,
    pub(super) totals: RankTotals,
    /// Items of a chunk that are there, by counter and by the rank where they are.
    counters: Vec<u32>,
    /// By item: see [`waves`].
    read: Vec<u64>,
}

impl<'a> RankState<'a> {
    /// Each worker at the beginning of its first item.
    pub(super) fn new(program: &'a TileProgram, machine: &Machine, mover: Mover) -> Self {
        let tiles = program.items.iter().filter(|item| item.sink != sink::REDUCE_ROWS).count();
        let workers = tiles.min(machine.multiprocessors.max(1) as usize);
        let mut state = Self {
            program,
            workers: Vec::with_capacity(workers),
            pad: Pad::new(program.signals),
            copied: mover == Mover::CopyEngine && !program.flattened,
            totals: RankTotals::default(),
            counters: vec![0; program.counters as usize * program.problem.world().index()],
            read: waves::read_by_step(program, workers),
        };
        state.workers = (0..workers).map(|index| Worker::new(index, state.phases(index, machine))).collect();
        state
    }

    /// What a worker does for the item with this index.
    pub(super) fn phases(&self, index: usize, machine: &Machine) -> Vec<Phase> {
        phases::of(self.program, &self.program.items[index], self.read[index], machine)
    }

    /// Whether the chunk of `item`, of which one more is there, at `to`, is now whole.
    pub(super) fn completes(&mut self, item: &WorkItem, to: Rank) -> bool {
        if item.counter == NONE {
            return true;
        }
        let count = &mut self.counters[item.counter as usize * self.program.problem.world().index() + to.index()];
        *count += 1;
        *count == item.raise_after
    }
}

/// How many rows of `item`, which are scattered, `owner` has.
pub(super) fn rows_of(program: &TileProgram, item: &WorkItem, owner: Rank) -> u64 {
    let own = program.problem.shard_rows(owner);
    u64::from(own.end.min(item.row + item.rows).saturating_sub(own.start.max(item.row)))
}
