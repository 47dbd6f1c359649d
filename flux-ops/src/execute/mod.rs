//! Who executes an op: threads of this process or a CUDA kernel, depending on where the
//! communicator works.
//!
//! Invariant: everything that can fail for lack of something (a library, memory, a kernel) fails
//! when an executor is made, not when it runs.

mod cuda;
mod host;
mod pace;
mod plan;
mod sequential;

use crate::error::{BuildError, CallError};
use crate::op::Operands;
use crate::tensor::{Location, View};
use crate::timeline::{Timeline, TimelineError};
use cuda::CudaExecutor;
use flux_core::layout::gather_place_bytes;
use flux_core::program::{Round, TileProgram};
use flux_core::{OpKind, Problem};
use flux_kernels::{Activation, Element};
use flux_transport::{Call, Communicator, Label, MessageRounds, Source, Stream};
use host::HostExecutor;
pub use pace::launch_of;
pub use plan::Execution;
pub(crate) use plan::ExecutionPlan;

/// Caller overrides for the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaunchOptions {
    /// Threads of the host executor, or CTAs of the kernel.
    pub(crate) workers: Option<u32>,
    /// Whether each call leaves its time line.
    pub(crate) trace: bool,
}

/// One rank's program, ready to run.
#[derive(Debug)]
pub(crate) enum Executor<T> {
    Host(HostExecutor<T>),
    Cuda(CudaExecutor),
}

/// What a mover is given of a call's `x`: a row's elements are as many as the problem says,
/// wherever the rows start.
pub(crate) fn push_of<'p, T: Element>(x: &View, program: &'p TileProgram) -> flux_transport::RowTransfers<'p> {
    let element_bytes = size_of::<T>() as u64;
    let problem = &program.problem;
    flux_transport::RowTransfers {
        x: x.address,
        row_stride: x.row_bytes::<T>(),
        row_bytes: u64::from(program.problem.k_local()) * element_bytes,
        element_bytes,
        rows: problem.shard_rows(program.rank).len() as u64,
        place_bytes: gather_place_bytes(problem),
        full_places: if program.flattened { problem.full_shards() } else { u32::MAX },
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
    let source = match program.problem.op() {
        OpKind::AllGatherGemm => Source::Rows(push_of::<T>(x, program)),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => Source::Stored { of_all: program.flattened },
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
fn end(comm: &Communicator, call: Call<'_>, enqueued: Result<(), CallError>) -> Result<(), CallError> {
    match enqueued {
        Ok(()) => call.finish().map_err(CallError::from).inspect_err(|_| comm.abort(LAUNCH_REFUSED)),
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
    /// Makes everything that calls take, but the workspace.
    pub(crate) fn prepare(comm: &Communicator, plan: (ExecutionPlan, TileProgram), activation: Activation) -> Result<Self, BuildError> {
        match location(comm) {
            Location::Host => HostExecutor::prepare(plan, activation).map(Self::Host),
            Location::Cuda(ordinal) => CudaExecutor::prepare(comm, ordinal, plan, activation).map(Self::Cuda),
        }
    }

    /// Runs the program once; on CUDA it returns when the work is on the stream.
    pub(crate) fn run(&self, comm: &Communicator, operands: &Operands, stream: Stream) -> Result<(), CallError> {
        match self {
            Self::Host(host) => host.run(comm, operands, stream),
            Self::Cuda(cuda) => cuda.run::<T>(comm, operands, stream),
        }
    }

    /// The last call's time line, when what is on `stream` is done.
    pub(crate) fn timeline(&self, stream: Stream) -> Result<Timeline, TimelineError> {
        match self {
            Self::Host(_) => Err(TimelineError::NotTraced),
            Self::Cuda(cuda) => cuda.timeline(stream),
        }
    }

    /// What executes the op.
    pub(crate) fn execution(&self) -> Execution {
        match self {
            Self::Host(host) => host.execution(),
            Self::Cuda(cuda) => cuda.execution(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{TensorMut, TensorRef};
    use flux_core::plan::Plan;
    use flux_core::program::Schedule;
    use flux_core::{DType, TileShape};
    use flux_transport::{Fault, Select, TransportError, World};
    use half::bf16;

    fn connected() -> Vec<Communicator> {
        let connect = |world| Communicator::connect_blocking(&world, Select::Host).unwrap();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = World::local(2).unwrap().into_iter().map(|world| scope.spawn(move || connect(world))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_peers_of_a_rank_whose_part_was_refused_need_not_wait_for_the_deadline() {
        let ranks = connected();
        let refused = || CallError::Transport(TransportError::MoverUnusable { why: "of a test" });
        let call = ranks[0].begin(Stream::Host).unwrap();
        assert_eq!(end(&ranks[0], call, Err(refused())).unwrap_err().to_string(), refused().to_string());
        for comm in &ranks {
            assert!(matches!(comm.status(), Err(Fault::Aborted { rank, reason: LAUNCH_REFUSED, .. }) if rank == ranks[0].rank()));
        }
    }

    #[test]
    fn the_peers_of_a_rank_whose_push_was_refused_need_not_wait_for_the_deadline() {
        let ranks = connected();
        let problem = Problem::new(OpKind::AllGatherGemm, 16, 16, 8, DType::Bf16, ranks[0].world_size()).unwrap();
        let tile = TileShape::new(8, 8, 8);
        // Nobody has taken the workspace that it needs.
        let plan =
            ExecutionPlan::resolve(&ranks[0], &problem, (&Plan::of(tile), &Schedule::of(tile)), LaunchOptions::default(), 1).unwrap();
        let executor = HostExecutor::<bf16>::prepare(plan, Activation::None).unwrap();
        let (x, w, mut y) = (vec![bf16::ONE; 8 * 8], vec![bf16::ONE; 8 * 8], vec![bf16::ZERO; 16 * 8]);
        let (x, w) = (TensorRef::host(&x, (8, 8)).unwrap().view(), TensorRef::host(&w, (8, 8)).unwrap().view());
        let operands = Operands { x, w, bias: None, y: TensorMut::host(&mut y, (16, 8)).unwrap().view() };
        let refused = executor.run(&ranks[0], &operands, Stream::Host).unwrap_err();
        assert!(matches!(refused, CallError::Transport(TransportError::BadTransfer { .. })), "{refused}");
        for comm in &ranks {
            assert!(matches!(comm.status(), Err(Fault::Aborted { rank, reason: LAUNCH_REFUSED, .. }) if rank == ranks[0].rank()));
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
