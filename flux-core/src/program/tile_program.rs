//! A rank's whole schedule as a list of records, and what readers derive from it.
//!
//! Invariant: readers rely on the rules of [`check::verify`](super::check::verify) and on nothing
//! else.

use super::mainloop;
use super::{Await, Forward, NONE, Sink, Transfer, WorkItem};
use crate::layout::{self, RowLayout, WorkspaceSize};
use crate::problem::MAX_WEIGHTS;
use crate::tile::ColumnBlocks;
use crate::{Nodes, Problem, Rank, SumsTo, TileShape};

/// The work of one rank in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileProgram {
    /// The problem.
    pub problem: Problem,
    /// The rank.
    pub rank: Rank,
    /// Extents of a tile.
    pub tile: TileShape,
    /// Items in the order of work; worker `i` of `n` takes items `i`, `i + n`, ...
    pub items: Vec<WorkItem>,
    /// Awaited signals, which items refer to.
    pub awaits: Vec<Await>,
    /// Copies of the own shard by the mover, in order (AllGather-GEMM).
    pub transfers: Vec<Transfer>,
    /// Copies by the mover of rows from other nodes, in order, after its transfers.
    pub forwards: Vec<Forward>,
    /// Slots of each source at this rank: tiles of a shard (GEMM-ReduceScatter).
    pub slots_per_source: u32,
    /// Partial tiles that a tile adds in its mainloop, those of the first slots, at
    /// [`in_mainloop_steps`](Self::in_mainloop_steps) (GEMM-ReduceScatter).
    pub in_mainloop: u32,
    /// Signals used on this rank's pad.
    pub signals: u32,
    /// Local counters used.
    pub counters: u32,
    /// Split-K slots used.
    pub split_k_slots: u32,
    /// How tiles are cut over the rows.
    pub rows: RowLayout,
    /// How the ranks are grouped.
    pub nodes: Nodes,
}

impl TileProgram {
    /// Workspace of a call, the same on every rank.
    ///
    /// Every transfer has a counter: the kernel's movers, one a CTA, share it, and the last raises
    /// its signal.
    pub fn workspace(&self) -> WorkspaceSize {
        let counters = self.counters.max(u32::try_from(self.transfers.len()).unwrap_or(u32::MAX));
        let half_bytes =
            layout::half_bytes(&self.problem, self.tile, self.rows, self.split_k_slots);
        WorkspaceSize { half_bytes, signals: self.signals, counters }
    }

    /// Offset of place `place` in a half of a rank's data region (AllGather-GEMM).
    pub const fn gather_place_offset(&self, place: u32) -> u64 {
        layout::gather_place_offset(&self.problem, self.rows, place)
    }

    /// Offset of the first split-K slot in a half of the own data region.
    pub const fn split_k_offset(&self) -> u64 {
        layout::split_k_offset(&self.problem, self.tile, self.rows)
    }

    /// Offset of peers' results in a half of the own data region (GEMM-AllReduce in two exchanges).
    pub const fn results_offset(&self) -> u64 {
        layout::results_offset(&self.problem, self.tile, self.rows)
    }

    /// The rows of all `m` that `rank` adds, of those that the ranks scatter.
    pub const fn reduced_rows(&self, rank: Rank) -> std::ops::Range<u32> {
        if self.rows.has_two_exchanges() {
            self.problem.shard_rows(rank)
        } else {
            self.problem.y_rows(rank)
        }
    }

    /// Bytes of a source's place among scattered rows.
    pub const fn scatter_place_bytes(&self) -> u64 {
        layout::scatter_place_bytes(&self.problem, self.rows)
    }

    /// Steps along the rank's `k`.
    ///
    /// # Panics
    /// If the tile has no extent along `k`, which [`check::verify`](super::check::verify) rules
    /// out.
    pub const fn k_steps(&self) -> u32 {
        self.problem.k_local(self.rank).div_ceil(self.tile.k)
    }

    /// The first column of each weight, as items count columns: a multiple of the tile's. Behind
    /// the last weight the end of all columns.
    ///
    /// # Panics
    /// If the tile has no columns, which [`check::verify`](super::check::verify) rules out.
    pub fn weight_starts(&self) -> [u32; MAX_WEIGHTS] {
        let columns = self.column_blocks();
        std::array::from_fn(|weight| columns.start_of(weight))
    }

    /// The weight with column `col` of an item, and its column there.
    ///
    /// # Panics
    /// If the tile has no columns, which [`check::verify`](super::check::verify) rules out.
    pub fn weight_column(&self, col: u32) -> (usize, u32) {
        let columns = self.column_blocks();
        let weight = columns.weight_of(col / self.tile.n);
        (weight, col - columns.start_of(weight))
    }

    pub(super) const fn column_blocks(&self) -> ColumnBlocks {
        ColumnBlocks::of(&self.problem, self.rank, self.tile)
    }

    /// The step before which the first mainloop partial tile is added, and the steps from one to
    /// the next.
    ///
    /// # Panics
    /// If the tile has no extent along `k`, which [`check::verify`](super::check::verify) rules
    /// out.
    pub const fn in_mainloop_steps(&self) -> (u32, u32) {
        mainloop::accumulation_steps(self.k_steps(), self.in_mainloop)
    }

    /// The ranks on whose pads `item` raises its signal: `dest`; for [`Sink::Scatter`] the owners
    /// of its rows, with the last row also ranks without rows. All ranks own the rows of a
    /// GEMM-AllReduce in one exchange, and a chunk of all tiles is for all ranks. For finished rows
    /// of a GEMM-AllReduce, a [`Sink::Reduce`] or [`Sink::ReduceRows`], all peers.
    pub fn signalled_ranks(&self, item: &WorkItem) -> impl Iterator<Item = Rank> + use<> {
        let all_reduces = self.problem.op().sums_to() == SumsTo::All;
        let to_all = item.counter != NONE || all_reduces && !self.rows.has_two_exchanges();
        let is_shared = all_reduces && matches!(item.sink, Sink::Reduce | Sink::ReduceRows);
        let but = if is_shared { self.rank.get() } else { NONE };
        let ranks = if item.sink == Sink::Scatter && to_all || but != NONE {
            0..self.problem.world().get()
        } else if item.sink == Sink::Scatter {
            let end = item.row.saturating_add(item.rows);
            let last = if end >= self.problem.m() {
                self.problem.world().peers()
            } else {
                self.problem.owner_of(end - 1).0.get()
            };
            self.problem.owner_of(item.row).0.get()..last + 1
        } else {
            item.dest..item.dest.saturating_add(1)
        };
        ranks.filter(move |&rank| rank != but).map(Rank::new)
    }

    /// Items before the copies of peers' results, which end a program of GEMM-AllReduce in two
    /// exchanges.
    pub fn computed(&self) -> &[WorkItem] {
        let copies = self.items.iter().rev().take_while(|item| item.sink == Sink::Copy).count();
        &self.items[..self.items.len() - copies]
    }

    /// This program for calls in which peers' rows and partial tiles are there from the start. It
    /// awaits only the own partial items; reductions and copies still await all sources.
    #[must_use]
    pub fn awaiting_no_rank(mut self) -> Self {
        for item in &mut self.items {
            (item.await_first, item.await_count, item.await_group) = (0, 0, 0);
            if item.sink != Sink::ReduceRows && item.sink != Sink::Copy {
                // The awaits of own partial items come first.
                item.late_count = item.parts;
            }
        }
        self
    }

    /// Awaits of `item` in its mainloop.
    ///
    /// # Panics
    /// If the range is outside the await list, which [`check::verify`](super::check::verify) rules
    /// out.
    pub fn awaits_of(&self, item: &WorkItem) -> &[Await] {
        &self.awaits[item.await_first as usize..][..item.await_count as usize]
    }

    /// Awaits of `item` after the multiplication.
    ///
    /// # Panics
    /// If the range is outside the await list, which [`check::verify`](super::check::verify) rules
    /// out.
    pub fn late_awaits_of(&self, item: &WorkItem) -> &[Await] {
        &self.awaits[item.late_first as usize..][..item.late_count as usize]
    }
}
