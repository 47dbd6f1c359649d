//! Reductions of scattered rows, and copies of the sums that peers have made.
//!
//! Invariant: all ranks cut rows alike, so a column block and a number name a reduction of any
//! rank. A rank without rows has one of no rows for each column block.

use super::items::Items;
use crate::layout::RowLayout;
use crate::program::{Await, NONE, RowSource, Schedule, Sink, WorkItem};
use crate::tile::{TileExtent, TileGrid};
use crate::{Problem, Rank};
use std::ops::Range;

/// Most reductions of a rank, unless it has more column blocks: about one for each SM.
pub(crate) const MOST_REDUCTIONS: u32 = 128;

/// Least rows of a reduction: fewer leave threads of a worker idle.
const REDUCED_ROWS: u32 = 16;

/// How the rows that a rank adds are cut, by column block, then rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Rows of a reduction; the last of a rank may have fewer.
    rows: u32,
    /// Reductions of a column block, on the rank with the most rows.
    of_block: u32,
    col_blocks: u32,
}

impl Cut {
    /// At most [`MOST_REDUCTIONS`] reductions, so that each worker has one, unless there are more
    /// column blocks.
    pub(super) const fn new(problem: &Problem, grid: TileGrid, rows: RowLayout) -> Self {
        let (most, blocks) = (
            if rows.has_two_exchanges() { problem.m_shard() } else { problem.most_y_rows() },
            MOST_REDUCTIONS / grid.col_blocks(),
        );
        let rows = most.div_ceil(if blocks == 0 { 1 } else { blocks });
        let rows = if rows < REDUCED_ROWS { REDUCED_ROWS } else { rows };
        Self { rows, of_block: most.div_ceil(rows), col_blocks: grid.col_blocks() }
    }

    /// Most reductions of a rank.
    pub(super) const fn count(&self) -> u32 {
        self.of_block * self.col_blocks
    }

    /// The first row and the rows of each reduction of a column block, for a rank that adds `own`.
    fn of_rows(self, own: Range<u32>) -> impl Iterator<Item = (u32, u32)> {
        (own.start..own.end.max(own.start + 1))
            .step_by(self.rows as usize)
            .map(move |first| (first, self.rows.min(own.end - first)))
    }
}

/// A reduction before it is sorted.
struct Reduction {
    row: u32,
    rows: u32,
    col_block: u32,
    /// The first row block with some of its rows.
    row_block: u32,
    /// Tiles of a source with its rows.
    tiles: Vec<u32>,
    raise: u32,
}

/// What the sums of a rank are built from.
pub(super) struct Sums<'a> {
    problem: &'a Problem,
    rank: Rank,
    schedule: &'a Schedule,
    grid: TileGrid,
    cut: Cut,
    /// Numbers of tiles, by column block, then row block.
    numbers: Vec<u32>,
    /// Whether one signal announces all tiles of a source.
    whole: bool,
}

impl<'a> Sums<'a> {
    /// Of `tiles` in their order.
    pub(super) fn new(
        problem: &'a Problem,
        rank: Rank,
        schedule: &'a Schedule,
        grid: TileGrid,
        tiles: &[TileExtent],
        whole: bool,
    ) -> Self {
        let cut = Cut::new(problem, grid, schedule.rows);
        let mut sums =
            Self { problem, rank, schedule, grid, cut, numbers: vec![0; tiles.len()], whole };
        for (t, tile) in (0..).zip(tiles) {
            let index = sums.index(tile.row / schedule.tile.m, tile.col / schedule.tile.n);
            sums.numbers[index] = t;
        }
        sums
    }

    const fn index(&self, row_block: u32, col_block: u32) -> usize {
        col_block as usize * self.grid.row_blocks() as usize + row_block as usize
    }

    /// Signals of tiles, by source; in two exchanges those of sums follow, by owner.
    pub(super) fn signals(&self) -> u32 {
        let sums = if self.schedule.rows.has_two_exchanges() {
            self.problem.world().get() * self.cut.count()
        } else {
            0
        };
        self.first_of_sums() + sums
    }

    fn first_of_sums(&self) -> u32 {
        self.problem.world().get() * if self.whole { 1 } else { self.numbers.len() as u32 }
    }

    /// The signal that announces tile `t` of `source`.
    pub(super) fn signal_of_tile(&self, source: Rank, t: u32) -> u32 {
        if self.whole { source.get() } else { source.get() * self.numbers.len() as u32 + t }
    }

    fn signal_of_sum(&self, owner: Rank, col_block: u32, number: u32) -> u32 {
        self.first_of_sums()
            + owner.get() * self.cut.count()
            + col_block * self.cut.of_block
            + number
    }

    /// The rows that `rank` adds.
    const fn rows_of(&self, rank: Rank) -> Range<u32> {
        if self.schedule.rows.has_two_exchanges() {
            self.problem.shard_rows(rank)
        } else {
            self.problem.y_rows(rank)
        }
    }

    fn reduction(&self, first: u32, rows: u32, col_block: u32, number: u32) -> Reduction {
        let last_row = self.problem.m() - 1;
        // Without rows, that of the last row.
        let (top, bottom) =
            if rows == 0 { (last_row, last_row) } else { (first, first + rows - 1) };
        let row_blocks = top / self.schedule.tile.m..bottom / self.schedule.tile.m + 1;
        let tiles = row_blocks
            .clone()
            .map(|row_block| self.numbers[self.index(row_block, col_block)])
            .collect();
        let raise = if self.schedule.rows.has_two_exchanges() {
            self.signal_of_sum(self.rank, col_block, number)
        } else {
            NONE
        };
        Reduction {
            row: first - self.rows_of(self.rank).start,
            rows,
            col_block,
            row_block: row_blocks.start,
            tiles,
            raise,
        }
    }

    /// The reductions of the rank, in the order of the last tiles that they read.
    fn reductions(&self) -> Vec<Reduction> {
        let own = self.rows_of(self.rank);
        let of_block = |col_block| {
            (0..)
                .zip(self.cut.of_rows(own.clone()))
                .map(move |(number, (first, rows))| self.reduction(first, rows, col_block, number))
        };
        let mut all: Vec<_> = (0..self.grid.col_blocks()).flat_map(of_block).collect();
        all.sort_by_key(|reduction| reduction.tiles.iter().copied().max());
        all
    }

    /// An item of the columns of `extent`, which multiplies nothing.
    fn item(
        &self,
        row: u32,
        rows: u32,
        extent: TileExtent,
        late_first: u32,
        late_count: u32,
    ) -> WorkItem {
        let (col, cols, dest) = (extent.col, extent.cols, self.rank.get());
        WorkItem {
            a_source: RowSource::Caller,
            row,
            rows,
            col,
            cols,
            dest,
            late_first,
            late_count,
            ..WorkItem::default()
        }
    }

    pub(super) fn append_reductions(&self, list: &mut Items) {
        let world = self.problem.world();
        let mut listed: Option<(Vec<u32>, u32)> = None;
        for Reduction { row, rows, col_block, row_block, tiles, raise } in self.reductions() {
            let mut signals: Vec<u32> =
                tiles.iter().map(|&t| self.signal_of_tile(Rank::new(0), t)).collect();
            signals.dedup();
            let late_count = world.get() * signals.len() as u32;
            // Neighbours that await the same tiles share the entries.
            let late_first = match listed {
                Some((ref others, first)) if *others == signals => first,
                _ => {
                    let first = list.next_await();
                    for source in world.ranks() {
                        let of_source = self.signal_of_tile(source, 0);
                        list.awaits.extend(signals.iter().map(|signal| Await {
                            signal: of_source + signal,
                            peer: source.get(),
                            k_step: 0,
                        }));
                    }
                    first
                }
            };
            listed = Some((signals, late_first));
            let extent = self.grid.extent(row_block, col_block);
            let item = self.item(row, rows, extent, late_first, late_count);
            let raise_after = u32::from(self.schedule.rows.has_two_exchanges());
            list.all.push(WorkItem {
                sink: Sink::ReduceRows,
                partials: world.get(),
                raise,
                raise_after,
                ..item
            });
        }
    }

    /// Appends the copies of peers' sums, of each column block those of the next owner first: sums
    /// come from all at about the same time.
    pub(super) fn append_copies(&self, list: &mut Items) {
        let world = self.problem.world();
        for col_block in 0..self.grid.col_blocks() {
            let extent = self.grid.extent(0, col_block);
            for owner in (1..world.get()).map(|step| self.rank.before(step, world)) {
                for (number, (row, rows)) in (0..).zip(self.cut.of_rows(self.rows_of(owner))) {
                    let late_first = list.next_await();
                    list.awaits.push(Await {
                        signal: self.signal_of_sum(owner, col_block, number),
                        peer: owner.get(),
                        k_step: 0,
                    });
                    list.all.push(WorkItem {
                        sink: Sink::Copy,
                        ..self.item(row, rows, extent, late_first, 1)
                    });
                }
            }
        }
    }
}
