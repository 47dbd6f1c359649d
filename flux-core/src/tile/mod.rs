//! Tiles of the output.
//!
//! Invariant: without flattened rows no tile crosses a shard's border, so it has one source of rows
//! and one owner.

mod grid;
mod raster;
mod step;
mod table;

pub use grid::{TileExtent, TileGrid};
pub use raster::Raster;
pub use table::{HOPPER_SHARED_BYTES, Staging};

use std::fmt;

/// Extents of a GEMM tile: output rows, output columns, and the step along k of one pipeline stage.
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
    /// A tile of `m` by `n` that advances by `k`.
    pub const fn new(m: u32, n: u32, k: u32) -> Self {
        Self { m, n, k }
    }
}

impl fmt::Display for TileShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.m, self.n, self.k)
    }
}
