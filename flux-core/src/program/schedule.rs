//! The tuning knobs of a tile program.
//!
//! Invariant: no value of a [`Schedule`] changes what is computed, only when and in which pieces;
//! `split_k`, `stream_k`, and `in_mainloop` and `flattened` for GEMM-ReduceScatter, also
//! where it is rounded.

use super::ScheduleError;
use crate::problem::MAX_EXTENT;
use crate::tile::{Raster, TileExtent, TileGrid};
use crate::{TileShape, WorldSize};
use std::fmt;
use std::ops::Range;

/// How much of a shard one signal announces: the communication tile, independent of the GEMM tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chunk {
    /// The whole shard.
    Shard,
    /// So many tiles of the shard, at least 1; as many as the shard has, or more, are the whole
    /// shard.
    ///
    /// What is sent decides how they are counted. AllGather-GEMM sends rows of `x`: row blocks of
    /// `tile.m` rows each. GEMM-ReduceScatter sends partial tiles: tiles, in the order of the
    /// raster. Either way `Tiles(1)` is the finest. Where its rows are flattened a signal announces
    /// all of them, or each by itself, as with any number below all.
    Tiles(u32),
}

impl fmt::Display for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard => f.write_str("shard"),
            Self::Tiles(tiles) => write!(f, "{tiles} tiles"),
        }
    }
}

/// Most [`stream_k`](Schedule::shares): far more workers than any machine has, and few items beside
/// [`MAX_ITEMS`](super::MAX_ITEMS).
pub const MAX_STREAM_K: u32 = 1 << 16;

/// How a problem is cut and ordered. All ranks of a call use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// Extents of a GEMM tile.
    pub tile: TileShape,
    /// How much one signal announces.
    pub chunk: Chunk,
    /// Order of the tiles within every shard.
    pub raster: Raster,
    /// Shards whose tiles are worked on side by side: 1 and a shard is finished before the next is
    /// begun.
    ///
    /// Every group reads all of `w` once, as long as its tiles keep in step. Thin shards, of a few
    /// row blocks, are therefore better taken several at a time, though for AllGather-GEMM the group
    /// then begins when its last rows are there. For GEMM-ReduceScatter the own shard is always a
    /// group of its own.
    pub group: u32,
    /// Shards that are groups of their own before those of `group` shards begin, the own one first
    /// (AllGather-GEMM): with 1, the own shard is worked on while the rows of the first group come.
    pub prologue: u32,
    /// Peers' shards that are worked on chunk by chunk, as they come, the first to come first; the
    /// others in the order of the raster (AllGather-GEMM). Every chunk reads all of `w`, but none
    /// waits for another. Of a group of several shards so does a chunk of each, if the group begins
    /// with one of them and rows come whole; not where they come in slices of `k`.
    pub chunk_ordered: u32,
    /// Most slices that the columns of a shard, its `k`, are cut into, each with signals of its own
    /// (AllGather-GEMM): 1 and whole rows are announced.
    ///
    /// An item waits for a slice only when it comes to it, so that with several it begins when the
    /// first is there. Slices end at steps of `tile.k`.
    pub k_slices: u32,
    /// Items that share a tile, each of which multiplies a part of `k`; more than `k` has steps are
    /// as many as it has steps.
    ///
    /// For problems with fewer tiles than there are workers. The parts are added in the order of
    /// `k`, in fp32: the same bits in every run, but others than those of another number of splits.
    pub split_k: u32,
    /// Workers whose last wave is to be a whole one, at most [`MAX_STREAM_K`], or 1: the tiles that
    /// whole waves leave come first, or last where rows of an AllGather-GEMM come in slices of `k`,
    /// or the first are of several shards, and are shared by groups of these workers so that all
    /// are done after the same part of a tile.
    ///
    /// Means nothing where that gains nothing, where `split_k` share every tile, where only some
    /// ranks share a node, and where tiles of the own shard of a GEMM-ReduceScatter, which come
    /// last, would have to be shared. As with splits, the bits are others than those of another
    /// number.
    pub stream_k: u32,
    /// Whether rows are flattened, for shards with fewer rows than a tile, or that are not whole
    /// tiles. Means nothing in a world of 1.
    ///
    /// For GEMM-ReduceScatter it changes what is rounded: every rank's product, the own one too, is
    /// then rounded before all are added.
    pub flattened: bool,
    /// Partial tiles that a GEMM-ReduceScatter adds to a tile of the own shard while it is
    /// multiplied, those that were sent first, at even distances along `k`; the others are added
    /// after. More than there are, or than `k` has room for, are as many as there can be; there are
    /// none where `k` is split, where rows are flattened, and where only some ranks share a node.
    ///
    /// What is awaited in the midst of a tile should be there by then. The order of the sum follows
    /// from it: the same bits in every run, but others than those of another number.
    pub in_mainloop: u32,
}

impl Schedule {
    /// The simplest schedule of these tiles: whole shards, one after another, each tile one item.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// use flux_core::program::{Chunk, Schedule};
    /// let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(128, 256, 64)) };
    /// assert_eq!((schedule.group, schedule.k_slices, schedule.split_k, schedule.flattened), (1, 1, 1, false));
    /// ```
    pub const fn of(tile: TileShape) -> Self {
        Self {
            tile,
            chunk: Chunk::Shard,
            raster: Raster::RowsFastest,
            group: 1,
            prologue: 0,
            chunk_ordered: 0,
            k_slices: 1,
            split_k: 1,
            stream_k: 1,
            flattened: false,
            in_mainloop: 0,
        }
    }

    /// What makes the schedule unusable whatever the problem.
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let Self { tile, chunk, raster, group, prologue: _, chunk_ordered: _, k_slices, split_k, stream_k, flattened: _, in_mainloop: _ } =
            *self;
        let limited = [
            ("tile.m", tile.m, MAX_EXTENT),
            ("tile.n", tile.n, MAX_EXTENT),
            ("tile.k", tile.k, MAX_EXTENT),
            ("shares", stream_k, MAX_STREAM_K),
        ];
        let unlimited = [("band", group), ("k_slices", k_slices), ("splits", split_k)].map(|(name, value)| (name, value, u32::MAX));
        for (name, value, limit) in limited.into_iter().chain(unlimited) {
            if value == 0 {
                return Err(ScheduleError::Zero { name });
            }
            if value > limit {
                return Err(ScheduleError::TooLarge { name, value, limit });
            }
        }
        match (chunk, raster) {
            (Chunk::Tiles(0), _) => Err(ScheduleError::Zero { name: "chunk" }),
            (_, Raster::RowGroups(0)) => Err(ScheduleError::Zero { name: "raster group" }),
            _ => Ok(()),
        }
    }

    /// The groups of an AllGather-GEMM: the steps, counted from 0, whose shards are taken side by
    /// side.
    pub(crate) fn groups(&self, world: WorldSize) -> impl Iterator<Item = Range<u32>> + use<> {
        let (prologue, group) = (self.prologue.min(world.get()), self.group);
        (0..prologue).map(|step| step..step + 1).chain(groups_of(prologue..world.get(), group))
    }

    /// The tiles of the shards at the steps of a group, with their step; each shard's in the order
    /// of the raster.
    pub(super) fn in_group(&self, grid: TileGrid, group: Range<u32>) -> impl Iterator<Item = (TileExtent, u32)> + use<> {
        Self::in_order(grid, self.raster, group)
    }

    /// The same of an AllGather-GEMM, whose first shards to come are taken chunk by chunk.
    pub(super) fn as_they_come(&self, grid: TileGrid, group: Range<u32>, slices: u32) -> impl Iterator<Item = (TileExtent, u32)> + use<> {
        let comes = self.is_chunk_ordered(&group, slices);
        Self::in_order(grid, if comes { Raster::RowGroups(self.chunk_of(grid.row_blocks())) } else { self.raster }, group)
    }

    /// Whether the rows of this group are taken chunk by chunk, where they come in so many slices.
    pub(super) fn is_chunk_ordered(&self, group: &Range<u32>, slices: u32) -> bool {
        (1..=self.chunk_ordered).contains(&group.start) && (group.len() == 1 || slices == 1)
    }

    fn in_order(grid: TileGrid, raster: Raster, group: Range<u32>) -> impl Iterator<Item = (TileExtent, u32)> {
        grid.order(raster).flat_map(move |tile| group.clone().map(move |step| (tile, step)))
    }

    /// Of so many tiles of a program, those that whole waves leave.
    pub(super) fn partial_wave(&self, tiles: u64) -> u64 {
        if self.stream_k == 1 || self.split_k > 1 { 0 } else { tiles % u64::from(self.stream_k) }
    }

    /// Tiles of a chunk: row blocks for AllGather-GEMM, tiles for GEMM-ReduceScatter, of the
    /// `available` ones of a shard.
    pub(crate) fn chunk_of(&self, available: u32) -> u32 {
        match self.chunk {
            Chunk::Shard => available,
            Chunk::Tiles(tiles) => tiles.min(available),
        }
    }
}

/// These steps, `group` at a time.
pub(super) fn groups_of(steps: Range<u32>, group: u32) -> impl Iterator<Item = Range<u32>> {
    steps.clone().step_by(group as usize).map(move |first| first..steps.end.min(first.saturating_add(group)))
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tile, chunk, raster, group, prologue, chunk_ordered, k_slices, split_k, stream_k, flattened, in_mainloop } = self;
        write!(f, "tile {tile}, chunk {chunk}, {raster}, group {group}")?;
        if *prologue > 0 {
            write!(f, " after {prologue} of one")?;
        }
        if *chunk_ordered > 0 {
            write!(f, ", {chunk_ordered} by chunk")?;
        }
        if *k_slices > 1 {
            write!(f, ", {k_slices} slices of k")?;
        }
        if *split_k > 1 {
            write!(f, ", {split_k} split_k")?;
        }
        if *stream_k > 1 {
            write!(f, ", {stream_k} workers share what whole waves leave")?;
        }
        if *in_mainloop > 0 {
            write!(f, ", {in_mainloop} partial tiles in_mainloop")?;
        }
        f.write_str(if *flattened { ", flattened" } else { "" })
    }
}
