//! Who executes calls: threads of this process or a CUDA kernel, depending on where the
//! communicator works.
//!
//! Invariant: kernels, memory and workspace are there when an op is built. A call with a new `m`
//! makes its program on the host, and nothing else.

mod cuda;
mod device_programs;
mod host;
mod host_programs;
mod kernels;
mod pace;
mod plan;
mod ranges;
mod recipe;
mod sequential;

use crate::agreement;
use crate::epilogue::EpilogueSpec;
use crate::error::{BuildError, CallError};
use crate::operands::Operands;
use crate::tensor::{Location, View};
use crate::timeline::{Timeline, TimelineError};
use cuda::CudaExecutor;
use flux_core::Problem;
use flux_core::layout::gather_place_bytes;
use flux_core::program::{Round, TileProgram};
use flux_kernels::{Element, WeightLayout};
use flux_transport::{Call, Communicator, Label, MessageRounds, Source, Stream};
use host::HostExecutor;
pub use pace::launch_of;
pub use plan::Execution;
use ranges::NoRoom;
pub(crate) use recipe::{Recipe, Resolved};

/// Bytes of the programs of a communicator's ops: some hundred of the largest shapes, some thousand
/// of small ones.
const PROGRAM_BYTES: u64 = 32 << 20;

/// Bytes for programs, in place of [`PROGRAM_BYTES`]: an attachment of the communicator.
#[derive(Debug)]
struct ProgramLimit(u64);

/// Sets the bytes for the programs of `comm`'s ops, before the first op is built.
pub fn limit_programs(comm: &Communicator, bytes: u64) {
    comm.attachment(|| ProgramLimit(bytes));
}

fn no_room(recipe: &Recipe, NoRoom { bytes, limit, pinned }: NoRoom) -> BuildError {
    BuildError::ProgramMemory { problem: recipe.problem, bytes, limit, pinned }
}

/// Caller overrides for the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct LaunchOptions {
    /// Threads of the host executor, or CTAs of the kernel.
    pub(crate) workers: Option<u32>,
    /// Whether each call leaves its time line.
    pub(crate) trace: bool,
    /// Whether calls may be captured in graphs.
    pub(crate) captures: bool,
    /// SMs that are left to others.
    pub(crate) sm_margin: u32,
}

/// What is known of a call before it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) recipe: Recipe,
    /// The op's number.
    pub(crate) number: u32,
}

impl Planned {
    /// What ranks compare of a call: the op, its `m`, and how many calls without rows went before.
    fn call_number(&self, call: &Call<'_>) -> u32 {
        agreement::call_number(self.number, self.recipe.problem.m(), call.empty_calls_before())
    }

    /// Why the call has no program.
    fn refused(&self, source: BuildError) -> CallError {
        CallError::Program { m: self.recipe.problem.m(), source: Box::new(source) }
    }
}

/// What one rank executes an op with.
#[derive(Debug)]
pub(crate) enum Executor<T> {
    Host(HostExecutor<T>),
    Cuda(CudaExecutor),
}

/// What a mover is given of a call's `x`: a row's elements are as many as the problem says,
/// wherever the rows start.
pub(crate) fn push_of<'p, T: Element>(
    x: &View,
    program: &'p TileProgram,
) -> flux_transport::RowTransfers<'p> {
    let element_bytes = size_of::<T>() as u64;
    let problem = &program.problem;
    flux_transport::RowTransfers {
        x: x.address,
        row_stride: x.row_bytes::<T>(),
        row_bytes: u64::from(program.problem.k()) * element_bytes,
        element_bytes,
        rows: problem.shard_rows(program.rank).len() as u64,
        place_bytes: gather_place_bytes(problem),
        full_places: if program.rows.is_flattened() { problem.full_shards() } else { u32::MAX },
        transfers: &program.transfers,
        forwards: &program.forwards,
    }
}

/// What messages carry of a call.
pub(crate) fn rounds_of<'p, T: Element>(
    x: &View,
    (program, op): (&'p TileProgram, u32),
    rounds: &'p [Round],
    peers: u32,
) -> MessageRounds<'p> {
    let source = if program.problem.op().gathers() {
        Source::Rows(push_of::<T>(x, program))
    } else {
        Source::Stored { of_all: program.rows.is_flattened() }
    };
    MessageRounds { source, place_bytes: program.place_bytes(), rounds, peers, op }
}

/// What flight records and errors call a call.
fn label(problem: &Problem) -> Label {
    Label::new(problem.op().name(), [problem.m(), problem.n(), problem.k()])
}

/// Why peers' waits end when this rank could not enqueue its part of a call: the reason of an
/// abort.
const LAUNCH_REFUSED: u32 = 0x464c_0001;

/// Ends a call. Where its work could not be enqueued, or the call not be finished, it aborts the
/// peers' waits for this rank.
fn end(
    comm: &Communicator,
    call: Call<'_>,
    enqueued: Result<(), CallError>,
) -> Result<(), CallError> {
    match enqueued {
        Ok(()) => {
            call.finish().map_err(CallError::from).inspect_err(|_| comm.abort(LAUNCH_REFUSED))
        }
        Err(error) => {
            // Before the call is dropped, which ends this rank's own waits: what those let go of
            // may reach peers.
            comm.abort(LAUNCH_REFUSED);
            drop(call);
            Err(error)
        }
    }
}

/// Where `comm` works.
pub(crate) fn location(comm: &Communicator) -> Location {
    comm.device().ordinal().map_or(Location::Host, Location::Cuda)
}

impl<T: Element> Executor<T> {
    /// Makes everything that calls take, but the workspace. `largest` are the buckets' programs for
    /// their last `m`, in every form that a smaller `m` may take.
    pub(crate) fn new(
        comm: &Communicator,
        largest: &[(Recipe, Resolved)],
        spec: (EpilogueSpec, WeightLayout),
    ) -> Result<Self, BuildError> {
        match location(comm) {
            Location::Host => HostExecutor::new(comm, largest, spec).map(Self::Host),
            Location::Cuda(ordinal) => {
                CudaExecutor::new(comm, ordinal, largest, spec).map(Self::Cuda)
            }
        }
    }

    /// Makes one call; on CUDA it returns when the work is on the stream.
    pub(crate) fn run(
        &self,
        comm: &Communicator,
        planned: &Planned,
        operands: &Operands,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        match self {
            Self::Host(host) => host.run(comm, planned, operands, stream),
            Self::Cuda(cuda) => cuda.run::<T>(comm, planned, operands, stream),
        }
    }

    /// Makes the call's program, which then stays for good.
    pub(crate) fn prepare(&self, comm: &Communicator, planned: &Planned) -> Result<(), CallError> {
        match self {
            Self::Host(host) => host.prepare(comm, planned),
            Self::Cuda(cuda) => cuda.prepare(comm, planned),
        }
    }

    /// The last call's time line, when what is on `stream` is done.
    pub(crate) fn timeline(&self, stream: Stream<'_>) -> Result<Timeline, TimelineError> {
        match self {
            Self::Host(_) => Err(TimelineError::NotTraced),
            Self::Cuda(cuda) => cuda.timeline(stream),
        }
    }

    /// What executes a recipe's calls, for people.
    pub(crate) fn execution(&self, resolved: &Resolved) -> Execution {
        match self {
            Self::Host(_) => resolved.execution.execution("CPU executor".to_owned()),
            Self::Cuda(cuda) => cuda.execution(resolved),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planning::Choice;
    use crate::tensor::{TensorMut, TensorRef};
    use flux_core::OpKind;
    use flux_core::plan::{Plan, PlanOrigin};
    use flux_core::{DType, TileShape};
    use flux_transport::{Fault, Select, TransportError, World};
    use half::bf16;

    fn connected() -> Vec<Communicator> {
        let connect = |world| Communicator::connect_blocking(&world, Select::Host).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = World::local(2)
                .unwrap()
                .into_iter()
                .map(|world| scope.spawn(move || connect(world)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_peers_of_a_rank_whose_part_was_refused_need_not_wait_for_the_deadline() {
        let ranks = connected();
        let refused = || CallError::Transport(TransportError::MoverUnusable { why: "of a test" });
        let call = ranks[0].begin(Stream::Host).unwrap();
        assert_eq!(
            end(&ranks[0], call, Err(refused())).unwrap_err().to_string(),
            refused().to_string()
        );
        for comm in &ranks {
            assert!(
                matches!(comm.status(), Err(Fault::Aborted { rank, reason: LAUNCH_REFUSED, .. }) if rank == ranks[0].rank())
            );
        }
    }

    #[test]
    fn the_peers_of_a_rank_whose_push_was_refused_need_not_wait_for_the_deadline() {
        let ranks = connected();
        let problem =
            Problem::new(OpKind::AllGatherGemm, 16, 16, 8, DType::Bf16, ranks[0].world_size())
                .unwrap();
        // Nobody has taken the workspace that it needs.
        let choice = Choice {
            plan: Plan::of(TileShape::new(8, 8, 8)),
            sms: 132,
            origin: PlanOrigin::Caller,
        };
        let recipe = Recipe::new(problem, &choice, LaunchOptions::default());
        let executor = Executor::<bf16>::new(
            &ranks[0],
            &[(recipe, recipe.resolve(&ranks[0]).unwrap())],
            (EpilogueSpec::default(), WeightLayout::Nk),
        )
        .unwrap();
        let (x, w, mut y) =
            (vec![bf16::ONE; 8 * 8], vec![bf16::ONE; 8 * 8], vec![bf16::ZERO; 16 * 8]);
        let (x, w) = (
            TensorRef::host(&x, (8, 8)).unwrap().view(),
            TensorRef::host(&w, (8, 8)).unwrap().view(),
        );
        let operands = Operands {
            x,
            w,
            bias: None,
            residual: None,
            y: TensorMut::host(&mut y, (16, 8)).unwrap().view(),
            norm: None,
            x_full: None,
            more: [None; 3],
        };
        let planned = Planned { recipe, number: 1 };
        let refused = executor.run(&ranks[0], &planned, &operands, Stream::Host).unwrap_err();
        assert!(
            matches!(refused, CallError::Transport(TransportError::BadTransfer { .. })),
            "{refused}"
        );
        for comm in &ranks {
            assert!(
                matches!(comm.status(), Err(Fault::Aborted { rank, reason: LAUNCH_REFUSED, .. }) if rank == ranks[0].rank())
            );
        }
    }

    #[test]
    fn a_call_that_was_enqueued_is_finished() {
        let ranks = connected();
        for comm in &ranks {
            end(comm, comm.begin(Stream::Host).unwrap(), Ok(())).unwrap();
            comm.status().unwrap();
        }
    }
}
