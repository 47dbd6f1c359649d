//! What a builder was told, and what follows from it on one communicator.

use super::epilogue::EpilogueSpec;
use crate::error::BuildError;
use crate::execute::{ExecutionPlan, LaunchOptions};
use crate::planning::{self, Choice, UserTable};
use flux_core::layout::WorkspaceSize;
use flux_core::plan::{Chunk, CommMode, KSplit, Plan, PlanOrigin, RowMapping};
use flux_core::program::{ScheduleError, TileProgram};
use flux_core::{DType, OpKind, Problem};
use flux_transport::{Communicator, TransportKind};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// What a builder was told.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) op: OpKind,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) dtype: DType,
    pub(crate) epilogue: EpilogueSpec,
    pub(crate) plan: Option<Plan>,
    /// The file of measured plans, in place of the user's.
    pub(crate) table: Option<PathBuf>,
    pub(crate) launch: LaunchOptions,
}

/// A request on one rank of a communicator.
pub(super) struct Resolved {
    pub(super) problem: Problem,
    /// In its canonical form.
    pub(super) plan: Plan,
    pub(super) execution: (ExecutionPlan, TileProgram),
}

impl Resolved {
    /// What calls need of the communicator's workspace.
    pub(super) const fn workspace(&self) -> WorkspaceSize {
        self.execution.0.workspace()
    }
}

impl Request {
    pub(super) fn new(op: OpKind, m: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self { op, m, n, k, dtype, epilogue: EpilogueSpec::default(), plan: None, table: None, launch: LaunchOptions::default() }
    }

    /// The op and its extents, as flight records name its calls.
    pub(crate) fn name(&self) -> String {
        format!("{} {}x{}x{}", self.op, self.m, self.n, self.k)
    }

    pub(crate) fn problem(&self, comm: &Communicator) -> Result<Problem, BuildError> {
        Ok(Problem::new(self.op, self.m, self.n, self.k, self.dtype, comm.world_size())?)
    }

    /// This rank's choice of the plan.
    pub(crate) fn choice(&self, comm: &Communicator) -> Result<Choice, BuildError> {
        let problem = self.problem(comm)?;
        match self.plan {
            Some(plan) => {
                check(&plan)?;
                Ok(Choice { plan, sms: planning::target(comm).machine.multiprocessors, origin: PlanOrigin::Caller })
            }
            None => planning::own_choice(comm, &problem, &self.user_table()),
        }
    }

    /// The user's table of measured plans.
    pub(super) fn user_table(&self) -> Arc<UserTable> {
        UserTable::at(self.table.as_deref(), false)
    }

    /// How this rank executes the op by this choice.
    pub(super) fn resolve(&self, comm: &Communicator, choice: Choice) -> Result<Resolved, BuildError> {
        let problem = self.problem(comm)?;
        let mut target = planning::target(comm);
        target.machine.multiprocessors = choice.sms;
        let mut plan = choice.plan;
        if plan.comm == CommMode::Sequential && comm.transport() == TransportKind::Mixed {
            // It has no collective of all ranks.
            plan.comm = CommMode::Overlapped { peers: problem.world().peers() };
        }
        let plan = plan.canonical(&problem, &target);
        let schedule = plan.schedule(&problem, &target);
        let execution = ExecutionPlan::resolve(comm, &problem, (&plan, &schedule), self.launch, self.number())?;
        Ok(Resolved { problem, plan, execution })
    }

    /// The op's number, by which ranks compare their calls: that of its text.
    fn number(&self) -> u32 {
        super::agreement::number(&self.to_string())
    }
}

/// Refuses what no text of a plan says: extents and counts of zero.
fn check(plan: &Plan) -> Result<(), ScheduleError> {
    let Plan { tile, rows, k, chunk, k_slices, comm } = *plan;
    let counts = [
        ("tile.m", tile.m),
        ("tile.n", tile.n),
        ("tile.k", tile.k),
        ("rows=per-shard", if let RowMapping::PerShard { group } = rows { group } else { 1 }),
        ("k=split-k", if let KSplit::SplitK(workers) = k { workers } else { 1 }),
        ("chunk", if let Chunk::Tiles(tiles) = chunk { tiles } else { 1 }),
        ("k-slices", k_slices),
        ("comm=overlapped", if let CommMode::Overlapped { peers } = comm { peers } else { 1 }),
    ];
    counts.into_iter().find(|&(_, count)| count == 0).map_or(Ok(()), |(name, _)| Err(ScheduleError::Zero { name }))
}

/// The text that the ranks compare: all that must be the same on every rank.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, m, n, k, dtype, epilogue, plan, table: _, launch: _ } = self;
        write!(f, "{op} m={m} n={n} k={k} {dtype}, {epilogue}, ")?;
        match plan {
            Some(plan) => write!(f, "{plan}")?,
            None => f.write_str("plan of rank 0")?,
        }
        write!(f, ", flux {}", env!("CARGO_PKG_VERSION"))
    }
}
