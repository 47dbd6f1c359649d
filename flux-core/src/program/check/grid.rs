//! Rule: an item is a tile of the grid, of a shard or with flattened rows of all; a reduction has
//! the columns of a column of tiles.
//!
//! A kernel stores whole blocks of a tile, which end only at the border of the matrix. It reads,
//! scatters and reduces 8 columns at a time, a multiple that rows of operands and columns of tiles
//! have.

use super::Violation;
use crate::Rank;
use crate::program::{Sink, TileProgram};
use crate::tile::TileGrid;

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let rows = if p.rows.is_flattened() { p.problem.m() } else { p.problem.m_shard() };
    let grid = TileGrid::new(rows, &p.problem, p.rank, p.tile);
    for (index, item) in p.items.iter().enumerate() {
        if item.sink == Sink::Copy {
            // Any rows may be copied. Eight columns are copied at a time, as rows are reduced.
            continue;
        }
        let tile = grid.extent(item.row / p.tile.m, item.col / p.tile.n);
        let shard = if p.problem.op().gathers() { item.out_outer } else { item.a_outer };
        let end = if p.rows.is_flattened() {
            rows
        } else {
            p.problem.shard_rows(Rank::new(shard)).len() as u32
        };
        let tile = tile.above(end);
        let off = |what, (first, count), (tile, of_tile)| {
            Err(Violation::OffGrid {
                rank: p.rank,
                item: index,
                what,
                found: first..first + count,
                tile: tile..tile + of_tile,
            })
        };
        if item.sink != Sink::ReduceRows && (item.row, item.rows) != (tile.row, tile.rows) {
            return off("rows", (item.row, item.rows), (tile.row, tile.rows));
        }
        if (item.col, item.cols) != (tile.col, tile.cols) {
            return off("columns", (item.col, item.cols), (tile.col, tile.cols));
        }
    }
    Ok(())
}
