//! Rule: an item is a tile of the grid, which is that of a shard, or of all of them where tiles
//! span shards; and the columns of a reduction are those of a column of tiles.
//!
//! A kernel stores and sends whole blocks of a tile, which end only at the border of the matrix,
//! and reads, scatters and reductions 8 columns at a time. All rows of the operands are whole vectors of
//! 8 elements, as are its tiles' columns, so those of every item are.

use super::Violation;
use crate::program::{TileProgram, sink};
use crate::tile::TileGrid;

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let rows = if p.flattened { p.problem.m() } else { p.problem.m_shard() };
    let grid = TileGrid::new(rows, p.problem.n_local(), p.tile);
    for (index, item) in p.items.iter().enumerate() {
        let tile = grid.extent(item.row / p.tile.m, item.col / p.tile.n);
        let off = |what, (first, count), (tile, of_tile)| {
            Err(Violation::OffGrid { rank: p.rank, item: index, what, found: first..first + count, tile: tile..tile + of_tile })
        };
        if item.sink != sink::REDUCE_ROWS && (item.row, item.rows) != (tile.row, tile.rows) {
            return off("rows", (item.row, item.rows), (tile.row, tile.rows));
        }
        if (item.col, item.cols) != (tile.col, tile.cols) {
            return off("columns", (item.col, item.cols), (tile.col, tile.cols));
        }
    }
    Ok(())
}
