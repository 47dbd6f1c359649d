//! A rank's whole schedule as a list of records, and what readers derive from it.
//!
//! Invariant: the fields hold what [`check::verify`](super::check::verify) has verified; readers
//! rely on nothing else.

use super::mainloop;
use super::{Await, Forward, NONE, Transfer, WorkItem, sink};
use crate::layout::{self, WorkspaceSize};
use crate::{Nodes, Problem, Rank, TileShape};

/// What one rank does in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileProgram {
    /// The problem.
    pub problem: Problem,
    /// Whose program this is.
    pub rank: Rank,
    /// Extents of a tile.
    pub tile: TileShape,
    /// Output tiles, in the order in which they are worked on; worker `i` of `n` takes items `i`,
    /// `i + n`, ...
    pub items: Vec<WorkItem>,
    /// Signals awaited, referred to by the items.
    pub awaits: Vec<Await>,
    /// Copies of the own shard that the mover makes, in order (AllGather-GEMM).
    pub transfers: Vec<Transfer>,
    /// Copies of what has come from other nodes that it makes then, in order.
    pub forwards: Vec<Forward>,
    /// Slots that each source has at this rank: tiles of a shard (GEMM-ReduceScatter).
    pub slots_per_source: u32,
    /// Of the partial tiles that a tile adds, how many it adds while it is multiplied: those of the
    /// first slots, at [`in_mainloop_steps`](Self::early_steps) (GEMM-ReduceScatter).
    pub in_mainloop: u32,
    /// Signals used on this rank's pad.
    pub signals: u32,
    /// Local counters used.
    pub counters: u32,
    /// Split-K slots used, by tiles whose `k` is split.
    pub split_k_slots: u32,
    /// Whether rows are flattened: rows are those of all shards, the gather buffer has a place for
    /// every rank, in rank order, and what is scattered lies in such places too.
    pub flattened: bool,
    /// How the ranks are grouped.
    pub nodes: Nodes,
}

impl TileProgram {
    /// What a call of this program needs of the workspace; the same on every rank.
    ///
    /// There is a counter for every transfer too: the movers of a kernel, one in each CTA, share a
    /// transfer, and the last of them raises its signal.
    pub fn workspace(&self) -> WorkspaceSize {
        let counters = self.counters.max(u32::try_from(self.transfers.len()).unwrap_or(u32::MAX));
        let half_bytes = layout::half_bytes(&self.problem, self.tile, self.flattened, self.split_k_slots);
        WorkspaceSize { half_bytes, signals: self.signals, counters }
    }

    /// Offset, in a half of the own data region, of the first split-K slot.
    pub const fn split_k_offset(&self) -> u64 {
        layout::split_k_offset(&self.problem, self.tile, self.flattened)
    }

    /// Steps along `k` in all.
    ///
    /// # Panics
    /// If the tile has none, which [`check::verify`](super::check::verify) rules out.
    pub const fn k_steps(&self) -> u32 {
        self.problem.k_local().div_ceil(self.tile.k)
    }

    /// The step along `k` before which the first partial tile that is early is added, and the steps
    /// from one to the next.
    ///
    /// # Panics
    /// If the tile has no extent along `k`, which [`check::verify`](super::check::verify) rules out.
    pub const fn in_mainloop_steps(&self) -> (u32, u32) {
        mainloop::accumulation_steps(self.k_steps(), self.in_mainloop)
    }

    /// The ranks on whose pads `item` raises its signal: those that own rows of a
    /// [`sink::SCATTER`], all where it is one of a chunk, else `dest`.
    pub fn signalled_ranks(&self, item: &WorkItem) -> impl Iterator<Item = Rank> + use<> {
        let ranks = if item.sink == sink::SCATTER && item.counter != NONE {
            0..self.problem.world().get()
        } else if item.sink == sink::SCATTER {
            let last_row = item.row.saturating_add(item.rows.saturating_sub(1));
            item.row / self.problem.m_shard()..last_row / self.problem.m_shard() + 1
        } else {
            item.dest..item.dest.saturating_add(1)
        };
        ranks.map(Rank::new)
    }

    /// The same items for calls in which rows and partial tiles of other ranks are there before:
    /// they await what this rank's own lend, and reductions all sources as one, the own among them.
    #[must_use]
    pub fn awaiting_no_rank(mut self) -> Self {
        for item in &mut self.items {
            (item.await_first, item.await_count, item.await_group) = (0, 0, 0);
            if item.sink != sink::REDUCE_ROWS {
                // The own partial items' signals come first.
                item.late_count = item.parts;
            }
        }
        self
    }

    /// What `item` awaits before it reads rows of A.
    ///
    /// # Panics
    /// If the range is outside the await list, which [`check::verify`](super::check::verify) rules out.
    pub fn awaits_of(&self, item: &WorkItem) -> &[Await] {
        &self.awaits[item.await_first as usize..][..item.await_count as usize]
    }

    /// What `item` awaits after the multiplication.
    ///
    /// # Panics
    /// If the range is outside the await list, which [`check::verify`](super::check::verify) rules out.
    pub fn late_awaits_of(&self, item: &WorkItem) -> &[Await] {
        &self.awaits[item.late_first as usize..][..item.late_count as usize]
    }
}
