//! Tiles of the output.
//!
//! Invariant: unless rows are flattened, a tile has rows of one shard: one source and one owner.

mod generation;
mod grid;
mod hopper;
mod portable;
mod step;

pub use generation::Generation;
pub(crate) use grid::{ColumnBlocks, TileExtent, TileGrid};
pub use hopper::{
    CONSUMERS, ConsumerPart, HOPPER_SHARED_BYTES, ROW_GAP, Staging, WGMMA_ROWS, hopper_barriers,
};
pub use portable::{PORTABLE_WARPS, portable_barriers};
pub(crate) use step::SHARED_BYTES_PER_CYCLE;

use crate::DType;
use std::fmt;

/// Columns of an MMA's output. With gates a tile holds so many of them, their ups, and so on.
pub const GATE_COLUMNS: u32 = 8;
/// Bytes of an mbarrier, and of a word that roles share.
pub const BARRIER_BYTES: u32 = 8;
/// Bytes of an operand's row that a stage holds: one swizzled row.
pub const STEP_BYTES: u32 = 128;

/// Step along `k` of every tile, in elements.
const fn step_of(operand: DType) -> u32 {
    STEP_BYTES / operand.bytes() as u32
}

/// Extents of a GEMM tile: output rows, output columns, and the step along `k` of a pipeline stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileShape {
    /// Output rows.
    pub m: u32,
    /// Output columns.
    pub n: u32,
    /// Elements of the inner product that one pipeline stage holds.
    pub k: u32,
}

impl TileShape {
    /// A tile of `m` rows and `n` columns that advances by `k`.
    pub const fn new(m: u32, n: u32, k: u32) -> Self {
        Self { m, n, k }
    }

    /// Bytes of a step's rows of both operands.
    pub const fn stage_bytes(self, operand: DType) -> u32 {
        (self.m + self.n) * self.k * operand.bytes() as u32
    }

    /// Whether it holds the ups of all its gates.
    pub const fn holds_gates(self) -> bool {
        self.n.is_multiple_of(2 * GATE_COLUMNS)
    }

    /// Whether this is a swap-AB tile, whose columns take the place of rows in the MMA.
    ///
    /// wgmma takes rows in blocks of 64, and two consumers need equally many; a single block they
    /// share by columns.
    ///
    /// ```
    /// use flux_core::TileShape;
    /// let swaps = |m| TileShape::new(m, 256, 64).swaps_ab();
    /// assert_eq!([64, 128, 256, 136, 192].map(swaps), [false, false, false, true, true]);
    /// ```
    pub const fn swaps_ab(self) -> bool {
        self.m != 64 && !self.m.is_multiple_of(2 * 64)
    }
}

impl fmt::Display for TileShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}
