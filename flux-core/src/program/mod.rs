//! Tile programs: a rank's whole schedule as a list of records.

mod record;

pub use record::{Await, NONE, Transfer, WorkItem, sink, source};
use crate::{Problem, Rank, TileShape};

/// What one rank does in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileProgram {
    /// The problem.
    pub problem: Problem,
    /// Whose program this is.
    pub rank: Rank,
    /// Extents of a tile.
    pub tile: TileShape,
    /// Output tiles, in the order in which they are worked on; worker `i` of `n` takes items `i`, `i + n`, ...
    pub items: Vec<WorkItem>,
    /// Signals awaited, referred to by the items.
    pub awaits: Vec<Await>,
    /// Copies that the mover makes, in order (AllGather-GEMM).
    pub transfers: Vec<Transfer>,
    /// Slots that each source has at this rank: tiles of a shard (GEMM-ReduceScatter).
    pub slots_per_source: u32,
    /// Signals used on this rank's pad.
    pub signals: u32,
    /// Local counters used.
    pub counters: u32,
}
