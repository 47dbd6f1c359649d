//! A layer with its plan: the problem of a world, one rank's part of it, and their programs.
//!
//! Invariant: all programs have one op, element type and tile, so one kernel runs them.

use crate::plan::PlanArgs;
use crate::shapes::{self, Layer};
use flux_core::machine::Machine;
use flux_core::plan::{Chunk, Links, Plan, RowMapping, Target};
use flux_core::program::{Schedule, ScheduleError, TileProgram};
use flux_core::{Nodes, Problem, Rank};

/// Rank 0, whose part is measured.
pub(crate) const FIRST: Rank = Rank::new(0);

/// A layer with its plan on a machine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedLayer {
    pub(crate) name: String,
    pub(crate) problem: Problem,
    /// What one rank of it multiplies, as a problem of a world of 1.
    pub(crate) alone: Problem,
    /// The op's own plan, unless another was asked for.
    pub(crate) plan: Plan,
    target: Target,
}

impl PlannedLayer {
    /// Plans `layer` as `args` ask, on ranks that reach each other's memory or the host's alone.
    pub(crate) fn new(layer: Layer, args: PlanArgs, machine: Machine) -> anyhow::Result<Self> {
        let Layer { name, problem } = layer;
        let [m, n, k] =
            [problem.m(), problem.n_shard(), problem.k_shard()].map(|extent| extent as usize);
        let alone = Problem::new(problem.op(), m, n, k, problem.numerics(), shapes::world(1)?)?;
        let links = if machine.host_staged { Links::HostStaged } else { Links::PeerMemory };
        let target = Target { links, ..Target::peer_memory(machine, &problem) };
        Ok(Self { plan: args.on_target(&problem, &target)?, name, problem, alone, target })
    }

    /// The GEMM alone: the same tiles over all rows, not cut by shards.
    pub(crate) fn core(&self) -> Result<TileProgram, ScheduleError> {
        let plan = Plan {
            rows: RowMapping::PerShard { group: 1 },
            chunk: Chunk::Shard,
            k_slices: 1,
            ..self.plan
        };
        let target = Target { nodes: Nodes::apart(self.alone.world()), ..self.target };
        TileProgram::build(&self.alone, FIRST, &plan.schedule(&self.alone, &target))
    }

    /// What the ranks' programs are built from.
    pub(crate) fn schedule(&self) -> Schedule {
        self.plan.schedule(&self.problem, &self.target)
    }

    /// The program of a rank of the world.
    pub(crate) fn program(&self, rank: Rank) -> Result<TileProgram, ScheduleError> {
        TileProgram::build(&self.problem, rank, &self.schedule())
    }

    /// Rank 0's program without its waits for peers, whose data are to be there.
    pub(crate) fn order(&self) -> Result<TileProgram, ScheduleError> {
        self.program(FIRST).map(TileProgram::awaiting_no_rank)
    }
}
