//! Plans: how an op is executed.
//!
//! Invariant: a plan changes when a result is computed, in which pieces, and where partial sums are
//! rounded, nothing else. All ranks of a call use the same plan.

mod bound;
mod buckets;
mod bytes;
mod candidates;
mod canonical;
mod choose;
mod cost;
mod derive;
mod sum_order;
mod table;
mod target;
mod text;

pub use crate::program::Chunk;
pub use bound::ProgramBound;
pub use buckets::bucket_ends;
pub use bytes::{PLAN_BYTES, PlanBytesError};
pub use choose::{PlanOrigin, TableKind, choose};
pub use sum_order::SumOrder;
pub use table::{PlanKey, PlanRow, PlanTable, PlanTableError};
pub use target::{Links, Target};
pub use text::ParsePlanError;

use crate::tile::TileGrid;
use crate::{Problem, Rank, TileShape};

/// How an op is executed. Comparable, printable, parsable; the same on every rank.
///
/// The schedule derives raster, prologue shards, chunk order and in-mainloop accumulation from
/// these fields.
///
/// ```
/// use flux_core::plan::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
/// let text = "tile=256x192x64 rows=per-shard:2 k=stream-k chunk=1 k-slices=4 comm=fused:kernel";
/// let plan: Plan = text.parse()?;
/// assert_eq!(plan.rows, RowMapping::PerShard { group: 2 });
/// assert_eq!((plan.k, plan.chunk), (KSplit::StreamK, Chunk::Tiles(1)));
/// assert_eq!(plan.comm, CommMode::Fused { mover: Mover::Kernel });
/// assert_eq!(plan.to_string(), text);
/// # Ok::<(), flux_core::plan::ParsePlanError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Extents of a GEMM tile.
    pub tile: TileShape,
    /// How tiles are cut from the rows of all shards.
    pub rows: RowMapping,
    /// How the inner product of a tile is divided among workers.
    pub k: KSplit,
    /// Rows or tiles that one signal announces.
    pub chunk: Chunk,
    /// Slices of `k` with signals of their own; tiles begin when the first slice has arrived.
    /// AllGather-GEMM only; 1 announces whole rows.
    pub k_slices: u32,
    /// How the traffic relates to the GEMM.
    pub comm: CommMode,
}

/// How tiles are cut from rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowMapping {
    /// A tile has rows of one shard.
    PerShard {
        /// Shards side by side, which share one pass over `w`; at least 1.
        group: u32,
    },
    /// Tiles are cut over all `m` rows: for shards with fewer rows than a tile, or unaligned `m`. A
    /// GEMM-AllReduce makes one exchange: every rank adds all rows.
    Flattened,
    /// As [`Flattened`](Self::Flattened), in two exchanges of a GEMM-AllReduce: a rank adds the
    /// rows of its shard, and sends the sums to all.
    FlattenedTwoExchanges,
}

/// How the inner product of a tile is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KSplit {
    /// One worker multiplies all of it.
    Whole,
    /// This many workers share every tile; at least 2.
    SplitK(u32),
    /// All workers share the tiles of a partial last wave.
    StreamK,
}

/// How the traffic relates to the GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommMode {
    /// Tile by tile, signalled between the ranks' kernels.
    Fused {
        /// What moves the data.
        mover: Mover,
    },
    /// Messages of a collective library beside the kernel.
    Overlapped {
        /// Peers that receive messages at once; at least 1.
        peers: u32,
    },
    /// The collective before (AllGather) or after (ReduceScatter) one GEMM.
    Sequential,
}

/// What moves the data of a fused op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mover {
    /// The kernel's own stores.
    Kernel,
    /// The device's copy engines.
    CopyEngine,
}

impl Plan {
    /// The simplest plan of a tile: one shard after another, whole shards announced, a kernel
    /// mover.
    pub const fn of(tile: TileShape) -> Self {
        Self {
            tile,
            rows: RowMapping::PerShard { group: 1 },
            k: KSplit::Whole,
            chunk: Chunk::Shard,
            k_slices: 1,
            comm: CommMode::Fused { mover: Mover::Kernel },
        }
    }

    /// The field that has an extent or a count of zero, which no text of a plan has.
    pub fn zero_field(&self) -> Option<&'static str> {
        let Self { tile, rows, k, chunk, k_slices, comm } = *self;
        let counts = [
            ("tile.m", tile.m),
            ("tile.n", tile.n),
            ("tile.k", tile.k),
            ("rows=per-shard", if let RowMapping::PerShard { group } = rows { group } else { 1 }),
            ("k=split-k", if let KSplit::SplitK(workers) = k { workers } else { 1 }),
            ("chunk", if let Chunk::Tiles(tiles) = chunk { tiles } else { 1 }),
            ("k-slices", k_slices),
            ("comm=overlapped", if let CommMode::Overlapped { peers } = comm { peers } else { 1 }),
        ];
        counts.into_iter().find(|&(_, count)| count == 0).map(|(name, _)| name)
    }

    /// Tiles of all rows, on the rank with the most.
    fn tiles(&self, problem: &Problem) -> u64 {
        match self.rows {
            RowMapping::PerShard { .. } => {
                u64::from(problem.world().get()) * TileGrid::of_shard(problem, self.tile).tiles()
            }
            RowMapping::Flattened | RowMapping::FlattenedTwoExchanges => {
                TileGrid::of_all_rows(problem, Rank::new(0), self.tile).tiles()
            }
        }
    }

    /// Whether tiles are cut over all rows.
    pub const fn is_flattened(&self) -> bool {
        matches!(self.rows, RowMapping::Flattened | RowMapping::FlattenedTwoExchanges)
    }
}
