//! The programs of sums over the ranks with flattened rows.
//!
//! Every rank scatters the rows of its tiles to their owners, itself included. Then it reduces the
//! rows that it received. A row of a
//! GEMM-ReduceScatter has one owner; a GEMM-AllReduce's rows are owned by every rank. In two
//! exchanges they have one owner, too, which stores the sums among the results of every peer; the
//! peers' sums are copied to `y` at the end.
//!
//! Invariant: all ranks have the same tiles in the same order, so a number names a tile. A
//! reduction awaits only tiles, never another reduction. A rank without rows has one for each column
//! of tiles, of no rows, which awaits the last tile: no call ends before all ranks are in it.

use super::items::{AwaitRange, Items};
use super::k_extent::KExtent;
use crate::program::{Await, NONE, Schedule, TileProgram, WorkItem, sink, source};
use crate::tile::{TileExtent, TileGrid};
use crate::{Nodes, Problem, Rank, WorldSize};
use std::ops::Range;

/// Most reductions of a rank, unless each has the least rows: about one for each SM.
const WORKERS: u32 = 128;

/// How the rows that a rank adds are cut: alike on all ranks, by column block, then rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reductions {
    /// Rows of one; the last of a rank may have fewer.
    rows: u32,
    /// Those of a column block, on the rank with the most rows.
    of_block: u32,
    col_blocks: u32,
}

impl Reductions {
    /// At most [`WORKERS`], so that each worker has one, unless there are more column blocks.
    pub(super) const fn new(problem: &Problem, grid: TileGrid, two_exchanges: bool) -> Self {
        let (most, blocks) = (if two_exchanges { problem.m_shard() } else { problem.most_y_rows() }, WORKERS / grid.col_blocks());
        let rows = most.div_ceil(if blocks == 0 { 1 } else { blocks });
        let rows = if rows < REDUCED_ROWS { REDUCED_ROWS } else { rows };
        Self { rows, of_block: most.div_ceil(rows), col_blocks: grid.col_blocks() }
    }

    /// Most of a rank.
    pub(super) const fn count(&self) -> u32 {
        self.of_block * self.col_blocks
    }

    /// The signal of `owner`'s reduction with this column block and number; signals of sums begin at
    /// `results`.
    const fn signal(&self, results: u32, owner: Rank, (col_block, number): (u32, u32)) -> u32 {
        results + owner.get() * self.count() + col_block * self.of_block + number
    }

    /// The first row and the rows of each reduction of a column block, for a rank that adds `own`:
    /// at least one, of no rows where there are none.
    fn of_rows(self, own: Range<u32>) -> impl Iterator<Item = (u32, u32)> + Clone {
        (own.start..own.end.max(own.start + 1)).step_by(self.rows as usize).map(move |first| (first, self.rows.min(own.end - first)))
    }
}

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
    let cut = Reductions::new(problem, grid, schedule.two_exchanges);
    // Signals of sums, by owner, follow those of tiles.
    let results = world.get() * signals;
    let shared = if schedule.two_exchanges { world.get() * cut.count() } else { 0 };
    let mut list = Items::new(rank, count, KExtent::new(problem, schedule), schedule, results + shared)
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

    let mut reductions: Vec<Reduction> = Vec::new();
    let rows_of = |rank| if schedule.two_exchanges { problem.shard_rows(rank) } else { problem.y_rows(rank) };
    let own = rows_of(rank);
    let reduction = |of_block: u32, (first, rows): (u32, u32), col_block| {
        // Without rows, that of the last row.
        let (top, bottom) = if rows == 0 { (problem.m() - 1, problem.m() - 1) } else { (first, first + rows - 1) };
        let row_blocks = top / schedule.tile.m..bottom / schedule.tile.m + 1;
        let tiles: Vec<u32> = row_blocks.clone().map(|row_block| number[index(grid, row_block, col_block)]).collect();
        let last_tile = tiles.iter().copied().max().unwrap_or(0);
        let mut signals: Vec<u32> = tiles.into_iter().map(signal_of).collect();
        signals.dedup();
        let raise = if schedule.two_exchanges { cut.signal(results, rank, (col_block, of_block)) } else { NONE };
        Reduction { row: first - own.start, rows, col_block, row_block: row_blocks.start, signals, last_tile, raise }
    };
    for col_block in 0..grid.col_blocks() {
        reductions.extend((0..).zip(cut.of_rows(own.clone())).map(|(number, rows)| reduction(number, rows, col_block)));
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
            raise: reduction.raise,
            raise_after: u32::from(schedule.two_exchanges),
            ..WorkItem::default()
        });
    }
    if schedule.two_exchanges {
        copies(&mut list, rank, (cut, results, world), grid, rows_of);
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
        two_exchanges: schedule.two_exchanges,
        nodes,
    }
}

/// Appends the copies of peers' sums, of each column block those of the next owner first, as sums
/// come from all at about the same time.
fn copies(
    list: &mut Items,
    rank: Rank,
    (cut, results, world): (Reductions, u32, WorldSize),
    grid: TileGrid,
    rows_of: impl Fn(Rank) -> Range<u32>,
) {
    for col_block in 0..grid.col_blocks() {
        let extent = grid.extent(0, col_block);
        for owner in (1..world.get()).map(|step| rank.before(step, world)) {
            for (number, (first, rows)) in (0..).zip(cut.of_rows(rows_of(owner))) {
                let late_first = list.next_await();
                list.awaits.push(Await { signal: cut.signal(results, owner, (col_block, number)), peer: owner.get(), k_step: 0 });
                list.all.push(WorkItem {
                    a_source: source::CALLER,
                    row: first,
                    rows,
                    col: extent.col,
                    cols: extent.cols,
                    sink: sink::COPY,
                    dest: rank.get(),
                    late_first,
                    late_count: 1,
                    ..WorkItem::default()
                });
            }
        }
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
    raise: u32,
}

fn index(grid: TileGrid, row_block: u32, col_block: u32) -> usize {
    col_block as usize * grid.row_blocks() as usize + row_block as usize
}

/// Least rows of a reduction: fewer leave threads of a worker idle.
const REDUCED_ROWS: u32 = 16;
