//! The programs of sums over the ranks with flattened rows.
//!
//! Every rank scatters the rows of its tiles to their owners, itself included. Then it reduces the
//! rows that it received. A row of a
//! GEMM-ReduceScatter has one owner; a GEMM-AllReduce's rows are owned by every rank.
//!
//! Invariant: all ranks have the same tiles in the same order, so a number names a tile. A
//! reduction awaits only tiles, never another reduction. A rank without rows has one for each column
//! of tiles, of no rows, which awaits the last tile: no call ends before all ranks are in it.

use super::items::{AwaitRange, Items};
use super::k_extent::KExtent;
use crate::program::{Await, NONE, Schedule, TileProgram, WorkItem, sink, source};
use crate::tile::{TileExtent, TileGrid};
use crate::{Nodes, Problem, Rank};

/// Most reductions of a rank, unless each has the least rows: about one for each SM.
const WORKERS: u32 = 128;

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, nodes: Nodes) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::new(problem.m(), problem.n_local(), schedule.tile);
    let tiles: Vec<TileExtent> = grid.order(schedule.raster_group).collect();
    let count = tiles.len() as u32;
    let whole = is_whole(schedule, count);
    // Signals of one source.
    let signals = if whole { 1 } else { count };
    let signal_of = |t: u32| if whole { 0 } else { t };
    let counted = whole && count > 1;
    let mut list = Items::new(rank, count, KExtent::new(problem, schedule), schedule, world.get() * signals)
        .with_stream_k(schedule.stream_k_tiles(problem));
    // Numbers of tiles, by column block, then row block.
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
            raise: rank.get() * signals + signal_of(t),
            counter: if counted { 0 } else { NONE },
            raise_after: if counted { count } else { 1 },
            ..WorkItem::default()
        };
        list.tile(item, |_| AwaitRange::default());
    }

    list.all = list.in_order();

    let reduce_rows = reduce_rows(problem, grid);
    let mut reductions: Vec<Reduction> = Vec::new();
    let own = problem.y_rows(rank);
    let reduction = |(first, rows): (u32, u32), col_block| {
        // Without rows, that of the last row.
        let (top, bottom) = if rows == 0 { (problem.m() - 1, problem.m() - 1) } else { (first, first + rows - 1) };
        let row_blocks = top / schedule.tile.m..bottom / schedule.tile.m + 1;
        let tiles: Vec<u32> = row_blocks.clone().map(|row_block| number[index(grid, row_block, col_block)]).collect();
        let last_tile = tiles.iter().copied().max().unwrap_or(0);
        let mut signals: Vec<u32> = tiles.into_iter().map(signal_of).collect();
        signals.dedup();
        Reduction { row: first - own.start, rows, col_block, row_block: row_blocks.start, signals, last_tile }
    };
    let firsts = || (own.start..own.end.max(own.start + 1)).step_by(reduce_rows as usize);
    for col_block in 0..grid.col_blocks() {
        reductions.extend(firsts().map(|first| reduction((first, reduce_rows.min(own.end - first)), col_block)));
    }
    reductions.sort_by_key(|reduction| reduction.last_tile);
    let mut listed: Option<(&Reduction, u32)> = None;
    for reduction in &reductions {
        // Neighbours that await the same tiles share the entries.
        let late_first = match listed {
            Some((other, first)) if other.signals == reduction.signals => first,
            _ => {
                let first = list.next_await();
                for source in world.ranks() {
                    let awaits = reduction.signals.iter().map(|signal| Await {
                        signal: source.get() * signals + signal,
                        peer: source.get(),
                        k_step: 0,
                    });
                    list.awaits.extend(awaits);
                }
                first
            }
        };
        listed = Some((reduction, late_first));
        let extent = grid.extent(reduction.row_block, reduction.col_block);
        list.all.push(WorkItem {
            a_source: source::CALLER,
            row: reduction.row,
            rows: reduction.rows,
            col: extent.col,
            cols: extent.cols,
            sink: sink::REDUCE_ROWS,
            dest: rank.get(),
            partials: world.get(),
            late_first,
            late_count: world.get() * reduction.signals.len() as u32,
            ..WorkItem::default()
        });
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
        flattened: true,
        nodes,
    }
}

/// Whether one signal announces all `tiles` of a rank.
pub(super) fn is_whole(schedule: &Schedule, tiles: u32) -> bool {
    schedule.chunk_of(tiles) == tiles
}

/// A reduction before it is sorted.
struct Reduction {
    row: u32,
    rows: u32,
    col_block: u32,
    /// The first row block with some of its rows.
    row_block: u32,
    /// Signals of a source that announce the tiles of its rows.
    signals: Vec<u32>,
    /// The last of these tiles in the program.
    last_tile: u32,
}

fn index(grid: TileGrid, row_block: u32, col_block: u32) -> usize {
    col_block as usize * grid.row_blocks() as usize + row_block as usize
}

/// Least rows of a reduction: fewer leave threads of a worker idle.
const REDUCED_ROWS: u32 = 16;

/// Rows of a reduction; the last of a rank may have fewer. There are at most [`WORKERS`]
/// reductions, so that each worker has one.
pub(super) const fn reduce_rows(problem: &Problem, grid: TileGrid) -> u32 {
    let blocks = WORKERS / grid.col_blocks();
    let rows = problem.most_y_rows().div_ceil(if blocks == 0 { 1 } else { blocks });
    if rows < REDUCED_ROWS { REDUCED_ROWS } else { rows }
}
