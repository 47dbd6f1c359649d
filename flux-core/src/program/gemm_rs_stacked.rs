//! The program of GEMM-ReduceScatter whose tiles span shards: every rank scatters the rows of its tiles to their owners, itself included, and at the end
//! folds what all have scattered to it. A signal announces a tile, or all that a rank has for an owner.
//!
//! Invariant: the tiles are the same in the same order on every rank, so a tile's number is enough to name it; and a fold awaits only what ranks do
//! before their first fold.

use super::along_k::AlongK;
use super::heuristic::WORKERS;
use super::items::Items;
use super::{Await, NONE, Schedule, TileProgram, WorkItem, sink, source};
use crate::tile::{TileExtent, TileGrid};
use crate::{Nodes, Problem, Rank};
use std::ops::Range;

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, nodes: Nodes) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::new(problem.m(), problem.n_local(), schedule.tile);
    let tiles: Vec<TileExtent> = grid.order(schedule.raster).collect();
    let count = tiles.len() as u32;
    let whole = is_whole(schedule, count);
    // Of a source.
    let signals = if whole { 1 } else { count };
    let counted = whole && count > 1;
    let mut list = Items::new(rank, count, AlongK::new(problem, schedule), schedule, world.get() * signals);
    // by column block, then row block: the tile's number
    let mut number = vec![0; tiles.len()];
    for (t, tile) in (0..).zip(&tiles) {
        number[index(grid, tile.row / schedule.tile.m, tile.col / schedule.tile.n)] = t;
        let item = WorkItem {
            a_source: source::CALLER,
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            sink: sink::SCATTER,
            dest: rank.get(),
            raise: rank.get() * signals + if whole { 0 } else { t },
            counter: if counted { 0 } else { NONE },
            raise_after: if counted { count } else { 1 },
            ..WorkItem::default()
        };
        list.tile(item, |_| (0, 0, 0));
    }

    let fold_rows = fold_rows(problem, grid);
    let mut folds: Vec<Fold> = Vec::new();
    let own = problem.shard_rows(rank);
    for col_block in 0..grid.col_blocks() {
        for row in (0..problem.m_shard()).step_by(fold_rows as usize) {
            let rows = fold_rows.min(problem.m_shard() - row);
            let (first, last) = (own.start + row, own.start + row + rows - 1);
            let row_blocks = first / schedule.tile.m..last / schedule.tile.m + 1;
            let last_tile = row_blocks.clone().map(|row_block| number[index(grid, row_block, col_block)]).max().unwrap_or(0);
            folds.push(Fold { row, rows, col_block, row_blocks, last_tile });
        }
    }
    folds.sort_by_key(|fold| fold.last_tile);
    let mut listed: Option<(&Fold, u32)> = None;
    for fold in &folds {
        // folds of the same tiles, which follow each other, share the entries
        let late_first = match listed {
            Some((other, first)) if whole || (other.col_block, &other.row_blocks) == (fold.col_block, &fold.row_blocks) => first,
            _ => {
                let first = list.next_await();
                for source in world.ranks() {
                    let tiles = fold.row_blocks.clone().map(|row_block| number[index(grid, row_block, fold.col_block)]);
                    let raised = tiles.take(if whole { 1 } else { usize::MAX }).map(|t| if whole { 0 } else { t });
                    list.awaits.extend(raised.map(|t| Await { signal: source.get() * signals + t, peer: source.get(), k_step: 0 }));
                }
                first
            }
        };
        listed = Some((fold, late_first));
        let extent = grid.extent(fold.row_blocks.start, fold.col_block);
        list.all.push(WorkItem {
            a_source: source::CALLER,
            row: fold.row,
            rows: fold.rows,
            col: extent.col,
            cols: extent.cols,
            sink: sink::FOLD,
            dest: rank.get(),
            partials: world.get(),
            late_first,
            late_count: world.get() * if whole { 1 } else { fold.row_blocks.len() as u32 },
            ..WorkItem::default()
        });
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        part_slots: list.part_slots,
        items: list.all,
        awaits: list.awaits,
        transfers: Vec::new(),
        forwards: Vec::new(),
        slots_per_source: 0,
        early: 0,
        counters: u32::from(counted),
        stacked: true,
        nodes,
    }
}

/// Whether one signal announces all of a rank's `tiles`.
pub(super) fn is_whole(schedule: &Schedule, tiles: u32) -> bool {
    schedule.chunk_of(tiles) == tiles
}

/// A fold before it is put in order.
struct Fold {
    row: u32,
    rows: u32,
    col_block: u32,
    /// Of the tiles that hold its rows.
    row_blocks: Range<u32>,
    /// The last of these tiles.
    last_tile: u32,
}

fn index(grid: TileGrid, row_block: u32, col_block: u32) -> usize {
    col_block as usize * grid.row_blocks() as usize + row_block as usize
}

/// Least rows of a fold: with fewer, a worker's threads have nothing to do.
const FOLD_ROWS: u32 = 16;

/// Rows of a fold, but for the last of a shard: as many as make no more folds than workers, so that no worker waits for one after another.
pub(super) const fn fold_rows(problem: &Problem, grid: TileGrid) -> u32 {
    let blocks = WORKERS / grid.col_blocks();
    let rows = problem.m_shard().div_ceil(if blocks == 0 { 1 } else { blocks });
    if rows < FOLD_ROWS { FOLD_ROWS } else { rows }
}
