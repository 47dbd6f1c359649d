//! Errors of schedules that cannot be built.

use super::MAX_ITEMS;
use crate::{Nodes, Rank, TileShape, WorldSize};

/// Why [`TileProgram::build`](super::TileProgram::build) refuses a schedule.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A value of the schedule is zero.
    #[error("{name} = 0: it must be at least 1")]
    Zero {
        /// The field.
        name: &'static str,
    },
    /// An extent of the tile is above that of any problem, or the workers are above
    /// [`MAX_STREAM_K_WORKERS`](super::MAX_STREAM_K_WORKERS).
    #[error("{name} = {value} is above the limit {limit}")]
    TooLarge {
        /// The field.
        name: &'static str,
        /// The given value.
        value: u32,
        /// The largest allowed value.
        limit: u32,
    },
    /// The rank is outside the world.
    #[error("rank {rank} is outside the world of {world} ranks")]
    RankOutsideWorld {
        /// The given rank.
        rank: Rank,
        /// Number of ranks.
        world: WorldSize,
    },
    /// The nodes are of another world than the problem.
    #[error("the nodes are of {nodes} ranks, the problem of {world}")]
    OtherWorld {
        /// Ranks of the nodes.
        nodes: WorldSize,
        /// Ranks of the problem.
        world: WorldSize,
    },
    /// Rows are flattened over several nodes.
    #[error(
        "tiles of rows=flattened have several owners, so nothing can be passed on between {nodes}: \
         use rows=per-shard:1"
    )]
    FlattenedNodes {
        /// The nodes.
        nodes: Nodes,
    },
    /// A GEMM-AllReduce over several nodes, but by a library's collective.
    #[error(
        "gemm_ar stores rows at every rank, so nothing can be passed on between {nodes}: use the \
         transport nccl, or mixed without batch_invariant and fp32 partials"
    )]
    AllReduceNodes {
        /// The nodes.
        nodes: Nodes,
    },
    /// The tile is too small for the problem, or `split_k` too large.
    #[error(
        "tile {tile} makes {items} items of one rank's program, above the limit {MAX_ITEMS}: use a \
         larger tile or no k=split-k"
    )]
    TooManyItems {
        /// Extents of the tile.
        tile: TileShape,
        /// Items of one rank.
        items: u64,
    },
    /// The chunks or slices are too small for the problem.
    #[error(
        "tile {tile} makes {signals} signals of one rank's pad, above the limit {MAX_ITEMS}: use a \
         larger tile or chunk, or fewer slices of k"
    )]
    TooManySignals {
        /// Extents of the tile.
        tile: TileShape,
        /// Signals that peers raise.
        signals: u64,
    },
    /// Too many row blocks, each of which awaits every slice of its shards.
    #[error(
        "tile {tile} makes {awaits} awaits of rows in one rank's program, above the limit \
         {MAX_ITEMS}: use a larger tile, or fewer slices of k"
    )]
    TooManyAwaits {
        /// Extents of the tile.
        tile: TileShape,
        /// Awaits of rows.
        awaits: u64,
    },
}

crate::debug_is_text!(ScheduleError);
