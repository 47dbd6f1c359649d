//! What the two ops share: from a request to a running program.
//!
//! Invariant: an op exists only when every rank of the communicator has built the same one, and the
//! communicator's workspace holds it.

pub(crate) mod agreement;
mod finish;
mod validate;

pub(crate) use finish::Finish;
pub(crate) use validate::Operands;

use crate::error::{BuildError, CallError};
use crate::execute::{ExecutionPlan, Executor, LaunchOptions, Push, location, sequential_workspace};
use crate::planning::{self, Choice, UserTable};
use crate::tensor::{Location, TensorMut, TensorRef};
use crate::timeline::{Timeline, TimelineError};
use flux_core::layout::WorkspaceSize;
use flux_core::plan::{CommMode, Mover, Plan, PlanOrigin};
use flux_core::program::{Channels, Schedule, Sending, TileProgram};
use flux_core::{DType, Nodes, OpKind, Problem, Rank, WorldSize};
use flux_kernels::Element;
use flux_transport::{Communicator, Failure, Fault, Stream};
use std::fmt;
use std::path::PathBuf;

/// What a builder has been told.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) op: OpKind,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) dtype: DType,
    pub(crate) finish: Finish,
    pub(crate) plan: Option<Plan>,
    /// The file of measured plans, in place of the user's.
    pub(crate) table: Option<PathBuf>,
    pub(crate) schedule: Option<Schedule>,
    pub(crate) sending: Option<Sending>,
    pub(crate) options: LaunchOptions,
}

impl Request {
    pub(crate) fn new(op: OpKind, m: usize, n: usize, k: usize, dtype: DType) -> Self {
        Self {
            op,
            m,
            n,
            k,
            dtype,
            finish: Finish::default(),
            plan: None,
            table: None,
            schedule: None,
            sending: None,
            options: LaunchOptions::default(),
        }
    }

    /// The op and its extents, as flight records name its calls.
    pub(crate) fn name(&self) -> String {
        format!("{} {}x{}x{}", self.op, self.m, self.n, self.k)
    }

    pub(crate) fn problem(&self, world: WorldSize) -> Result<Problem, BuildError> {
        Ok(Problem::new(self.op, self.m, self.n, self.k, self.dtype, world)?)
    }

    /// This rank's choice of the plan.
    pub(crate) fn choice(&self, comm: &Communicator) -> Result<Choice, BuildError> {
        let problem = self.problem(comm.world_size())?;
        match self.plan {
            Some(plan) => Ok(Choice { plan, sms: planning::target(comm).machine.multiprocessors, origin: PlanOrigin::Caller }),
            None => planning::own_choice(comm, &problem, &UserTable::at(self.table.as_deref(), false)),
        }
    }

    /// What covers the op, however ranks are grouped, as the size does not depend on it. Where
    /// messages carry chunks, a schedule that the caller leaves open is chosen by what the
    /// communicator says of them, and may need another size.
    pub(crate) fn workspace(&self, world: WorldSize) -> Result<WorkspaceSize, BuildError> {
        let problem = self.problem(world)?;
        let own = own_schedules(&problem);
        let is_sequential = self.comm_mode(self.plan.as_ref()) == CommMode::Sequential && world.peers() > 0;
        own.into_iter().try_fold(WorkspaceSize::default(), |size, own| {
            let schedule = self.schedule.unwrap_or(own);
            let size = size.max(TileProgram::build(&problem, Rank::new(0), &schedule)?.workspace());
            Ok(if is_sequential { size.max(sequential_workspace(&problem, &schedule)?) } else { size })
        })
    }

    /// How the traffic relates to the GEMM: as asked for, or else that of `plan`. A schedule that
    /// the caller names has its traffic beside the kernel.
    fn comm_mode(&self, plan: Option<&Plan>) -> CommMode {
        let by_kernel = CommMode::Fused { mover: Mover::Kernel };
        match (self.sending, self.options.push) {
            (Some(Sending::Beside { peers }), _) => CommMode::Overlapped { peers: peers.max(1) },
            (Some(Sending::Before), _) => CommMode::Sequential,
            (None, Push::CopyEngine) => CommMode::Fused { mover: Mover::CopyEngine },
            (None, Push::Auto) if self.schedule.is_none() => plan.map_or(by_kernel, |plan| plan.comm),
            (None, Push::Auto | Push::Kernel) => by_kernel,
        }
    }
}

/// What may be chosen where the caller says nothing: of peer memory, of copies through the host,
/// and of messages, between nodes of one rank and of several.
fn own_schedules(problem: &Problem) -> Vec<Schedule> {
    let world = problem.world();
    // Which does not matter.
    let mixed = (2..world.get()).find_map(|count| Nodes::new(world, count));
    let nodes = std::iter::once(Nodes::apart(world)).chain(mixed);
    let messages = nodes.map(|nodes| Schedule::in_messages(problem, &Channels::FREE, Sending::ALL, nodes));
    [Schedule::heuristic(problem), Schedule::staged(problem)].into_iter().chain(messages).collect()
}

/// The text that the ranks compare: all that must be the same on every rank. How many workers a
/// rank has is its own business.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, m, n, k, dtype, finish, plan, schedule, sending, options: _, table: _ } = self;
        write!(f, "{op} m={m} n={n} k={k} {dtype}, {finish}, ")?;
        match (plan, schedule) {
            (Some(plan), _) => write!(f, "{plan}")?,
            (None, Some(schedule)) => write!(f, "{schedule}")?,
            (None, None) => f.write_str("plan of rank 0")?,
        }
        if let Some(sending) = sending {
            write!(f, ", {sending}")?;
        }
        write!(f, ", flux {}", env!("CARGO_PKG_VERSION"))
    }
}

/// A built op of either kind.
#[derive(Debug)]
pub(crate) struct FusedOp<T> {
    comm: Communicator,
    request: Request,
    problem: Problem,
    finish: Finish,
    plan: Plan,
    origin: PlanOrigin,
    schedule: Schedule,
    size: WorkspaceSize,
    location: Location,
    executor: Executor<T>,
}

impl<T: Element> FusedOp<T> {
    /// Collective: agrees with the other ranks, prepares the executor, then grows the workspace.
    pub(crate) fn build(request: Request, comm: &Communicator) -> Result<Self, BuildError> {
        // First of all, so that bad input on one rank does not leave the others waiting, and so
        // that whatever the ranks had launched before is launched on all of them by the time a
        // module is loaded, which may have to wait for it.
        let name = request.name();
        let own = request.choice(comm);
        let of_rank_0 = agreement::same_request(comm, &name, &request.to_string(), own.as_ref().ok().copied())?;
        let op = agreement::all_ready(comm, &name, own.and_then(|own| Self::prepare(request, comm, of_rank_0.unwrap_or(own))))?;
        comm.reserve(op.size).map_err(agreement::while_building(&name))?;
        tracing::debug!(rank = %comm.rank(), "{}", op.explain());
        Ok(op)
    }

    fn prepare(request: Request, comm: &Communicator, choice: Choice) -> Result<Self, BuildError> {
        let problem = request.problem(comm.world_size())?;
        let mut target = planning::target(comm);
        target.machine.multiprocessors = choice.sms;
        let origin = if request.schedule.is_some() { PlanOrigin::Caller } else { choice.origin };
        let plan = choice.plan.canonical(&problem, &target);
        let schedule = request.schedule.unwrap_or_else(|| plan.schedule(&problem, &target));
        let comm_mode = request.comm_mode(Some(&plan));
        let number = agreement::number(&request.to_string());
        let execution = ExecutionPlan::resolve(comm, &problem, (&schedule, comm_mode), request.options, number)?;
        let (finish, size) = (request.finish, execution.0.workspace());
        let executor = Executor::prepare(comm, execution)?;
        Ok(Self { comm: comm.clone(), request, problem, finish, plan, origin, schedule, size, location: location(comm), executor })
    }

    pub(crate) fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: Option<&TensorRef<'_, T>>,
        y: &mut TensorMut<'_, T>,
        stream: Stream,
    ) -> Result<(), CallError> {
        let operands = Operands { x: x.view(), w: w.view(), bias: bias.map(TensorRef::view), y: y.view() };
        operands.check::<T>(&self.problem, self.finish, self.location)?;
        if let Some(stream) = stream.raw() {
            operands.check_stream(stream)?;
        }
        self.executor.run(&self.comm, &operands, self.finish.activation, stream)
    }

    pub(crate) fn timeline(&self, stream: Stream) -> Result<Timeline, TimelineError> {
        self.executor.timeline(stream)
    }

    /// The same op on another communicator; collective there.
    pub(crate) fn rebuild(&self, comm: &Communicator) -> Result<Self, BuildError> {
        Self::build(self.request.clone(), comm)
    }

    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.comm.failure()
    }

    pub(crate) fn status(&self) -> Result<(), Fault> {
        self.comm.status()
    }

    pub(crate) const fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) const fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) const fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    pub(crate) const fn workspace(&self) -> WorkspaceSize {
        self.size
    }

    /// Who works, in words.
    pub(crate) fn executor(&self) -> String {
        self.executor.explain()
    }

    pub(crate) fn explain(&self) -> String {
        let Self { comm, request, problem, finish, plan, origin, size, .. } = self;
        format!(
            "{problem}, {finish}, rank {} of {}\n  plan: {plan} ({origin})\n  executor: {}\n  workspace: {} bytes of the communicator's {}\n  plan table: {}\n  {}",
            comm.rank(),
            problem.world(),
            self.executor.explain(),
            size.total_bytes(),
            comm.workspace_size().total_bytes(),
            UserTable::at(request.table.as_deref(), false).explain(comm.device().name()),
            comm.explain().replace('\n', "\n  "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::TileShape;
    use flux_core::plan::KSplit;
    use flux_transport::{Select, World};
    use half::bf16;

    /// What may be chosen where the caller says nothing: of peer memory, of copies through the
    /// host, of messages. None of the three covers the others.
    #[test]
    fn the_workspace_covers_every_schedule_that_may_be_chosen() {
        let world = WorldSize::new(4).unwrap();
        let mut largest = [0; 3];
        // Between nodes of one rank, and of several, where they differ in nothing but few rows.
        let kind = |at: usize| at.min(2);
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            for m in [64, 256, 512, 1024, 4096] {
                for (n, k) in [(49152, 12288), (12288, 49152), (8192, 28672), (1000 * 8, 1024)] {
                    let request = Request::new(op, m, n, k, DType::Bf16);
                    let (problem, size) = (request.problem(world).unwrap(), request.workspace(world).unwrap());
                    let own = own_schedules(&problem);
                    assert_eq!(own.len(), 4);
                    let needed: Vec<_> =
                        own.iter().map(|own| TileProgram::build(&problem, Rank::new(0), own).unwrap().workspace()).collect();
                    for (at, needed) in needed.into_iter().enumerate() {
                        assert_eq!(size.max(needed), size, "{problem}");
                        let others = own.iter().enumerate().filter(|&(other, _)| kind(other) != kind(at));
                        let others = others.map(|(_, own)| TileProgram::build(&problem, Rank::new(0), own).unwrap().workspace());
                        largest[kind(at)] += u32::from(others.fold(WorkspaceSize::default(), WorkspaceSize::max) != size);
                    }
                }
            }
        }
        assert!(largest.iter().all(|&times| times > 0), "{largest:?}: a schedule that never asks for most shows nothing");
    }

    #[test]
    fn an_op_says_its_plan_in_canonical_form_and_where_it_comes_from() {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
        let plan = |plan| {
            let request = Request { plan, ..Request::new(OpKind::AllGatherGemm, 16, 16, 128, DType::Bf16) };
            let op = FusedOp::<bf16>::build(request, &comm).unwrap();
            op.explain().lines().find_map(|line| line.strip_prefix("  plan: ")).unwrap().to_owned()
        };
        let fine = Plan::of(TileShape::new(16, 16, 64));
        assert_eq!(plan(Some(fine)), format!("{fine} (named by the caller)"));
        let asked = Plan { k: KSplit::SplitK(9), ..fine };
        assert_eq!(plan(Some(asked)), format!("{} (named by the caller)", Plan { k: KSplit::SplitK(2), ..fine }));
        assert!(plan(None).ends_with(" (by the cost model)"));
    }
}
