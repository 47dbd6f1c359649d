//! One row to be measured: the problem of a world, what one of its ranks multiplies, and the
//! programs for both.
//!
//! Invariant: all programs of a case have one op, element type and tile, so one kernel runs them.

use crate::plan::ScheduleArgs;
use crate::shapes::{self, Layer};
use flux_core::program::{Chunk, Schedule, ScheduleError, TileProgram};
use flux_core::{Nodes, Problem, Rank};

/// The rank whose part is measured.
pub(crate) const FIRST: Rank = Rank::new(0);

/// One row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PlannedLayer {
    /// Whose layer the shape is.
    pub(crate) model: String,
    /// The problem of the world.
    pub(crate) problem: Problem,
    /// What one rank of it multiplies, as a problem of a world of 1.
    pub(crate) alone: Problem,
    /// The op's own schedule in that world, unless another was asked for.
    pub(crate) schedule: Schedule,
}

impl PlannedLayer {
    pub(crate) fn new(layer: &Layer, args: ScheduleArgs) -> anyhow::Result<Self> {
        Self::of(layer.name.clone(), layer.problem, Schedule::heuristic(&layer.problem), args)
    }

    /// Of a problem that is called a layer of `model`, whose op has the schedule `own` unless
    /// another was asked for.
    pub(crate) fn of(model: String, problem: Problem, own: Schedule, args: ScheduleArgs) -> anyhow::Result<Self> {
        let [m, n, k] = [problem.m(), problem.n_local(), problem.k_local()].map(|extent| extent as usize);
        let alone = Problem::new(problem.op(), m, n, k, problem.dtype(), shapes::world(1)?)?;
        let schedule = args.over(own, &problem, Nodes::apart(problem.world()));
        Ok(Self { model, problem, alone, schedule })
    }

    /// The GEMM alone: the same tiles, none of them cut by a shard's border, in the order that the
    /// raster gives all rows together.
    pub(crate) fn core(&self) -> Result<TileProgram, ScheduleError> {
        let schedule = Schedule { chunk: Chunk::Shard, band: 1, k_slices: 1, stack: false, ..self.schedule };
        TileProgram::build(&self.alone, FIRST, &schedule)
    }

    /// The program of a rank of the world.
    pub(crate) fn program(&self, rank: Rank) -> Result<TileProgram, ScheduleError> {
        TileProgram::build(&self.problem, rank, &self.schedule)
    }

    /// Rank 0's program without its waits for peers, whose data are to be there.
    pub(crate) fn order(&self) -> Result<TileProgram, ScheduleError> {
        self.program(FIRST).map(TileProgram::awaiting_no_rank)
    }
}
