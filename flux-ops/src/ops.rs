//! The two operations as a caller sees them.
//!
//! Invariant: these are names, shapes and documentation; what they do is `FusedOp`.

use crate::error::{BuildError, CallError};
use crate::execute::Push;
use crate::fused::{FusedOp, Request};
use crate::tensor::{TensorMut, TensorRef};
use crate::timeline::{Timeline, TimelineError};
use flux_core::layout::WorkspaceSize;
use flux_core::plan::Plan;
use flux_core::program::{Schedule, Sending};
use flux_core::{OpKind, Problem, WorldSize};
use flux_kernels::{Activation, Element};
use flux_transport::{Communicator, Failure, Fault, Stream};
use std::marker::PhantomData;
use std::path::PathBuf;

/// Options of an op; [`AllGatherGemm::builder`] and [`GemmReduceScatter::builder`] start one.
#[derive(Debug)]
#[must_use = "a builder does nothing until build is called"]
pub struct Builder<Op> {
    request: Request,
    op: PhantomData<fn() -> Op>,
}

impl<Op> Builder<Op> {
    fn new(request: Request) -> Self {
        Self { request, op: PhantomData }
    }

    pub(crate) const fn request(&self) -> &Request {
        &self.request
    }

    /// How the op is executed, in place of the plan table's or the cost model's choice. The same on
    /// every rank.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, Plan};
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let plan: Plan = "tile=128x256x64 k=stream-k".parse()?;
    /// let op = AllGatherGemm::<half::bf16>::builder(512, 1024, 256).plan(plan).build(&comm)?;
    /// assert_eq!(op.plan().tile.to_string(), "128x256x64");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn plan(mut self, plan: Plan) -> Self {
        self.request.plan = Some(plan);
        self
    }

    /// The file of measured plans to look into, in place of the user's (`FLUX_PLAN_TABLE`, else
    /// `flux/plans.csv` in the user's data folder). It may differ between ranks: rank 0's decides.
    pub fn plan_table(mut self, file: impl Into<PathBuf>) -> Self {
        self.request.table = Some(file.into());
        self
    }

    /// How the problem is cut and ordered, in place of the plan's choice. The same on every rank.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.request.schedule = Some(schedule);
        self
    }

    /// When the messages of a call go and to how many peers at once, on transports whose mover they
    /// are, in place of the heuristic's choice. The same on every rank.
    pub fn sending(mut self, sending: Sending) -> Self {
        self.request.sending = Some(sending);
        self
    }

    /// Whether calls add a bias, in place of `false`: they are then made with `forward_with_bias`.
    /// The same on every rank.
    pub fn bias(mut self, bias: bool) -> Self {
        self.request.finish.bias = bias;
        self
    }

    /// Workers on this rank, in place of as many as the device runs at once: CTAs of the kernel, or
    /// threads of the host executor. They may differ between ranks and do not change the result.
    pub fn workers(mut self, workers: u32) -> Self {
        self.request.options.workers = Some(workers);
        self
    }

    /// Who pushes this rank's shard to the others (AllGather-GEMM on CUDA), in place of
    /// [`Push::Auto`]. It may differ between ranks.
    pub fn push(mut self, push: Push) -> Self {
        self.request.options.push = push;
        self
    }

    /// How much of the time that there is the kernel spreads its traffic over, in percent, in place
    /// of 40, or of 0 where all is stored on the rank's own device (`nccl`, `pcie`): 0 sends
    /// everything as soon as it is there, and at 100 a wave's partial tiles are on their way until
    /// the next is finished; more is refused. The result is the same.
    pub fn spread(mut self, percent: u32) -> Self {
        self.request.options.spread = Some(percent);
        self
    }

    /// Whether each call on a GPU leaves its time line, for `timeline()` to read. The kernel that
    /// records is one of its own, compiled at the first use, and a little slower. It may differ
    /// between ranks and does not change the result.
    pub fn trace(mut self, trace: bool) -> Self {
        self.request.options.trace = trace;
        self
    }

    /// What the op will need of a communicator of `world` ranks: the same on all of them, and known
    /// before anything is taken. A communicator holds the largest of its ops, not the sum. Where
    /// messages carry chunks, an op whose schedule is not named may need another size, and as much
    /// again for what is on its way.
    ///
    /// On the host transport the executor of each rank takes memory of its own besides: `w` in
    /// fp32, `[n/W, k]` or `[n, k/W]`, and for each worker the rows of `x` that a tile may be of in
    /// fp32, `[m/W, k]` or `[m/W, k/W]` (all `m` where tiles span shards), and a tile in fp32, but
    /// no larger than those rows of the output.
    ///
    /// # Errors
    /// [`BuildError::Problem`] or [`BuildError::Schedule`], as
    /// [`build`](Builder::<AllGatherGemm<half::bf16>>::build) would find.
    pub fn workspace(&self, world: WorldSize) -> Result<WorkspaceSize, BuildError> {
        self.request.workspace(world)
    }
}

/// `y[m, n/W] = act(gather(x[m/W, k]) * transpose(w[n/W, k]) + bias[n/W])`: each rank gives its
/// rows of `x`, and gets all rows of its columns of `y`. Bias and activation are there where the
/// builder was told so; both are applied in fp32, before the one rounding.
///
/// The column-parallel Linear layer of a tensor-parallel model. `m`, `n` and `k` are global, `W` is
/// the number of ranks; all operands are row-major.
///
/// ```
/// use flux_ops::{AllGatherGemm, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
/// let op = AllGatherGemm::<bf16>::builder(m, n, k).build(&comm)?;
/// let (x, w, mut y) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k], vec![bf16::NAN; m * n]);
/// op.forward(
///     &TensorRef::host(&x, (m, k))?,
///     &TensorRef::host(&w, (n, k))?,
///     &mut TensorMut::host(&mut y, (m, n))?,
///     Stream::Host,
/// )?;
/// assert!(y.iter().all(|&y| y == bf16::from_f32(8.0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AllGatherGemm<T> {
    fused: FusedOp<T>,
}

/// `y[m/W, n] = scatter(sum over ranks of x[m, k/W] * transpose(w[n,
/// k/W]))`: each rank gives all rows of its part of the inner dimension, and gets its rows of the
/// sum.
///
/// The row-parallel Linear layer of a tensor-parallel model. Partial sums travel in the operands'
/// type and are added in fp32, in an order that owner, schedule and nodes fix and no timing changes
/// (`docs/architecture.md`), so the result is the same bits in every run.
///
/// A bias `[n]` is added once, to the fp32 sum, by the rank that owns the row:
/// `y[m/W, n] = scatter(sum) + bias[n]`. There is no activation, because the layers that end in one
/// are column-parallel; what follows a sum in a model is a residual or a norm.
///
/// Used as [`AllGatherGemm`] is.
#[derive(Debug)]
pub struct GemmReduceScatter<T> {
    fused: FusedOp<T>,
}

impl<T: Element> AllGatherGemm<T> {
    /// Starts an op of global extents: `m` and `n` are divisible by the number of ranks, `n/W` and
    /// `k` by 8.
    pub fn builder(m: usize, n: usize, k: usize) -> Builder<Self> {
        Builder::new(Request::new(OpKind::AllGatherGemm, m, n, k, T::DTYPE))
    }

    /// Computes `y` from this rank's `x` and `w`. Collective: every rank makes the same calls in
    /// the same order; one that differs fails on all, with
    /// [`Fault::Disagreed`](flux_transport::Fault::Disagreed), or `Aborted` where another rank has
    /// found it first.
    ///
    /// - `x`: `[m/W, k]`, this rank's rows. `w`: `[n/W, k]`, this rank's columns of the output.
    ///   `y`: `[m, n/W]`, overwritten. Row strides are multiples of 8 elements.
    /// - `stream`: on CUDA, of the communicator's device. The call is put on it and returns:
    ///   nothing is allocated, the host waits for nothing, and the stream may be in capture where
    ///   `comm.capabilities().graphs` says so (nvlink). Calls of one communicator run in the order
    ///   in which they are made, whatever streams they are on. On the host transport the call
    ///   returns when it is done, and blocks its thread until then; on any transport while another
    ///   thread's call is being made.
    ///
    /// # Errors
    /// [`CallError`]: bad operands are refused before anything is launched, and peers wait for a
    /// good call of this rank's, or for its [`Communicator::abort`]. What goes wrong on the device
    /// later is found by [`Self::status`].
    pub fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream>,
    ) -> Result<(), CallError> {
        self.fused.forward(x, w, None, y, stream.into())
    }

    /// As [`Self::forward`], on an op that was built with [`Builder::bias`]:
    /// `y = act(gather(x) * transpose(w) + bias)`.
    ///
    /// - `bias`: `[n/W]`, this rank's columns, as a view of shape `(n/W,)` or `(1, n/W)`. Added to
    ///   every row.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_with_bias(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream>,
    ) -> Result<(), CallError> {
        self.fused.forward(x, w, Some(bias), y, stream.into())
    }

    /// Whether a call made so far is known to have failed; waits for no call. On CUDA, ask when the
    /// stream has come past the call whose `y` is to be read: what that returned is its result only
    /// if this says so. On the host `forward` itself fails.
    ///
    /// # Errors
    /// The fault that broke the communicator: results since then are undefined, every later call is
    /// refused, and it must be rebuilt ([`Communicator::rebuild`]) on every rank. The first to ask
    /// also asks the peers what they do, for little more than 0.25 s at most: see
    /// [`Self::failure`].
    pub fn status(&self) -> Result<(), Fault> {
        self.fused.status()
    }

    /// The time line of the last call, of an op that was built with [`trace`](Builder::trace).
    /// Waits for what is on `stream`, where the calls went.
    ///
    /// # Errors
    /// [`TimelineError`]: the op does not trace, or was not called.
    pub fn timeline(&self, stream: impl Into<Stream>) -> Result<Timeline, TimelineError> {
        self.fused.timeline(stream.into())
    }

    /// The fault that broke the communicator, with what every rank was doing; `None` while it
    /// works.
    pub fn failure(&self) -> Option<&Failure> {
        self.fused.failure()
    }

    /// The same op, with the same options, on another communicator: that which
    /// [`Communicator::rebuild`] has made. Collective there. This one is of no more use, and is
    /// best dropped. With fewer ranks each has larger shards and maybe another number: the caller
    /// shards its operands anew, as [`problem`](Self::problem) says, from where the lost rank's are
    /// still to be had.
    ///
    /// # Errors
    /// [`BuildError`], as `build`: the extents may not divide by the number of survivors.
    pub fn rebuild(&self, comm: &Communicator) -> Result<Self, BuildError> {
        Ok(Self { fused: self.fused.rebuild(comm)? })
    }

    /// The problem: shapes of every operand on one rank.
    pub const fn problem(&self) -> &Problem {
        self.fused.problem()
    }

    /// Who works, in words.
    pub fn executor(&self) -> String {
        self.fused.executor()
    }

    /// The plan in use, in its canonical form.
    pub const fn plan(&self) -> &Plan {
        self.fused.plan()
    }

    /// The schedule in use.
    pub const fn schedule(&self) -> &Schedule {
        self.fused.schedule()
    }

    /// What the op needs of the communicator's workspace.
    pub const fn workspace(&self) -> WorkspaceSize {
        self.fused.workspace()
    }

    /// The plan, the executor, the workspace and the transport, for people.
    pub fn explain(&self) -> String {
        self.fused.explain()
    }
}

impl<T: Element> GemmReduceScatter<T> {
    /// Starts an op of global extents: `m` and `k` are divisible by the number of ranks, `n` and
    /// `k/W` by 8.
    pub fn builder(m: usize, n: usize, k: usize) -> Builder<Self> {
        Builder::new(Request::new(OpKind::GemmReduceScatter, m, n, k, T::DTYPE))
    }

    /// Computes this rank's rows of the sum over all ranks. Collective: every rank makes the same
    /// calls in the same order; one that differs fails on all, with
    /// [`Fault::Disagreed`](flux_transport::Fault::Disagreed), or `Aborted` where another rank has
    /// found it first.
    ///
    /// - `x`: `[m, k/W]`. `w`: `[n, k/W]`. `y`: `[m/W, n]`, overwritten. Row strides are multiples
    ///   of 8 elements.
    /// - `stream`: as for [`AllGatherGemm::forward`].
    ///
    /// # Errors
    /// As [`AllGatherGemm::forward`].
    pub fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream>,
    ) -> Result<(), CallError> {
        self.fused.forward(x, w, None, y, stream.into())
    }

    /// As [`Self::forward`], on an op that was built with [`Builder::bias`]:
    /// `y = scatter(sum x * transpose(w)) + bias`.
    ///
    /// - `bias`: `[n]`, the whole and the same on every rank, as a view of shape `(n,)` or
    ///   `(1, n)`. Each rank adds it to its own rows of the sum, so it is in the result once.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_with_bias(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream>,
    ) -> Result<(), CallError> {
        self.fused.forward(x, w, Some(bias), y, stream.into())
    }

    /// Whether a call made so far is known to have failed; see [`AllGatherGemm::status`].
    ///
    /// # Errors
    /// The fault that broke the communicator.
    pub fn status(&self) -> Result<(), Fault> {
        self.fused.status()
    }

    /// The time line of the last call; see [`AllGatherGemm::timeline`].
    ///
    /// # Errors
    /// As there.
    pub fn timeline(&self, stream: impl Into<Stream>) -> Result<Timeline, TimelineError> {
        self.fused.timeline(stream.into())
    }

    /// The fault that broke the communicator, with what every rank was doing; `None` while it
    /// works.
    pub fn failure(&self) -> Option<&Failure> {
        self.fused.failure()
    }

    /// The same op, with the same options, on another communicator: that which
    /// [`Communicator::rebuild`] has made. Collective there. This one is of no more use, and is
    /// best dropped. With fewer ranks each has larger shards and maybe another number: the caller
    /// shards its operands anew, as [`problem`](Self::problem) says, from where the lost rank's are
    /// still to be had.
    ///
    /// # Errors
    /// [`BuildError`], as `build`: the extents may not divide by the number of survivors.
    pub fn rebuild(&self, comm: &Communicator) -> Result<Self, BuildError> {
        Ok(Self { fused: self.fused.rebuild(comm)? })
    }

    /// The problem: shapes of every operand on one rank.
    pub const fn problem(&self) -> &Problem {
        self.fused.problem()
    }

    /// Who works, in words.
    pub fn executor(&self) -> String {
        self.fused.executor()
    }

    /// The plan in use, in its canonical form.
    pub const fn plan(&self) -> &Plan {
        self.fused.plan()
    }

    /// The schedule in use.
    pub const fn schedule(&self) -> &Schedule {
        self.fused.schedule()
    }

    /// What the op needs of the communicator's workspace.
    pub const fn workspace(&self) -> WorkspaceSize {
        self.fused.workspace()
    }

    /// The plan, the executor, the workspace and the transport, for people.
    pub fn explain(&self) -> String {
        self.fused.explain()
    }
}

impl<T: Element> Builder<AllGatherGemm<T>> {
    /// What is applied to each element after the bias, in place of [`Activation::None`]. The same
    /// on every rank.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.request.finish.activation = activation;
        self
    }

    /// Builds the op; collective, between the same calls on every rank, and drains what was
    /// launched on `comm` before: another thread of a rank must not be in a call meanwhile, as that
    /// call may wait for a peer that builds. Blocks its thread until all ranks have come:
    /// asynchronous programs call it on one that may block (`spawn_blocking`).
    ///
    /// On CUDA, build all ops before the first graph is captured: growing the workspace moves it,
    /// and a captured call does not follow. An op outlives the graphs that its calls were captured
    /// in: it frees what their kernels read when it is dropped, or replaced by what `rebuild`
    /// returns, and knows of no replay.
    ///
    /// # Errors
    /// [`BuildError`]. Where all ranks build, every rank has then left the build with an error, and
    /// `comm` can be used unless it is [`BuildError::Transport`]. A rank that builds alone waits
    /// for the others until the deadline of `comm`, and the ranks are out of step from then on:
    /// rebuild `comm`. One whose peers are at another step of theirs, as [`Communicator::exchange`]
    /// or [`Communicator::barrier`], is told at which.
    pub fn build(self, comm: &Communicator) -> Result<AllGatherGemm<T>, BuildError> {
        Ok(AllGatherGemm { fused: FusedOp::build(self.request, comm)? })
    }
}

impl<T: Element> Builder<GemmReduceScatter<T>> {
    /// Builds the op; as [`AllGatherGemm`]'s.
    ///
    /// # Errors
    /// [`BuildError`], as there.
    pub fn build(self, comm: &Communicator) -> Result<GemmReduceScatter<T>, BuildError> {
        Ok(GemmReduceScatter { fused: FusedOp::build(self.request, comm)? })
    }
}
