//! The tiles of an output matrix, or of several side by side, one of each weight.
//!
//! Invariant: the extents of a grid are not empty, do not overlap, and cover the matrices. No tile
//! has columns of two weights: the first of a weight begins at a multiple of the tile's columns.

use super::TileShape;
use crate::problem::MAX_WEIGHTS;
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

/// The columns of each weight on one rank, cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ColumnBlocks {
    /// The first tile of each weight, then their count. Weights behind the last have none.
    first: [u32; MAX_WEIGHTS + 1],
    /// Behind the last column of each weight.
    ends: [u32; MAX_WEIGHTS],
    tile_n: u32,
}

impl ColumnBlocks {
    /// Cuts the columns of `rank`.
    ///
    /// # Panics
    /// If the tile has no columns.
    pub(crate) const fn of(problem: &Problem, rank: Rank, tile: TileShape) -> Self {
        assert!(tile.n > 0, "a tile has columns");
        let mut blocks =
            Self { first: [0; MAX_WEIGHTS + 1], ends: [0; MAX_WEIGHTS], tile_n: tile.n };
        let mut weight = 0;
        while weight < MAX_WEIGHTS {
            let columns = problem.weight_columns(weight, rank);
            let cols = columns.end - columns.start;
            blocks.ends[weight] = blocks.start_of(weight) + cols;
            blocks.first[weight + 1] = blocks.first[weight] + cols.div_ceil(tile.n);
            weight += 1;
        }
        blocks
    }

    /// Tiles from left to right.
    const fn count(&self) -> u32 {
        self.first[MAX_WEIGHTS]
    }

    /// First column of a weight's first tile.
    pub(crate) const fn start_of(&self, weight: usize) -> u32 {
        self.first[weight] * self.tile_n
    }

    /// Behind the last column.
    pub(crate) const fn end(&self) -> u32 {
        self.ends[self.weight_of(self.count() - 1)]
    }

    /// The weight with this tile.
    pub(crate) const fn weight_of(&self, block: u32) -> usize {
        let mut weight = 0;
        while weight < MAX_WEIGHTS - 1 && self.first[weight + 1] <= block {
            weight += 1;
        }
        weight
    }

    /// First column and columns of a tile.
    const fn extent(&self, block: u32) -> (u32, u32) {
        let (col, end) = (block * self.tile_n, self.ends[self.weight_of(block)]);
        let left = end - col;
        (col, if left < self.tile_n { left } else { self.tile_n })
    }
}

/// Output matrices of equally many rows, side by side, cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileGrid {
    rows: u32,
    columns: ColumnBlocks,
    tile: TileShape,
}

impl TileGrid {
    /// Cuts `rows` with the columns of `rank`.
    ///
    /// # Panics
    /// If an extent of the tile is 0.
    pub(crate) const fn new(rows: u32, problem: &Problem, rank: Rank, tile: TileShape) -> Self {
        assert!(tile.m > 0, "a tile has rows");
        Self { rows, columns: ColumnBlocks::of(problem, rank, tile), tile }
    }

    /// The grid of a shard on the rank with the most columns, `[m_shard, n_shard]` elements. The
    /// tiles of a shard with one row less are [`above`](TileExtent::above) its end.
    pub(crate) const fn of_shard(problem: &Problem, tile: TileShape) -> Self {
        Self::of_shard_at(problem, Rank::new(0), tile)
    }

    /// As [`of_shard`](Self::of_shard), with the columns of `rank`.
    pub(crate) const fn of_shard_at(problem: &Problem, rank: Rank, tile: TileShape) -> Self {
        Self::new(problem.m_shard(), problem, rank, tile)
    }

    /// The grid of all rows with the columns of `rank`.
    pub(crate) const fn of_all_rows(problem: &Problem, rank: Rank, tile: TileShape) -> Self {
        Self::new(problem.m(), problem, rank, tile)
    }

    /// Tiles of `rank` in an AllGather-GEMM with rows per shard, at least one row block of each
    /// shard.
    pub(crate) fn gathered_tiles(problem: &Problem, rank: Rank, tile: TileShape) -> u64 {
        let of_shard = |shard| {
            Self::new((problem.shard_rows(shard).len() as u32).max(1), problem, rank, tile).tiles()
        };
        problem.world().ranks().map(of_shard).sum()
    }

    /// Tiles from top to bottom.
    pub(crate) const fn row_blocks(&self) -> u32 {
        self.rows.div_ceil(self.tile.m)
    }

    /// Tiles from left to right.
    pub(crate) const fn col_blocks(&self) -> u32 {
        self.columns.count()
    }

    /// Tiles in all.
    pub(crate) const fn tiles(&self) -> u64 {
        self.row_blocks() as u64 * self.col_blocks() as u64
    }

    /// The tile in this row block and column block.
    pub(crate) const fn extent(&self, row_block: u32, col_block: u32) -> TileExtent {
        let (col, cols) = self.columns.extent(col_block);
        self.tile_at(row_block, col, cols)
    }

    /// The tile in this row block with these columns.
    const fn tile_at(&self, row_block: u32, col: u32, cols: u32) -> TileExtent {
        let row = row_block * self.tile.m;
        let rows = self.rows - row;
        TileExtent { row, rows: if rows < self.tile.m { rows } else { self.tile.m }, col, cols }
    }

    /// Every tile once, in groups of `group` row blocks: down the rows of a group, then along its
    /// columns. The tiles of a wave then share rows of `x` and of `w` in L2.
    ///
    /// # Panics
    /// If `group` is 0.
    pub(crate) fn order(self, group: u32) -> Vec<TileExtent> {
        assert!(group > 0, "a group has row blocks");
        let mut all = Vec::with_capacity(self.tiles() as usize);
        for first in (0..self.row_blocks()).step_by(group as usize) {
            let row_blocks = first..self.row_blocks().min(first.saturating_add(group));
            for col_block in 0..self.col_blocks() {
                let (col, cols) = self.columns.extent(col_block);
                let tile = |row_block| self.tile_at(row_block, col, cols);
                all.extend(row_blocks.clone().map(tile));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, OpKind, WorldSize};
    use proptest::prelude::*;

    const TILE: TileShape = TileShape::new(2, 16, 1);

    /// The grid of one rank whose weights have these columns.
    fn grid(rows: u32, cols: &[u32]) -> TileGrid {
        let n = cols.iter().sum::<u32>() as usize;
        let problem =
            Problem::new(OpKind::AllGatherGemm, 1, n, 8, DType::Bf16, WorldSize::new(1).unwrap())
                .unwrap();
        TileGrid::new(rows, &problem.with_weights(cols).unwrap(), Rank::new(0), TILE)
    }

    fn order(group: u32) -> Vec<(u32, u32)> {
        // 3 row blocks by 2 column blocks, both with partial tiles.
        grid(5, &[24]).order(group).iter().map(|t| (t.row / 2, t.col / 16)).collect()
    }

    #[test]
    fn every_group_size_walks_each_tile_once() {
        for (rows, cols, group) in (1..=6).flat_map(|rows| {
            (1..=6).flat_map(move |cols| (1..=7).map(move |group| (rows, cols, group)))
        }) {
            let grid = grid(rows * 2 - 1, &[cols * 16]);
            let all: Vec<(u32, u32)> =
                (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).collect();
            for group in [group, u32::MAX] {
                let mut walked: Vec<(u32, u32)> =
                    grid.order(group).iter().map(|t| (t.row / 2, t.col / 16)).collect();
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
        assert_eq!(grid(5, &[24]).extent(2, 1), TileExtent { row: 4, rows: 1, col: 16, cols: 8 });
    }

    proptest! {
        /// Each weight has all its columns once, in tiles that begin at its own start.
        #[test]
        fn no_tile_has_columns_of_two_weights(
            eights in prop::collection::vec(1..9_u32, 1..=MAX_WEIGHTS),
        ) {
            let cols: Vec<u32> = eights.iter().map(|eights| eights * 8).collect();
            let columns = grid(1, &cols).columns;
            let mut seen = vec![0; cols.len()];
            for block in 0..columns.count() {
                let ((col, count), weight) = (columns.extent(block), columns.weight_of(block));
                prop_assert_eq!(
                    col - columns.start_of(weight),
                    seen[weight],
                    "tile {} of weight {}",
                    block,
                    weight
                );
                prop_assert!((1..=TILE.n).contains(&count));
                seen[weight] += count;
            }
            prop_assert_eq!(&seen, &cols);
            prop_assert_eq!(columns.end(), columns.start_of(cols.len() - 1) + cols[cols.len() - 1]);
        }
    }
}
