//! Tile programs: a rank's whole schedule as a list of records.
//!
//! Invariant: a program made by [`TileProgram::build`] passes [`check::verify`] together with those
//! of the other ranks. Every reader relies on what is verified there, and on nothing else.

mod ag_gemm;
mod ag_gemm_flattened;
mod along_k;
mod arrivals;
pub mod check;

mod display;
mod error;
mod gemm_rs;
mod gemm_rs_flattened;
mod items;
mod messages;
mod record;
mod rounds;
pub mod route;
mod schedule;
mod stream_k;
#[cfg(test)]
mod tests;

pub use error::ScheduleError;
pub use gemm_rs::Places;
pub(crate) use gemm_rs::widest_group;
pub use messages::{Channels, groups, in_batches_of};
pub use record::{Await, Forward, NONE, Transfer, WorkItem, sink, source};
pub use rounds::{End, Round};
pub use schedule::{Chunk, MAX_STREAM_K, Schedule};

use crate::layout::{self, WorkspaceSize};
use crate::tile::TileGrid;
use crate::{Nodes, OpKind, Problem, Rank, TileShape};
use arrivals::Arrivals;

/// Most items of one program, most signals of peers, and most awaits of their rows: 384 MiB of
/// items.
pub const MAX_ITEMS: u64 = 1 << 22;

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
    /// Part slots used, by tiles whose `k` is split.
    pub split_k_slots: u32,
    /// Whether rows are flattened: rows are those of all shards, the gather buffer has a place for
    /// every rank, in rank order, and what is scattered lies in such places too.
    pub flattened: bool,
    /// How the ranks are grouped.
    pub nodes: Nodes,
}

impl TileProgram {
    /// What `rank` does for `problem` under `schedule`, where all ranks reach each other alike. All
    /// ranks of a call build with the same problem and schedule.
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram, check};
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::GemmReduceScatter, 4 * 129, 1000, 4096, DType::Bf16, world)?;
    /// let schedule = Schedule::of(TileShape::new(128, 128, 64));
    /// let programs: Vec<_> = world.ranks().map(|rank| TileProgram::build(&p, rank, &schedule)).collect::<Result<_, _>>()?;
    /// check::verify(&programs)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ScheduleError`] names the value and the limit: a zero extent, a rank outside the world,
    /// too many tiles.
    pub fn build(problem: &Problem, rank: Rank, schedule: &Schedule) -> Result<Self, ScheduleError> {
        Self::build_across(problem, rank, schedule, Nodes::apart(problem.world()))
    }

    /// As [`build`](Self::build), where the ranks are grouped in nodes: what crosses nodes stays on
    /// its rail and goes there once. A shard of `x` is passed on by the rank that it comes to;
    /// partial tiles for an owner elsewhere are added up by the rank of the own node that is on the
    /// owner's rail, and the sum is sent. In one node, or with one rank in each, it is the program
    /// of [`build`](Self::build).
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram, check};
    /// use flux_core::{DType, Nodes, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(8).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 8 * 256, 1024, 512, DType::Bf16, world)?;
    /// let (schedule, nodes) = (Schedule::of(TileShape::new(128, 128, 64)), Nodes::new(world, 2).unwrap());
    /// let build = |rank| TileProgram::build_across(&p, rank, &schedule, nodes);
    /// let programs: Vec<_> = world.ranks().map(build).collect::<Result<_, _>>()?;
    /// check::verify(&programs)?;
    /// let [first, ..] = &programs[..] else { unreachable!() };
    /// // To three intra-node peers and to one rank of the other node, whose shard goes to three intra-node peers too.
    /// assert_eq!((first.transfers.len(), first.forwards.len()), (4, 3));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ScheduleError`], also where `nodes` are of another world, or rows are flattened of several
    /// nodes.
    pub fn build_across(problem: &Problem, rank: Rank, schedule: &Schedule, nodes: Nodes) -> Result<Self, ScheduleError> {
        schedule.check()?;
        let world = problem.world();
        if nodes.world() != world {
            return Err(ScheduleError::OtherWorld { nodes: nodes.world(), world });
        }
        if rank.get() >= world.get() {
            return Err(ScheduleError::RankOutsideWorld { rank, world });
        }
        let flattened = schedule.flattened && world.peers() > 0;
        if flattened && nodes.are_mixed() {
            return Err(ScheduleError::FlattenedNodes { nodes });
        }
        limits(problem, schedule, flattened)?;
        Ok(match (problem.op(), flattened) {
            (OpKind::AllGatherGemm, false) => ag_gemm::build(problem, rank, schedule, nodes),
            (OpKind::AllGatherGemm, true) => ag_gemm_flattened::build(problem, rank, schedule, nodes),
            (OpKind::GemmReduceScatter, false) => gemm_rs::build(problem, rank, schedule, nodes),
            (OpKind::GemmReduceScatter, true) => gemm_rs_flattened::build(problem, rank, schedule, nodes),
        })
    }

    /// What a call of this program needs of the workspace; the same on every rank.
    ///
    /// There is a counter for every transfer too: the movers of a kernel, one in each CTA, share a
    /// transfer, and the last of them raises its signal.
    pub fn workspace(&self) -> WorkspaceSize {
        let counters = self.counters.max(u32::try_from(self.transfers.len()).unwrap_or(u32::MAX));
        let half_bytes = layout::half_bytes(&self.problem, self.tile, self.flattened, self.split_k_slots);
        WorkspaceSize { half_bytes, signals: self.signals, counters }
    }

    /// Offset, in a half of the own data region, of the first part slot.
    pub const fn split_k_offset(&self) -> u64 {
        layout::split_k_offset(&self.problem, self.tile, self.flattened)
    }

    /// Steps along `k` in all.
    ///
    /// # Panics
    /// If the tile has none, which [`check::verify`] rules out.
    pub const fn k_steps(&self) -> u32 {
        self.problem.k_local().div_ceil(self.tile.k)
    }

    /// The step along `k` before which the first partial tile that is early is added, and the steps
    /// from one to the next.
    ///
    /// # Panics
    /// If the tile has no extent along `k`, which [`check::verify`] rules out.
    pub const fn in_mainloop_steps(&self) -> (u32, u32) {
        in_mainloop_steps(self.k_steps(), self.in_mainloop)
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
    /// If the range is outside the await list, which [`check::verify`] rules out.
    pub fn awaits_of(&self, item: &WorkItem) -> &[Await] {
        &self.awaits[item.await_first as usize..][..item.await_count as usize]
    }

    /// What `item` awaits after the multiplication.
    ///
    /// # Panics
    /// If the range is outside the await list, which [`check::verify`] rules out.
    pub fn late_awaits_of(&self, item: &WorkItem) -> &[Await] {
        &self.awaits[item.late_first as usize..][..item.late_count as usize]
    }
}

/// Least steps along `k` from one partial tile that is added early to the next: a kernel takes one
/// in up to so many pieces, with steps between them.
const MAINLOOP_GAP: u32 = 4;

/// Steps by which a kernel's consumers are apart when they add, so that one multiplies meanwhile.
const MAINLOOP_LAG: u32 = 2;

/// The steps along `k` in which partial tiles are added by the consumer that is ahead, as first and
/// count: the second half of a tile, as the worker's tile before may be on its way for the first.
const fn steps_for_mainloop(k_steps: u32) -> (u32, u32) {
    let first = k_steps / 2;
    (first, (k_steps - first).saturating_sub(MAINLOOP_LAG))
}

/// Most partial tiles that there is room for along `k`.
pub(crate) const fn most_in_mainloop(k_steps: u32) -> u32 {
    steps_for_mainloop(k_steps).1 / MAINLOOP_GAP
}

/// Of `k_steps`, the one before which the first of so many partial tiles is added, and the steps
/// from one to the next.
const fn in_mainloop_steps(k_steps: u32, in_mainloop: u32) -> (u32, u32) {
    let (first, steps) = steps_for_mainloop(k_steps);
    let Some(gap) = steps.checked_div(in_mainloop) else { return (first, 0) };
    (first, gap)
}

/// Refuses what would be too many records.
fn limits(problem: &Problem, schedule: &Schedule, flattened: bool) -> Result<(), ScheduleError> {
    let world = problem.world();
    let (tile, k_steps) = (schedule.tile, problem.k_local().div_ceil(schedule.tile.k));
    let of_all = TileGrid::new(problem.m(), problem.n_local(), tile);
    let tiles = if flattened { of_all.tiles() } else { u64::from(world.get()) * TileGrid::of_shard(problem, tile).tiles() };
    let (reductions, signals) = match problem.op() {
        OpKind::AllGatherGemm => (0, Arrivals::new(problem, schedule).signals(world.get())),
        OpKind::GemmReduceScatter if flattened => (
            u64::from(problem.m_shard().div_ceil(gemm_rs_flattened::reduce_rows(problem, of_all))) * u64::from(of_all.col_blocks()),
            u64::from(world.get()).saturating_mul(if gemm_rs_flattened::is_whole(schedule, u32::try_from(tiles).unwrap_or(u32::MAX)) {
                1
            } else {
                tiles
            }),
        ),
        OpKind::GemmReduceScatter => (0, tiles),
    };
    let items =
        tiles.saturating_mul(u64::from(schedule.split_k.min(k_steps))).saturating_add(reductions + 2 * u64::from(schedule.stream_k - 1));
    if items > MAX_ITEMS {
        return Err(ScheduleError::TooManyItems { tile, items });
    }
    if signals > MAX_ITEMS {
        return Err(ScheduleError::TooManySignals { tile, signals });
    }
    // Else the list has no more than a few entries for each signal, each part of a tile, and each
    // partial tile.
    if flattened && problem.op() == OpKind::AllGatherGemm {
        let awaits = ag_gemm_flattened::awaits(problem, schedule, &Arrivals::new(problem, schedule));
        if awaits > MAX_ITEMS {
            return Err(ScheduleError::TooManyAwaits { tile, awaits });
        }
    }
    Ok(())
}
