//! The programs of sums over the ranks with flattened rows.
//!
//! Every rank scatters the rows of its tiles to their owners, itself included. Then it reduces the
//! rows that it received. A row of a
//! GEMM-ReduceScatter has one owner; a GEMM-AllReduce's rows are owned by every rank. In two
//! exchanges they have one owner, too, which stores the sums among the results of every peer; the
//! peers' sums are copied to `y` at the end.
//!
//! Invariant: all ranks have the same tiles in the same order, so a number names a tile. A
//! reduction awaits only tiles, never another reduction. A rank without rows has one for each
//! column of tiles, of no rows, which awaits the last tile: no call ends before all ranks are in
//! it.

use super::items::{AwaitRange, Items};
use super::sums::{Cut, Sums};
use crate::program::{NONE, RowSource, Schedule, Sink, TileProgram, WorkItem};
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank};

pub(super) fn build(
    problem: &Problem,
    rank: Rank,
    schedule: &Schedule,
    nodes: Nodes,
) -> TileProgram {
    let grid = TileGrid::of_all_rows(problem, rank, schedule.tile);
    let tiles = grid.order(schedule.raster_group);
    let count = tiles.len() as u32;
    let whole = is_whole(schedule, count);
    let counted = whole && count > 1;
    let sums = Sums::new(problem, rank, schedule, grid, &tiles, whole);
    let (reductions, copies) = reductions_and_copies(problem, schedule, grid);
    let mut list =
        Items::new(problem, rank, schedule, nodes, sums.signals(), (reductions + copies) as u32);
    for (t, tile) in (0..).zip(&tiles) {
        let item = WorkItem {
            a_source: RowSource::Caller,
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            sink: Sink::Scatter,
            dest: rank.get(),
            raise: sums.signal_of_tile(rank, t),
            counter: if counted { 0 } else { NONE },
            raise_after: if counted { count } else { 1 },
            ..WorkItem::default()
        };
        list.tile(item, |_| AwaitRange::default());
    }
    list.all = list.in_order();
    sums.append_reductions(&mut list);
    if schedule.rows.has_two_exchanges() {
        sums.append_copies(&mut list);
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        split_k_slots: list.split_k_slots,
        items: list.all,
        awaits: list.awaits,
        transfers: Vec::new(),
        forwards: Vec::new(),
        slots_per_source: 0,
        in_mainloop: 0,
        counters: u32::from(counted),
        rows: schedule.rows,
        nodes,
    }
}

/// Whether one signal announces all `tiles` of a rank.
pub(super) fn is_whole(schedule: &Schedule, tiles: u32) -> bool {
    schedule.chunk_of(tiles) == tiles
}

/// Most reductions of a rank for `problem`, and most copies.
pub(super) fn reductions_and_copies(
    problem: &Problem,
    schedule: &Schedule,
    grid: TileGrid,
) -> (u64, u64) {
    let of_rank = u64::from(Cut::new(problem, grid, schedule.rows).count());
    (
        of_rank,
        if schedule.rows.has_two_exchanges() {
            u64::from(problem.world().get()) * of_rank
        } else {
            0
        },
    )
}
