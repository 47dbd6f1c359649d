//! What a rank's program for one `m` follows from.
//!
//! Invariant: equal recipes on one communicator give equal programs, so ops with equal shapes share
//! them.

use super::plan::ExecutionPlan;
use crate::error::{BuildError, CallError};
use crate::planning::{self, Choice};
use crate::spec::LaunchOptions;
use flux_core::plan::{Chunk, CommMode, Plan, ProgramBound, RowMapping, Target};
use flux_core::program::TileProgram;
use flux_core::{Problem, SumsTo};
use flux_transport::{Communicator, TransportKind};

/// All that a program follows from, on a rank of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Recipe {
    pub(crate) problem: Problem,
    /// As it was chosen, for any `m` of its bucket.
    plan: Plan,
    /// SMs that stream-K counts with, on all ranks.
    sms: u32,
    pub(crate) launch: LaunchOptions,
}

/// A recipe carried out.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) execution: ExecutionPlan,
    pub(crate) program: TileProgram,
    /// For every `m` up to this one.
    pub(crate) bound: ProgramBound,
}

impl Recipe {
    pub(crate) const fn new(problem: Problem, choice: &Choice, launch: LaunchOptions) -> Self {
        Self { problem, plan: choice.plan, sms: choice.sms, launch }
    }

    /// The recipe in the form that it has for shards that differ, if that is another.
    pub(crate) fn for_unequal_shards(&self) -> Option<Self> {
        // All collectives but an AllReduce take equal shards.
        let (comm, rows) =
            (CommMode::Overlapped { peers: self.problem.world().peers() }, RowMapping::Flattened);
        let plan = Plan { comm, rows, chunk: Chunk::Shard, k_slices: 1, ..self.plan };
        let splits_rows =
            self.problem.world().peers() > 0 && self.problem.op().sums_to() != SumsTo::All;
        let is_another = self.plan.comm == CommMode::Sequential && splits_rows;
        is_another.then_some(Self { plan, ..*self })
    }

    /// Plan and target, as far as the communicator lets a caller choose.
    fn asked(&self, comm: &Communicator) -> (Plan, Target) {
        let mut target = planning::whole_target(comm);
        target.machine.multiprocessors = self.sms;
        let mut plan = self.plan;
        let gathers_or_scatters = self.problem.op().sums_to() != SumsTo::All;
        if plan.comm == CommMode::Sequential
            && comm.transport() == TransportKind::Mixed
            && gathers_or_scatters
        {
            // Its one collective of all ranks is AllReduce.
            plan.comm = CommMode::Overlapped { peers: self.problem.world().peers() };
        }
        (plan, target)
    }

    /// The plan in its canonical form.
    pub(crate) fn plan(&self, comm: &Communicator) -> Plan {
        let (plan, target) = self.asked(comm);
        plan.canonical(&self.problem, &target)
    }

    /// How this rank of `comm` executes it, and the program that its calls walk.
    pub(crate) fn resolve(&self, comm: &Communicator) -> Result<Resolved, BuildError> {
        let (asked, target) = self.asked(comm);
        let plan = asked.canonical(&self.problem, &target);
        let schedule = plan.schedule(&self.problem, &target);
        let (execution, program) =
            ExecutionPlan::resolve(comm, &self.problem, &plan, &schedule, self.launch)?;
        let bound = execution.bound(asked.bound(&program, &target));
        Ok(Resolved { execution, program, bound })
    }

    /// Why a call has no program.
    pub(crate) fn refused(&self, source: BuildError) -> CallError {
        CallError::Program { m: self.problem.m(), source: Box::new(source) }
    }
}
