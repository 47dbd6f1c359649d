//! The tiles of one shard's output.
//!
//! Invariant: the extents that a grid hands out are not empty, do not overlap, and together are the
//! whole shard.

use super::{Raster, TileShape};
use crate::Problem;

/// The part of a shard's output that one tile computes, in elements; at the right and lower border
/// less than a whole tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileExtent {
    /// First row within the shard.
    pub row: u32,
    /// Rows, `1..=tile.m`.
    pub rows: u32,
    /// First column.
    pub col: u32,
    /// Columns, `1..=tile.n`.
    pub cols: u32,
}

/// A shard's output, `[rows, cols]`, cut into tiles.
///
/// ```
/// use flux_core::TileShape;
/// use flux_core::tile::{Raster, TileGrid};
/// let grid = TileGrid::new(129, 512, TileShape::new(128, 256, 64));
/// assert_eq!((grid.row_blocks(), grid.col_blocks(), grid.tiles()), (2, 2, 4));
/// let rows: Vec<u32> = grid.order(Raster::RowsFastest).map(|tile| tile.rows).collect();
/// assert_eq!(rows, [128, 1, 128, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileGrid {
    rows: u32,
    cols: u32,
    tile: TileShape,
}

impl TileGrid {
    /// Cuts `rows` by `cols` elements into tiles.
    ///
    /// # Panics
    /// If an extent of the tile is 0; [`TileProgram::build`](crate::program::TileProgram::build)
    /// has checked that.
    pub const fn new(rows: u32, cols: u32, tile: TileShape) -> Self {
        assert!(tile.m > 0 && tile.n > 0, "a tile has rows and columns");
        Self { rows, cols, tile }
    }

    /// The grid of one shard of `problem`: `[m/W, n_local]` elements.
    pub const fn of_shard(problem: &Problem, tile: TileShape) -> Self {
        Self::new(problem.m_shard(), problem.n_local(), tile)
    }

    /// Tiles from top to bottom.
    pub const fn row_blocks(&self) -> u32 {
        self.rows.div_ceil(self.tile.m)
    }

    /// Tiles from left to right.
    pub const fn col_blocks(&self) -> u32 {
        self.cols.div_ceil(self.tile.n)
    }

    /// Tiles in all.
    pub const fn tiles(&self) -> u64 {
        self.row_blocks() as u64 * self.col_blocks() as u64
    }

    /// The tile in this row block and column block.
    pub const fn extent(&self, row_block: u32, col_block: u32) -> TileExtent {
        let (row, col) = (row_block * self.tile.m, col_block * self.tile.n);
        let (rows, cols) = (self.rows - row, self.cols - col);
        TileExtent {
            row,
            rows: if rows < self.tile.m { rows } else { self.tile.m },
            col,
            cols: if cols < self.tile.n { cols } else { self.tile.n },
        }
    }

    /// Every tile once, in the order of `raster`.
    ///
    /// # Panics
    /// If the raster's groups have 0 row blocks;
    /// [`TileProgram::build`](crate::program::TileProgram::build) has checked that.
    pub fn order(self, raster: Raster) -> impl Iterator<Item = TileExtent> {
        let group = raster.group(self.row_blocks());
        assert!(group > 0, "a group has row blocks");
        let first_blocks = (0..self.row_blocks()).step_by(group as usize);
        first_blocks.flat_map(move |first| {
            let last = self.row_blocks().min(first.saturating_add(group));
            (0..self.col_blocks()).flat_map(move |col| (first..last).map(move |row| self.extent(row, col)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(raster: Raster) -> Vec<(u32, u32)> {
        // 3 row blocks by 2 column blocks, both with tails
        let grid = TileGrid::new(5, 12, TileShape::new(2, 8, 1));
        grid.order(raster).map(|t| (t.row / 2, t.col / 8)).collect()
    }

    #[test]
    fn every_raster_walks_each_tile_once() {
        for (rows, cols, group) in (1..=6).flat_map(|rows| (1..=6).flat_map(move |cols| (1..=7).map(move |group| (rows, cols, group)))) {
            let grid = TileGrid::new(rows * 2 - 1, cols * 8, TileShape::new(2, 8, 1));
            let all: Vec<(u32, u32)> = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).collect();
            for raster in Raster::each(group) {
                let mut walked: Vec<(u32, u32)> = grid.order(raster).map(|t| (t.row / 2, t.col / 8)).collect();
                walked.sort_unstable();
                assert_eq!(walked, all, "{raster}");
            }
        }
    }

    #[test]
    fn rasters_walk_as_they_are_named() {
        assert_eq!(order(Raster::RowsFastest), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]);
        assert_eq!(order(Raster::ColumnsFastest), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
        assert_eq!(order(Raster::RowGroups(2)), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]);
        assert_eq!(order(Raster::RowGroups(u32::MAX)), order(Raster::RowsFastest));
    }

    #[test]
    fn tails_are_what_is_left() {
        let grid = TileGrid::new(5, 12, TileShape::new(2, 8, 1));
        assert_eq!(grid.extent(2, 1), TileExtent { row: 4, rows: 1, col: 8, cols: 4 });
    }
}
