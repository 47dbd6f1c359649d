//! The tuning knobs of a tile program.
//!
//! Invariant: no value of a [`Schedule`] changes what is computed, only when and in which pieces;
//! `splits`, `shares` (and with these `lent`), and `early` and `stack` for GEMM-ReduceScatter, also
//! where it is rounded.

use super::{Lent, ScheduleError};
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
    /// raster. Either way `Tiles(1)` is the finest. Where its tiles span shards a signal announces
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

/// Most [`shares`](Schedule::shares): far more workers than any machine has, and few items beside
/// [`MAX_ITEMS`](super::MAX_ITEMS).
pub const MAX_SHARES: u32 = 1 << 16;

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
    /// Every band reads all of `w` once, as long as its tiles keep in step. Thin shards, of a few
    /// row blocks, are therefore better taken several at a time, though for AllGather-GEMM the band
    /// then begins when its last rows are there. For GEMM-ReduceScatter the own shard is always a
    /// band of its own.
    pub band: u32,
    /// Shards that are bands of their own before those of `band` shards begin, the own one first
    /// (AllGather-GEMM): with 1, the own shard is worked on while the rows of the first band come.
    pub alone: u32,
    /// Peers' shards that are worked on chunk by chunk, as they come, the first to come first; the
    /// others in the order of the raster (AllGather-GEMM). Every chunk reads all of `w`, but none
    /// waits for another. Of a band of several shards so does a chunk of each, if the band begins
    /// with one of them and rows come whole; not where they come in slices of `k`.
    pub by_chunk: u32,
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
    pub splits: u32,
    /// Workers whose last wave is to be a whole one, at most [`MAX_SHARES`], or 1: the tiles that
    /// whole waves leave come first, or last where rows of an AllGather-GEMM come in slices of `k`,
    /// or the first are of several shards, and are shared by groups of these workers so that all
    /// are done after the same part of a tile.
    ///
    /// Means nothing where that gains nothing, where `splits` share every tile, where only some
    /// ranks share a node, and where tiles of the own shard of a GEMM-ReduceScatter, which come
    /// last, would have to be shared. As with splits, the bits are others than those of another
    /// number.
    pub shares: u32,
    /// Whether tiles span shards, for shards with fewer rows than a tile, or that are not whole
    /// tiles. Means nothing in a world of 1.
    ///
    /// For GEMM-ReduceScatter it changes what is rounded: every rank's product, the own one too, is
    /// then rounded before all are added.
    pub stack: bool,
    /// Partial tiles that a GEMM-ReduceScatter adds to a tile of the own shard while it is
    /// multiplied, those that were sent first, at even distances along `k`; the others are added
    /// after. More than there are, or than `k` has room for, are as many as there can be; there are
    /// none where `k` is split, where tiles span shards, and where only some ranks share a node.
    ///
    /// What is awaited in the midst of a tile should be there by then. The order of the sum follows
    /// from it: the same bits in every run, but others than those of another number.
    pub early: u32,
    /// Items that are launched on the multiprocessors of messages, ahead of the first message and
    /// behind the last, at most: no more than wait for no message that is sent later. The last ones
    /// are not among the tiles whose last wave [`shares`](Self::shares) makes a whole one. Means
    /// nothing besides where no messages go beside the kernel.
    pub lent: Lent,
}

impl Schedule {
    /// The simplest schedule of these tiles: whole shards, one after another, each tile one item.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// use flux_core::program::{Chunk, Schedule};
    /// let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(128, 256, 64)) };
    /// assert_eq!((schedule.band, schedule.k_slices, schedule.splits, schedule.stack), (1, 1, 1, false));
    /// ```
    pub const fn of(tile: TileShape) -> Self {
        Self {
            tile,
            chunk: Chunk::Shard,
            raster: Raster::RowsFastest,
            band: 1,
            alone: 0,
            by_chunk: 0,
            k_slices: 1,
            splits: 1,
            shares: 1,
            stack: false,
            early: 0,
            lent: Lent::NONE,
        }
    }

    /// What makes the schedule unusable whatever the problem.
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let Self { tile, chunk, raster, band, alone: _, by_chunk: _, k_slices, splits, shares, stack: _, early: _, lent: _ } = *self;
        let limited = [
            ("tile.m", tile.m, MAX_EXTENT),
            ("tile.n", tile.n, MAX_EXTENT),
            ("tile.k", tile.k, MAX_EXTENT),
            ("shares", shares, MAX_SHARES),
        ];
        let unlimited = [("band", band), ("k_slices", k_slices), ("splits", splits)].map(|(name, value)| (name, value, u32::MAX));
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

    /// The bands of an AllGather-GEMM: the steps, counted from 0, whose shards are taken side by
    /// side.
    pub(crate) fn bands(&self, world: WorldSize) -> impl Iterator<Item = Range<u32>> + use<> {
        let (alone, band) = (self.alone.min(world.get()), self.band);
        (0..alone).map(|step| step..step + 1).chain(bands_of(alone..world.get(), band))
    }

    /// The tiles of the shards at the steps of a band, with their step; each shard's in the order
    /// of the raster.
    pub(super) fn in_band(&self, grid: TileGrid, band: Range<u32>) -> impl Iterator<Item = (TileExtent, u32)> + use<> {
        Self::in_order(grid, self.raster, band)
    }

    /// The same of an AllGather-GEMM, whose first shards to come are taken chunk by chunk.
    pub(super) fn as_they_come(&self, grid: TileGrid, band: Range<u32>, slices: u32) -> impl Iterator<Item = (TileExtent, u32)> + use<> {
        let comes = self.comes_by_chunk(&band, slices);
        Self::in_order(grid, if comes { Raster::RowGroups(self.chunk_of(grid.row_blocks())) } else { self.raster }, band)
    }

    /// Whether the rows of this band are taken chunk by chunk, where they come in so many slices.
    pub(super) fn comes_by_chunk(&self, band: &Range<u32>, slices: u32) -> bool {
        (1..=self.by_chunk).contains(&band.start) && (band.len() == 1 || slices == 1)
    }

    fn in_order(grid: TileGrid, raster: Raster, band: Range<u32>) -> impl Iterator<Item = (TileExtent, u32)> {
        grid.order(raster).flat_map(move |tile| band.clone().map(move |step| (tile, step)))
    }

    /// Of so many tiles of a program, those that whole waves leave.
    pub(super) fn unfinished(&self, tiles: u64) -> u64 {
        if self.shares == 1 || self.splits > 1 { 0 } else { tiles % u64::from(self.shares) }
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

/// These steps, `band` at a time.
pub(super) fn bands_of(steps: Range<u32>, band: u32) -> impl Iterator<Item = Range<u32>> {
    steps.clone().step_by(band as usize).map(move |first| first..steps.end.min(first.saturating_add(band)))
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tile, chunk, raster, band, alone, by_chunk, k_slices, splits, shares, stack, early, lent } = self;
        write!(f, "tile {tile}, chunk {chunk}, {raster}, band {band}")?;
        if *alone > 0 {
            write!(f, " after {alone} of one")?;
        }
        if *by_chunk > 0 {
            write!(f, ", {by_chunk} by chunk")?;
        }
        if *k_slices > 1 {
            write!(f, ", {k_slices} slices of k")?;
        }
        if *splits > 1 {
            write!(f, ", {splits} splits")?;
        }
        if *shares > 1 {
            write!(f, ", {shares} workers share what whole waves leave")?;
        }
        if *early > 0 {
            write!(f, ", {early} partial tiles early")?;
        }
        match *lent {
            Lent::NONE => {}
            Lent { first: 0, last } => write!(f, ", {last} lent behind messages")?,
            Lent { first, last: 0 } => write!(f, ", {first} lent ahead of messages")?,
            Lent { first, last } => write!(f, ", {first} lent ahead of messages and {last} behind them")?,
        }
        f.write_str(if *stack { ", flattened" } else { "" })
    }
}
