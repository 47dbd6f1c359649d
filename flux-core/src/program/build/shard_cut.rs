//! How an AllGather-GEMM cuts a shard: chunks of rows by slices of `k`, each piece with a signal.
//!
//! Invariant: the pieces of a shard do not overlap and cover it. All shards have the same number of
//! pieces; the last ones of a shard with one row less may be empty, and have their signals.

use super::items::AwaitRange;
use super::k_extent::KExtent;
use crate::program::{Await, Schedule, Transfer};
use crate::tile::TileGrid;
use crate::{Problem, Rank};
use std::ops::Range;

/// The pieces of a shard and their numbers.
#[derive(Debug)]
pub(super) struct ShardCut {
    k_extent: KExtent,
    /// Ranges of steps.
    slices: Vec<Range<u32>>,
    /// Rows of a chunk; the last chunk may have fewer.
    chunk_rows: u32,
    problem: Problem,
}

impl ShardCut {
    pub(super) fn new(problem: &Problem, schedule: &Schedule) -> Self {
        let row_blocks = TileGrid::of_shard(problem, schedule.tile).row_blocks();
        // An AllGather-GEMM's ranks have all of `k`.
        let k_extent = KExtent::least(problem, schedule);
        let chunk_rows =
            schedule.chunk_of(row_blocks).saturating_mul(schedule.tile.m).min(problem.m_shard());
        // A row's scales come with the whole of it.
        let most = if problem.rows_carry_scales() { 1 } else { schedule.k_slices };
        Self { k_extent, slices: k_extent.slices(most), chunk_rows, problem: *problem }
    }

    /// Chunks of a shard.
    pub(super) const fn chunks(&self) -> u32 {
        self.problem.m_shard().div_ceil(self.chunk_rows)
    }

    /// The rows of a chunk of `shard`, numbered within the shard; perhaps none.
    pub(super) const fn rows_of(&self, shard: Rank, chunk: u32) -> Range<u32> {
        let rows = self.problem.shard_rows(shard);
        let (first, end) = (chunk * self.chunk_rows, (chunk + 1) * self.chunk_rows);
        let all = rows.end - rows.start;
        (if first < all { first } else { all })..(if end < all { end } else { all })
    }

    /// Slices of a shard.
    pub(super) fn slices(&self) -> u32 {
        self.slices.len() as u32
    }

    /// Signals of `shards` shards.
    pub(super) fn signals(&self, shards: u32) -> u64 {
        u64::from(shards) * u64::from(self.chunks()) * u64::from(self.slices())
    }

    /// The chunks that contain these rows of a shard.
    pub(super) const fn chunks_of(&self, rows: Range<u32>) -> Range<u32> {
        rows.start / self.chunk_rows..rows.end.div_ceil(self.chunk_rows)
    }

    /// The slices that contain these steps.
    fn slices_of(&self, steps: &Range<u32>) -> Range<u32> {
        if self.slices.len() == 1 {
            return 0..1;
        }
        let width = self.slices[0].end;
        steps.start / width..steps.end.div_ceil(width)
    }

    /// The awaits of these steps, in a list that has `per_slice` entries for each slice from
    /// `first` on.
    pub(super) fn awaits_of(&self, first: u32, per_slice: u32, steps: &Range<u32>) -> AwaitRange {
        let slices = self.slices_of(steps);
        if per_slice == 0 {
            return AwaitRange::default();
        }
        AwaitRange {
            first: first + slices.start * per_slice,
            count: slices.len() as u32 * per_slice,
            group: per_slice,
        }
    }

    /// The await of a piece of the shard in `place`, which `peer` brings.
    pub(super) fn await_piece(&self, place: u32, peer: Rank, chunk: u32, slice: u32) -> Await {
        Await {
            signal: self.signal(place, chunk, slice),
            peer: peer.get(),
            k_step: self.slices[slice as usize].start,
        }
    }

    /// The transfer of a piece of `shard` to its `place` at `dest`.
    pub(super) fn transfer(
        &self,
        shard: Rank,
        dest: Rank,
        step: u32,
        place: u32,
        chunk: u32,
        slice: u32,
    ) -> Transfer {
        let rows = self.rows_of(shard, chunk);
        let (col, cols) = match self.slices.len() {
            1 => (0, self.problem.gathered_columns()),
            _ => self.k_extent.columns(&self.slices[slice as usize]),
        };
        let (row, rows) = (rows.start, rows.len() as u32);
        Transfer {
            dest: dest.get(),
            place,
            row,
            rows,
            col,
            cols,
            raise: self.signal(place, chunk, slice),
            step,
        }
    }

    fn signal(&self, place: u32, chunk: u32, slice: u32) -> u32 {
        (place * self.chunks() + chunk) * self.slices() + slice
    }
}
