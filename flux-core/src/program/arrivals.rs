//! What is announced of a shard in AllGather-GEMM: chunks of its rows, in slices of its columns.
//!
//! Invariant: the chunks are all of the rows and the slices all of the columns, so together they
//! are the shard.

use super::along_k::AlongK;
use super::{Await, Schedule, Transfer};
use crate::tile::TileGrid;
use crate::{Problem, Rank};
use std::ops::Range;

/// How a shard is cut, and how its pieces are numbered.
#[derive(Debug)]
pub(super) struct Arrivals {
    along_k: AlongK,
    /// Of steps along `k`.
    slices: Vec<Range<u32>>,
    /// Rows of a chunk, but for the last.
    chunk_rows: u32,
    m_shard: u32,
}

impl Arrivals {
    pub(super) fn new(problem: &Problem, schedule: &Schedule) -> Self {
        let row_blocks = TileGrid::of_shard(problem, schedule.tile).row_blocks();
        let (along_k, m_shard) = (AlongK::new(problem, schedule), problem.m_shard());
        let chunk_rows = schedule.chunk_of(row_blocks).saturating_mul(schedule.tile.m).min(m_shard);
        Self { along_k, slices: along_k.slices(schedule.k_slices), chunk_rows, m_shard }
    }

    /// Chunks of a shard.
    pub(super) const fn chunks(&self) -> u32 {
        self.m_shard.div_ceil(self.chunk_rows)
    }

    /// Rows of a chunk, but for the last.
    pub(super) const fn chunk_rows(&self) -> u32 {
        self.chunk_rows
    }

    /// Slices of a shard.
    pub(super) fn slices(&self) -> u32 {
        self.slices.len() as u32
    }

    /// Signals of `shards` shards.
    pub(super) fn signals(&self, shards: u32) -> u64 {
        u64::from(shards) * u64::from(self.chunks()) * u64::from(self.slices())
    }

    /// The chunks that these rows of a shard are in.
    pub(super) const fn chunks_of(&self, rows: Range<u32>) -> Range<u32> {
        rows.start / self.chunk_rows..rows.end.div_ceil(self.chunk_rows)
    }

    /// The slices that these steps along `k` are in.
    fn slices_of(&self, steps: &Range<u32>) -> Range<u32> {
        let width = self.slices[0].end;
        steps.start / width..steps.end.div_ceil(width)
    }

    /// Of awaits that are listed slice by slice from `first`, `per_slice` for each, those of these
    /// steps along `k`: their first, how many, and how many together.
    pub(super) fn awaits_of(&self, first: u32, per_slice: u32, steps: &Range<u32>) -> (u32, u32, u32) {
        let slices = self.slices_of(steps);
        if per_slice == 0 { (0, 0, 0) } else { (first + slices.start * per_slice, slices.len() as u32 * per_slice, per_slice) }
    }

    /// Awaits the piece of the shard in `place`, which `peer` brings.
    pub(super) fn await_piece(&self, place: u32, peer: Rank, chunk: u32, slice: u32) -> Await {
        Await { signal: self.signal(place, chunk, slice), peer: peer.get(), k_step: self.slices[slice as usize].start }
    }

    /// Moves a piece of a shard to its `place` at `dest`.
    pub(super) fn transfer(&self, (dest, step): (Rank, u32), place: u32, chunk: u32, slice: u32) -> Transfer {
        let row = chunk * self.chunk_rows;
        let (col, cols) = self.along_k.columns(&self.slices[slice as usize]);
        let rows = self.chunk_rows.min(self.m_shard - row);
        Transfer { dest: dest.get(), place, row, rows, col, cols, raise: self.signal(place, chunk, slice), step }
    }

    fn signal(&self, place: u32, chunk: u32, slice: u32) -> u32 {
        (place * self.chunks() + chunk) * self.slices() + slice
    }
}
