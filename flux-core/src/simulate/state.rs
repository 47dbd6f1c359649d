//! The state of a rank during a call.
//!
//! Invariant: a rank has one worker for each SM, at most one for each tile. Chunk counters never
//! exceed the chunk.

use super::pad::Pad;
use super::phases::{self, Phase};
use super::result::RankTotals;
use super::waves;
use super::worker::Worker;
use crate::Rank;
use crate::machine::Machine;
use crate::plan::Mover;
use crate::program::{NONE, Sink, TileProgram, WorkItem};
use crate::timeline::{Phase as Spent, Track};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct RankState<'a> {
    pub(super) program: &'a TileProgram,
    pub(super) workers: Vec<Worker>,
    /// What each worker does.
    pub(super) tracks: Vec<Track>,
    pub(super) pad: Pad,
    /// Whether copy engines push the shard.
    pub(super) copied: bool,
    pub(super) totals: RankTotals,
    /// Arrived items of chunks, by counter and destination.
    counters: Vec<u32>,
    /// Bytes read in a step by the wave of each item: see [`waves`].
    read: Vec<u64>,
}

impl<'a> RankState<'a> {
    /// The rank with each worker at its first item.
    pub(super) fn new(program: &'a TileProgram, machine: &Machine, mover: Mover) -> Self {
        let tiles = program
            .items
            .iter()
            .filter(|item| item.sink != Sink::ReduceRows && item.sink != Sink::Copy)
            .count();
        let workers = tiles.min(machine.multiprocessors.max(1) as usize);
        let mut state = Self {
            program,
            workers: Vec::with_capacity(workers),
            tracks: vec![Track::new(Duration::from_nanos(machine.begin_ns)); workers],
            pad: Pad::new(program.signals),
            copied: mover == Mover::CopyEngine && !program.rows.is_flattened(),
            totals: RankTotals::default(),
            counters: vec![0; program.counters as usize * program.problem.world().index()],
            read: waves::read_by_step(program, workers),
        };
        state.workers =
            (0..workers).map(|index| Worker::new(index, state.phases(index, machine))).collect();
        state
    }

    /// The phases of the item with this index.
    pub(super) fn phases(&self, index: usize, machine: &Machine) -> Vec<Phase> {
        phases::of(self.program, &self.program.items[index], self.read[index], machine)
    }

    /// The totals, with the sums over its workers.
    pub(super) fn summed(&self) -> RankTotals {
        let sum = |phase| self.tracks.iter().map(|track| track.total(phase)).sum();
        let [multiplying, waiting, adding] = [Spent::Multiply, Spent::Wait, Spent::Add].map(sum);
        RankTotals { multiplying, waiting, adding, ..self.totals }
    }

    /// Counts an arrived item at `to`; whether its chunk is now whole.
    pub(super) fn completes(&mut self, item: &WorkItem, to: Rank) -> bool {
        if item.counter == NONE {
            return true;
        }
        let count = &mut self.counters
            [item.counter as usize * self.program.problem.world().index() + to.index()];
        *count += 1;
        *count == item.raise_after
    }
}

/// Rows of a scattered `item` that `owner` owns.
pub(super) fn rows_of(program: &TileProgram, item: &WorkItem, owner: Rank) -> u64 {
    let own = program.reduced_rows(owner);
    u64::from(own.end.min(item.row + item.rows).saturating_sub(own.start.max(item.row)))
}
