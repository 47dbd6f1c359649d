//! What a tile program is built from: cuts and order of the tiles of one problem.
//!
//! Invariant: no field of a [`Schedule`] changes what is computed. `split_k`, `stream_k_workers`,
//! `in_mainloop` and, for GEMM-ReduceScatter, `rows` change where sums are rounded.

use super::ScheduleError;
use crate::layout::RowLayout;
use crate::problem::MAX_EXTENT;
use crate::tile::{TileExtent, TileGrid};
use crate::{TileShape, WorldSize};
use std::fmt;
use std::ops::Range;

/// How much of a shard one signal announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chunk {
    /// The whole shard.
    Shard,
    /// This many tiles of the shard, at least 1; at most the whole shard.
    ///
    /// AllGather-GEMM counts row blocks of `tile.m` rows of `x`. GEMM-ReduceScatter counts partial
    /// tiles in raster order, GEMM-AllReduce these and finished tiles. With flattened rows they
    /// announce single tiles, or all of them.
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

/// Most [`stream_k_workers`](Schedule::stream_k_workers): above any SM count, and few items
/// compared with [`MAX_ITEMS`](super::MAX_ITEMS).
pub const MAX_STREAM_K_WORKERS: u32 = 1 << 16;

/// How a problem is cut and ordered. All ranks of a call use the same schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// Extents of a GEMM tile.
    pub tile: TileShape,
    /// How much one signal announces.
    pub chunk: Chunk,
    /// Row blocks of a raster group, at least 1: tiles run down a group's rows, then along its
    /// columns. `u32::MAX` walks whole columns.
    pub raster_group: u32,
    /// Shards whose tiles are worked on side by side, so that they share one pass over `w`.
    ///
    /// An AllGather-GEMM begins a group when the last of its rows is there. The own shard of a
    /// GEMM-ReduceScatter is always a group of its own.
    pub group: u32,
    /// Shards that form groups of one before the first group of `group` shards, the own shard first
    /// (AllGather-GEMM).
    pub prologue: u32,
    /// Peers' shards that are worked on chunk by chunk, in order of arrival (AllGather-GEMM).
    ///
    /// Each chunk reads all of `w`, but waits for no other chunk. A group that begins with such a
    /// shard takes a chunk of each of its shards; not if rows come in several slices.
    pub chunk_ordered: u32,
    /// Most slices of `k` with signals of their own (AllGather-GEMM); 1 announces whole rows.
    ///
    /// An item waits for a slice when it comes to it. Slices end at steps of `tile.k`.
    pub k_slices: u32,
    /// Items that share a tile, each with a part of `k`; at most the steps of `k`.
    ///
    /// Parts are added in the order of `k`, in fp32: the same bits in every run.
    pub split_k: u32,
    /// Workers that share the tiles of a partial last wave, at most [`MAX_STREAM_K_WORKERS`]; 1 for
    /// none.
    ///
    /// The shared tiles come first; last in an AllGather-GEMM with several slices or a first group
    /// of several shards. It has no effect with `split_k`, with mixed nodes, where sharing gains
    /// nothing, and where own tiles of a GEMM-ReduceScatter would be shared.
    pub stream_k_workers: u32,
    /// How tiles are cut over the rows: flattened for shards with fewer rows than a tile, or
    /// unaligned `m`. In a world of 1 they are cut per shard, and only a GEMM-AllReduce has two
    /// exchanges.
    ///
    /// With flattened rows a GEMM-ReduceScatter rounds every rank's product before the sum.
    pub rows: RowLayout,
    /// Partial tiles that a GEMM-ReduceScatter adds in the mainloop of an own tile, in the order in
    /// which they were sent; at most what `k` has room for. The others are added afterwards.
    ///
    /// It is 0 with `split_k`, with flattened rows and with mixed nodes.
    pub in_mainloop: u32,
    /// Items from the last partial tile for an own tile to that tile, at least: a GEMM-AllReduce's
    /// own tiles leave as early as that allows; with `u32::MAX` they are last. At least
    /// [`stream_k_workers`](Self::stream_k_workers) are taken.
    pub own_lag: u32,
}

impl Schedule {
    /// The simplest schedule of a tile: whole shards, one after another, each tile one item.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// use flux_core::program::{Chunk, Schedule};
    /// let tile = TileShape::new(128, 256, 64);
    /// let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(tile) };
    /// assert_eq!((schedule.group, schedule.k_slices, schedule.split_k), (1, 1, 1));
    /// ```
    pub const fn of(tile: TileShape) -> Self {
        Self {
            tile,
            chunk: Chunk::Shard,
            raster_group: u32::MAX,
            group: 1,
            prologue: 0,
            chunk_ordered: 0,
            k_slices: 1,
            split_k: 1,
            stream_k_workers: 1,
            rows: RowLayout::PerShard,
            in_mainloop: 0,
            own_lag: 0,
        }
    }

    /// Refuses values that no problem can use.
    pub(super) fn check(&self) -> Result<(), ScheduleError> {
        let Self { tile, chunk, raster_group, group, k_slices, split_k, stream_k_workers, .. } =
            *self;
        let tiles = if let Chunk::Tiles(tiles) = chunk { tiles } else { 1 };
        let values = [
            ("tile.m", tile.m, MAX_EXTENT),
            ("tile.n", tile.n, MAX_EXTENT),
            ("tile.k", tile.k, MAX_EXTENT),
            ("stream_k_workers", stream_k_workers, MAX_STREAM_K_WORKERS),
            ("group", group, u32::MAX),
            ("k_slices", k_slices, u32::MAX),
            ("split_k", split_k, u32::MAX),
            ("chunk", tiles, u32::MAX),
            ("raster_group", raster_group, u32::MAX),
        ];
        for (name, value, limit) in values {
            if value == 0 {
                return Err(ScheduleError::Zero { name });
            }
            if value > limit {
                return Err(ScheduleError::TooLarge { name, value, limit });
            }
        }
        Ok(())
    }

    /// The groups of an AllGather-GEMM, as ranges of steps counted from 0.
    pub(crate) fn groups(&self, world: WorldSize) -> impl Iterator<Item = Range<u32>> + use<> {
        let (prologue, group) = (self.prologue.min(world.get()), self.group);
        (0..prologue).map(|step| step..step + 1).chain(groups_of(prologue..world.get(), group))
    }

    /// The tiles of a group's shards side by side, each with its step; each shard's in raster
    /// order.
    pub(super) fn tiles_of_group(
        &self,
        grid: TileGrid,
        group: Range<u32>,
    ) -> Vec<(TileExtent, u32)> {
        side_by_side(grid, self.raster_group, group)
    }

    /// As [`tiles_of_group`](Self::tiles_of_group), chunk by chunk where the group is
    /// chunk-ordered.
    pub(super) fn gather_order(
        &self,
        grid: TileGrid,
        group: Range<u32>,
        slices: u32,
    ) -> Vec<(TileExtent, u32)> {
        let chunk_ordered = self.is_chunk_ordered(&group, slices);
        side_by_side(
            grid,
            if chunk_ordered { self.chunk_of(grid.row_blocks()) } else { self.raster_group },
            group,
        )
    }

    /// Whether the rows of this group are taken chunk by chunk, given the number of slices.
    pub(super) fn is_chunk_ordered(&self, group: &Range<u32>, slices: u32) -> bool {
        (1..=self.chunk_ordered).contains(&group.start) && (group.len() == 1 || slices == 1)
    }

    /// Tiles of the partial last wave that stream-K shares, of all `tiles` of a program.
    pub(super) fn partial_wave(&self, tiles: u64) -> u64 {
        if self.stream_k_workers == 1 || self.split_k > 1 {
            0
        } else {
            tiles % u64::from(self.stream_k_workers)
        }
    }

    /// Tiles of a chunk, of the `available` row blocks (AllGather-GEMM) or tiles of a shard.
    pub(crate) fn chunk_of(&self, available: u32) -> u32 {
        match self.chunk {
            Chunk::Shard => available,
            Chunk::Tiles(tiles) => tiles.min(available),
        }
    }
}

fn side_by_side(grid: TileGrid, raster_group: u32, group: Range<u32>) -> Vec<(TileExtent, u32)> {
    let tiles = grid.order(raster_group);
    let mut all = Vec::with_capacity(tiles.len() * group.len());
    for tile in tiles {
        all.extend(group.clone().map(|step| (tile, step)));
    }
    all
}

/// The steps in ranges of `group`.
pub(super) fn groups_of(steps: Range<u32>, group: u32) -> impl Iterator<Item = Range<u32>> {
    steps
        .clone()
        .step_by(group as usize)
        .map(move |first| first..steps.end.min(first.saturating_add(group)))
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            tile,
            chunk,
            raster_group,
            group,
            prologue,
            chunk_ordered,
            k_slices,
            split_k,
            stream_k_workers,
            rows,
            in_mainloop,
            own_lag,
        } = self;
        write!(f, "tile {tile}, chunk {chunk}, ")?;
        match raster_group {
            &u32::MAX => f.write_str("rows fastest")?,
            blocks => write!(f, "groups of {blocks} row blocks")?,
        }
        write!(f, ", group {group}")?;
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
            write!(f, ", split-K {split_k}")?;
        }
        if *stream_k_workers > 1 {
            write!(f, ", stream-K over {stream_k_workers} workers")?;
        }
        match own_lag {
            0 => {}
            &u32::MAX => f.write_str(", own tiles last")?,
            lag => write!(f, ", own tiles after {lag} items")?,
        }
        if *in_mainloop > 0 {
            write!(f, ", {in_mainloop} partial tiles in the mainloop")?;
        }
        f.write_str(match rows {
            RowLayout::PerShard => "",
            RowLayout::Flattened => ", flattened",
            RowLayout::FlattenedTwoExchanges => ", flattened in two exchanges",
        })
    }
}
