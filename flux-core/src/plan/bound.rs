//! What a plan needs for every `m` up to a largest one.
//!
//! Invariant: no program of the plan with fewer rows exceeds its bound. Shards, grids, chunks and
//! their signals grow with `m`, and splits do not depend on it. Two things may be more for fewer
//! rows. Stream-K shares the tiles of a partial last wave, which any `m` may have. Each of its
//! groups has fewer partial items than workers. All groups have at most the schedule's workers.
//! Reductions of flattened rows are one for each worker of a wave, or fewer.

use super::{KSplit, Plan, Target};
use crate::layout::{self, WorkspaceSize};
use crate::program::{MOST_REDUCTIONS, TileProgram};

/// Bounds over the programs of one plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramBound {
    /// Workspace of a call.
    pub workspace: WorkspaceSize,
    /// Items of a rank.
    pub items: usize,
}

impl Plan {
    /// The most that any `m` needs by this plan, given the `program` of a rank for the largest.
    pub fn bound(&self, program: &TileProgram, target: &Target) -> ProgramBound {
        let shared = if self.k == KSplit::StreamK { target.machine.multiprocessors } else { 0 };
        let (size, slots) = (program.workspace(), program.split_k_slots.max(shared));
        // Each slot has a signal of its own. Flattened tiles that are one chunk share a counter.
        let ranks =
            if program.rows.has_two_exchanges() { program.problem.world().get() } else { 0 };
        let reductions = if program.rows.is_flattened() { MOST_REDUCTIONS } else { 0 };
        let signals = size.signals + (slots - program.split_k_slots) + ranks * reductions;
        let half_bytes = layout::half_bytes(&program.problem, program.tile, program.rows, slots);
        let items = program.items.len() + 2 * shared as usize + (reductions * (ranks + 1)) as usize;
        ProgramBound {
            workspace: WorkspaceSize { half_bytes, signals, counters: size.counters.max(1) },
            items,
        }
    }
}
