//! The tiles of an output matrix.
//!
//! Invariant: the extents of a grid are not empty, do not overlap, and cover the matrix.

use super::TileShape;
use crate::{Problem, Rank};

/// The elements of one tile; fewer than the tile's extents at the right and lower border.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileExtent {
    /// First row.
    pub(crate) row: u32,
    /// Rows, `1..=tile.m`.
    pub(crate) rows: u32,
    /// First column.
    pub(crate) col: u32,
    /// Columns, `1..=tile.n`.
    pub(crate) cols: u32,
}

impl TileExtent {
    /// The part of the tile above row `end`, perhaps without rows.
    pub(crate) const fn above(self, end: u32) -> Self {
        let left = end.saturating_sub(self.row);
        Self { rows: if self.rows < left { self.rows } else { left }, ..self }
    }
}

/// An output matrix, `[rows, cols]`, cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileGrid {
    rows: u32,
    cols: u32,
    tile: TileShape,
}

impl TileGrid {
    /// Cuts `rows` by `cols` elements into tiles.
    ///
    /// # Panics
    /// If an extent of the tile is 0.
    pub(crate) const fn new(rows: u32, cols: u32, tile: TileShape) -> Self {
        assert!(tile.m > 0 && tile.n > 0, "a tile has rows and columns");
        Self { rows, cols, tile }
    }

    /// The grid of a shard on the rank with the most columns, `[m_shard, n_shard]` elements. The
    /// tiles of a shard with one row less are [`above`](TileExtent::above) its end.
    pub(crate) const fn of_shard(problem: &Problem, tile: TileShape) -> Self {
        Self::of_shard_at(problem, Rank::new(0), tile)
    }

    /// As [`of_shard`](Self::of_shard), with the columns of `rank`.
    pub(crate) const fn of_shard_at(problem: &Problem, rank: Rank, tile: TileShape) -> Self {
        Self::new(problem.m_shard(), problem.n_local(rank), tile)
    }

    /// The grid of all rows with the columns of `rank`.
    pub(crate) const fn of_all_rows(problem: &Problem, rank: Rank, tile: TileShape) -> Self {
        Self::new(problem.m(), problem.n_local(rank), tile)
    }

    /// Tiles of `rank` in an AllGather-GEMM with rows per shard, at least one row block of each
    /// shard.
    pub(crate) fn gathered_tiles(problem: &Problem, rank: Rank, tile: TileShape) -> u64 {
        let of_shard = |shard| Self::new((problem.shard_rows(shard).len() as u32).max(1), problem.n_local(rank), tile).tiles();
        problem.world().ranks().map(of_shard).sum()
    }

    /// Tiles from top to bottom.
    pub(crate) const fn row_blocks(&self) -> u32 {
        self.rows.div_ceil(self.tile.m)
    }

    /// Tiles from left to right.
    pub(crate) const fn col_blocks(&self) -> u32 {
        self.cols.div_ceil(self.tile.n)
    }

    /// Tiles in all.
    pub(crate) const fn tiles(&self) -> u64 {
        self.row_blocks() as u64 * self.col_blocks() as u64
    }

    /// The tile in this row block and column block.
    pub(crate) const fn extent(&self, row_block: u32, col_block: u32) -> TileExtent {
        let (row, col) = (row_block * self.tile.m, col_block * self.tile.n);
        let (rows, cols) = (self.rows - row, self.cols - col);
        TileExtent {
            row,
            rows: if rows < self.tile.m { rows } else { self.tile.m },
            col,
            cols: if cols < self.tile.n { cols } else { self.tile.n },
        }
    }

    /// Every tile once, in groups of `group` row blocks: down the rows of a group, then along its
    /// columns. The tiles of a wave then share rows of `x` and of `w` in L2.
    ///
    /// # Panics
    /// If `group` is 0.
    pub(crate) fn order(self, group: u32) -> impl Iterator<Item = TileExtent> {
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

    fn order(group: u32) -> Vec<(u32, u32)> {
        // 3 row blocks by 2 column blocks, both with partial tiles.
        let grid = TileGrid::new(5, 12, TileShape::new(2, 8, 1));
        grid.order(group).map(|t| (t.row / 2, t.col / 8)).collect()
    }

    #[test]
    fn every_group_size_walks_each_tile_once() {
        for (rows, cols, group) in (1..=6).flat_map(|rows| (1..=6).flat_map(move |cols| (1..=7).map(move |group| (rows, cols, group)))) {
            let grid = TileGrid::new(rows * 2 - 1, cols * 8, TileShape::new(2, 8, 1));
            let all: Vec<(u32, u32)> = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).collect();
            for group in [group, u32::MAX] {
                let mut walked: Vec<(u32, u32)> = grid.order(group).map(|t| (t.row / 2, t.col / 8)).collect();
                walked.sort_unstable();
                assert_eq!(walked, all, "groups of {group}");
            }
        }
    }

    #[test]
    fn groups_are_walked_one_after_another() {
        assert_eq!(order(u32::MAX), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]);
        assert_eq!(order(1), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
        assert_eq!(order(2), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]);
    }

    #[test]
    fn border_tiles_have_the_rest() {
        let grid = TileGrid::new(5, 12, TileShape::new(2, 8, 1));
        assert_eq!(grid.extent(2, 1), TileExtent { row: 4, rows: 1, col: 8, cols: 4 });
    }
}
