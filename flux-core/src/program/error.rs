//! Why a schedule cannot be built.

use super::MAX_ITEMS;
use crate::{Nodes, Rank, TileShape, WorldSize};

/// Why [`TileProgram::build`](super::TileProgram::build) refuses a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An extent of the schedule is zero.
    #[error("{name} = 0: it must be at least 1")]
    Zero {
        /// `tile.m`, `tile.n`, `tile.k`, `chunk`, `group`, `k_slices`, `split_k`, `stream_k` or
        /// `raster group`.
        name: &'static str,
    },
    /// An extent of the tile is beyond that of any problem, or there are more workers than
    /// [`MAX_STREAM_K`](super::MAX_STREAM_K).
    #[error("{name} = {value} is above the limit {limit}")]
    TooLarge {
        /// `tile.m`, `tile.n`, `tile.k` or `stream_k`.
        name: &'static str,
        /// What was asked for.
        value: u32,
        /// The most that there may be.
        limit: u32,
    },
    /// The rank is none of the problem's.
    #[error("rank {rank} is outside the world of {world} ranks")]
    RankOutsideWorld {
        /// Whose program was asked for.
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
    /// Flattened rows of several nodes.
    #[error("tiles of rows=flattened have several owners, so nothing can be passed on between {nodes}: use rows=per-shard:1")]
    FlattenedNodes {
        /// The nodes.
        nodes: Nodes,
    },
    /// The tile is too small for the problem, or split among too many workers.
    #[error("tile {tile} makes {items} items of one rank's program, above the limit {MAX_ITEMS}: use a larger tile or no k=split-k")]
    TooManyItems {
        /// Extents of the tile.
        tile: TileShape,
        /// Items that one rank would work on.
        items: u64,
    },
    /// What is announced is too small for the problem.
    #[error(
        "tile {tile} makes {signals} signals of one rank's pad, above the limit {MAX_ITEMS}: use a larger tile or chunk, or fewer slices of k"
    )]
    TooManySignals {
        /// Extents of the tile.
        tile: TileShape,
        /// Signals that peers would raise.
        signals: u64,
    },
    /// Too many row blocks, each of which awaits every slice of what it reads.
    #[error(
        "tile {tile} makes {awaits} awaits of rows in one rank's program, above the limit {MAX_ITEMS}: use a larger tile, or fewer slices of k"
    )]
    TooManyAwaits {
        /// Extents of the tile.
        tile: TileShape,
        /// Entries of the await list that announce rows.
        awaits: u64,
    },
}
