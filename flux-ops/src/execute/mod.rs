//! Who executes calls: threads of this process or a CUDA kernel, depending on where the
//! communicator works.
//!
//! Invariant: kernels, memory and workspace are there when an op is built. A call with a new `m`
//! makes its program on the host, and nothing else.

mod cuda;
mod device_programs;
mod host;
mod host_programs;
pub(crate) mod kernels;
mod pace;
mod plan;
mod quantize;
mod ranges;
mod recipe;
mod sequential;

use crate::agreement;
use crate::error::{BuildError, CallError};
use crate::operands::Operands;
use crate::spec::OpSpec;
use crate::tensor::{Location, View};
use crate::timeline::{Timeline, TimelineError};
use cuda::CudaExecutor;
use flux_core::Problem;
use flux_core::layout::gather_place_bytes;
use flux_core::program::{Round, TileProgram};
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

/// What ranks compare of a call: the op, its `m`, and how many calls without rows went before.
fn call_number(op: u32, recipe: &Recipe, call: &Call<'_>) -> u32 {
    agreement::call_number(op, recipe.problem.m(), call.empty_calls_before())
}

/// What one rank executes an op with.
#[derive(Debug)]
pub(crate) enum Executor {
    Host(HostExecutor),
    Cuda(CudaExecutor),
}

/// What a mover is given of a call's `x`: a row's elements are as many as the problem says,
/// wherever the rows start.
pub(crate) fn push_of<'p>(x: &View, program: &'p TileProgram) -> flux_transport::RowTransfers<'p> {
    let element_bytes = x.dtype.bytes() as u64;
    let problem = &program.problem;
    flux_transport::RowTransfers {
        x: x.address,
        row_stride: x.row_bytes(),
        row_bytes: problem.gathered_row_bytes(),
        element_bytes,
        rows: problem.shard_rows(program.rank).len() as u64,
        place_bytes: gather_place_bytes(problem),
        full_places: if program.rows.is_flattened() { problem.full_shards() } else { u32::MAX },
        transfers: &program.transfers,
        forwards: &program.forwards,
    }
}

/// What messages carry of a call.
pub(crate) fn rounds_of<'p>(
    x: &View,
    program: &'p TileProgram,
    op: u32,
    rounds: &'p [Round],
    peers: u32,
) -> MessageRounds<'p> {
    let source = if program.problem.op().gathers() {
        Source::Rows(push_of(x, program))
    } else {
        Source::Stored { of_all: program.rows.is_flattened() }
    };
    MessageRounds { source, place_bytes: program.place_bytes(), rounds, peers, op }
}

/// What flight records and errors call a call of the op with this label.
const fn labelled(op: Label, problem: &Problem) -> Label {
    op.with_extents([problem.m(), problem.n(), problem.k()])
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

impl Executor {
    /// Makes everything that calls take, but the workspace. `largest` are the buckets' programs for
    /// their last `m`, in every form that a smaller `m` may take.
    pub(crate) fn new(
        comm: &Communicator,
        largest: &[(Recipe, Resolved)],
        spec: &OpSpec,
    ) -> Result<Self, BuildError> {
        match location(comm) {
            Location::Host => HostExecutor::new(comm, largest, spec).map(Self::Host),
            Location::Cuda(ordinal) => {
                CudaExecutor::new(comm, ordinal, largest, spec).map(Self::Cuda)
            }
        }
    }

    /// Makes one call of the op with this number; on CUDA it returns when the work is on the
    /// stream.
    pub(crate) fn run(
        &self,
        comm: &Communicator,
        recipe: &Recipe,
        op: u32,
        operands: &Operands<View>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        match self {
            Self::Host(host) => host.run(comm, recipe, op, operands, stream),
            Self::Cuda(cuda) => cuda.run(comm, recipe, op, operands, stream),
        }
    }

    /// Makes the call's program, which then stays for good.
    pub(crate) fn prepare(&self, comm: &Communicator, recipe: &Recipe) -> Result<(), CallError> {
        match self {
            Self::Host(host) => host.prepare(comm, recipe),
            Self::Cuda(cuda) => cuda.prepare(comm, recipe),
        }
    }

    /// The last call's time line, when what is on `stream` is done.
    pub(crate) fn timeline(&self, stream: Stream<'_>) -> Result<Timeline, TimelineError> {
        match self {
            Self::Host(host) => host.timeline(),
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
    use crate::spec::LaunchOptions;
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
                matches!(comm.status(), Err(Fault::Aborted { rank, reason: LAUNCH_REFUSED, .. })
                    if rank == ranks[0].rank())
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
        let executor = Executor::new(
            &ranks[0],
            &[(recipe, recipe.resolve(&ranks[0]).unwrap())],
            &OpSpec::new(OpKind::AllGatherGemm, 16, 16, 8, DType::Bf16),
        )
        .unwrap();
        let (x, w, mut y) =
            (vec![bf16::ONE; 8 * 8], vec![bf16::ONE; 8 * 8], vec![bf16::ZERO; 16 * 8]);
        let (x, w) = (
            TensorRef::host(&x, (8, 8)).unwrap().view(),
            TensorRef::host(&w, (8, 8)).unwrap().view(),
        );
        let y = TensorMut::host(&mut y, (16, 8)).unwrap().view();
        let mut operands = Operands::new(x);
        operands.add_weight(w, y);
        let refused = executor.run(&ranks[0], &recipe, 1, &operands, Stream::Host).unwrap_err();
        assert!(
            matches!(refused, CallError::Transport(TransportError::BadTransfer { .. })),
            "{refused}"
        );
        for comm in &ranks {
            assert!(
                matches!(comm.status(), Err(Fault::Aborted { rank, reason: LAUNCH_REFUSED, .. })
                    if rank == ranks[0].rank())
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
