//! The ops as a caller sees them.
//!
//! Invariant: an op exists only when every rank of the communicator has built the same one, and the
//! communicator's workspace holds it.

pub(crate) mod agreement;
mod builder;
mod epilogue;
mod kind;
mod operands;
mod request;

pub use builder::Builder;
pub(crate) use epilogue::EpilogueSpec;
pub(crate) use kind::OpMarker;
pub(crate) use operands::Operands;
pub(crate) use request::Request;

use crate::error::{BuildError, CallError};
use crate::execute::{Execution, Executor, location};
use crate::tensor::{TensorMut, TensorRef};
use crate::timeline::{Timeline, TimelineError};
use flux_core::Problem;
use flux_core::layout::WorkspaceSize;
use flux_core::plan::{Plan, PlanOrigin};
use flux_kernels::Element;
use flux_transport::{Communicator, Failure, Fault, Stream};
use std::marker::PhantomData;

/// `y = act(gather(x) * transpose(w) + bias)`: the column-parallel linear layer of a tensor-parallel
/// model, with rows of `x` split over the ranks.
///
/// Each rank gives its rows `x[m_r, k]` and gets all rows of its columns `y[m, n/W]`. Bias and
/// activation are applied in fp32, before the one rounding.
///
/// ```
/// use flux_ops::{AllGatherGemm, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
/// let op = AllGatherGemm::<bf16>::builder(m, n, k).build(&comm)?;
///
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
pub type AllGatherGemm<T> = FusedLinear<kind::AllGather, T>;

/// `y = scatter(sum over ranks of x * transpose(w)) + bias`: the row-parallel linear layer of a
/// tensor-parallel model, with rows of `y` split over the ranks.
///
/// Each rank gives all rows of its part of the inner dimension, `x[m, k/W]`, and gets its rows
/// `y[m_r, n]` of the sum. Partial sums travel in the operands' type and are added in fp32. The plan
/// and the nodes fix the order, so every run has the same bits. There is no activation.
///
/// ```
/// use flux_ops::{GemmReduceScatter, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let rank = |world: World| {
///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
///     let op = GemmReduceScatter::<bf16>::builder(m, n, 2 * k).build(&comm)?;
///
///     let (x, w) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k]);
///     let mut y = vec![bf16::NAN; m / 2 * n];
///     op.forward(
///         &TensorRef::host(&x, (m, k))?,
///         &TensorRef::host(&w, (n, k))?,
///         &mut TensorMut::host(&mut y, (m / 2, n))?,
///         Stream::Host,
///     )?;
///
///     // 8 from each of 2 ranks.
///     assert!(y.iter().all(|&y| y == bf16::from_f32(16.0)));
///     Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// };
///
/// std::thread::scope(|scope| {
///     let spawn = |world| scope.spawn(move || rank(world));
///     let ranks: Vec<_> = World::local(2)?.into_iter().map(spawn).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().expect("no assertion fails"))
/// })?;
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub type GemmReduceScatter<T> = FusedLinear<kind::ReduceScatter, T>;

/// `y = sum over ranks of x * transpose(w) + bias`: the row-parallel linear layer of a
/// tensor-parallel model whose activations are replicated, as in serving.
///
/// Each rank gives all rows of its part of the inner dimension, `x[m, k/W]`, and gets the whole sum
/// `y[m, n]`: the same bits on every rank and in every run. Partial sums travel in the operands' type
/// and are added in rank order in fp32. There is no activation. A library's collective
/// (`comm=sequential`) adds in its own order and type.
///
/// ```
/// use flux_ops::{GemmAllReduce, TensorMut, TensorRef};
/// use flux_transport::{Communicator, Select, Stream, World};
/// use half::bf16;
///
/// let (m, n, k) = (4, 16, 8);
/// let rank = |world: World| {
///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
///     let op = GemmAllReduce::<bf16>::builder(m, n, 2 * k).build(&comm)?;
///
///     let (x, w, mut y) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k], vec![bf16::NAN; m * n]);
///     op.forward(
///         &TensorRef::host(&x, (m, k))?,
///         &TensorRef::host(&w, (n, k))?,
///         &mut TensorMut::host(&mut y, (m, n))?,
///         Stream::Host,
///     )?;
///
///     // 8 from each of 2 ranks.
///     assert!(y.iter().all(|&y| y == bf16::from_f32(16.0)));
///     Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// };
///
/// std::thread::scope(|scope| {
///     let spawn = |world| scope.spawn(move || rank(world));
///     let ranks: Vec<_> = World::local(2)?.into_iter().map(spawn).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().expect("no assertion fails"))
/// })?;
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub type GemmAllReduce<T> = FusedLinear<kind::AllReduce, T>;

/// One rank's part of a fused linear layer: an [`AllGatherGemm`], a [`GemmReduceScatter`] or a
/// [`GemmAllReduce`].
///
/// `m` tokens, `n` output features and the inner extent `k` are global, `W` is the number of ranks.
/// Rank `r` has `m_r` rows: [`Problem::shard_rows`], as PyTorch's `tensor_split` cuts them. All
/// operands are row-major:
///
/// | op | `x` | `w` | bias | `y` |
/// |---|---|---|---|---|
/// | [`AllGatherGemm`] | `[m_r, k]` | `[n/W, k]` | `[n/W]`, the rank's columns | `[m, n/W]` |
/// | [`GemmReduceScatter`] | `[m, k/W]` | `[n, k/W]` | `[n]`, the same on every rank | `[m_r, n]` |
/// | [`GemmAllReduce`] | `[m, k/W]` | `[n, k/W]` | `[n]`, the same on every rank | `[m, n]` |
///
/// An op outlives the graphs that its calls were captured in: their kernels read memory that it
/// frees when it is dropped.
#[derive(Debug)]
pub struct FusedLinear<K, T> {
    comm: Communicator,
    request: Request,
    problem: Problem,
    plan: Plan,
    origin: PlanOrigin,
    workspace: WorkspaceSize,
    executor: Executor<T>,
    kind: PhantomData<fn() -> K>,
}

impl<K: OpMarker, T: Element> FusedLinear<K, T> {
    /// Starts an op of global extents, of any `m`. Of an AllGather-GEMM `n/W` and `k` are multiples
    /// of 8, of the other ops `n` and `k/W`.
    pub fn builder(m: usize, n: usize, k: usize) -> Builder<Self> {
        Builder::new(Request::new(K::OP, m, n, k, T::DTYPE))
    }

    /// Computes `y`, which is overwritten. Collective: every rank makes the same calls in the same
    /// order.
    ///
    /// - `x`, `w`, `y`: shapes as [above](Self). Row strides are multiples of 8 elements.
    /// - `stream`: of the communicator's device. On CUDA the call is put on it and returns: it
    ///   allocates nothing and waits for nothing. The stream may be in capture where
    ///   `comm.capabilities().graphs` says so. Calls of one communicator run in the order in which
    ///   they are made, on whatever streams. On the host the call returns when `y` is written.
    ///
    /// # Errors
    /// [`CallError`]. Bad operands are refused before anything is launched; peers wait until this
    /// rank makes a good call or [aborts](Communicator::abort). Ranks that make different calls all
    /// fail, with [`Fault::Disagreed`] or [`Fault::Aborted`]. [`status`](Self::status) finds what
    /// goes wrong on the device later.
    pub fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream>,
    ) -> Result<(), CallError> {
        self.call(x, w, None, y, stream.into())
    }

    /// As [`forward`](Self::forward), of an op built with [`Builder::bias`]: the bias is added once
    /// to every row of the result.
    ///
    /// - `bias`: a view of shape `(cols,)` or `(1, cols)` for the columns of `y`.
    ///
    /// ```
    /// use flux_ops::{Activation, AllGatherGemm, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let builder = AllGatherGemm::<bf16>::builder(m, n, k).bias(true);
    /// let op = builder.activation(Activation::Relu).build(&comm)?;
    ///
    /// let (x, w, mut y) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k], vec![bf16::NAN; m * n]);
    /// let bias: Vec<_> = (0..n).map(|column| bf16::from_f32(-(column as f32))).collect();
    /// op.forward_with_bias(
    ///     &TensorRef::host(&x, (m, k))?,
    ///     &TensorRef::host(&w, (n, k))?,
    ///     &TensorRef::host(&bias, (n,))?,
    ///     &mut TensorMut::host(&mut y, (m, n))?,
    ///     Stream::Host,
    /// )?;
    /// assert_eq!(y[..n].iter().map(|y| y.to_f32()).sum::<f32>(), 36.0, "8, 7, ..., 1, 0, 0, ...");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_with_bias(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream>,
    ) -> Result<(), CallError> {
        self.call(x, w, Some(bias), y, stream.into())
    }

    fn call(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: Option<&TensorRef<'_, T>>,
        y: &mut TensorMut<'_, T>,
        stream: Stream,
    ) -> Result<(), CallError> {
        let operands = Operands { x: x.view(), w: w.view(), bias: bias.map(TensorRef::view), y: y.view() };
        operands.check::<T>(&self.problem, self.comm.rank(), self.request.epilogue, location(&self.comm))?;
        if let Some(stream) = stream.raw() {
            operands.check_stream(stream)?;
        }
        self.executor.run(&self.comm, &operands, stream)
    }

    /// Whether a call is known to have failed; waits for no call.
    ///
    /// On CUDA, ask when the stream has come past the call whose `y` is to be read. On the host
    /// [`forward`](Self::forward) itself fails.
    ///
    /// # Errors
    /// The fault that broke the communicator: results are undefined and every later call is refused
    /// until all ranks [rebuild](Communicator::rebuild) it. The first to ask also asks the peers
    /// what they do, for some 0.25 s at most; [`failure`](Self::failure) has the answers.
    pub fn status(&self) -> Result<(), Fault> {
        self.comm.status()
    }

    /// The fault that broke the communicator, with what every rank was doing; `None` while it
    /// works.
    pub fn failure(&self) -> Option<&Failure> {
        self.comm.failure()
    }

    /// The last call's time line, of an op built with [`Builder::trace`]. Waits for what is on
    /// `stream`, where the calls went.
    ///
    /// # Errors
    /// [`TimelineError`]: the op does not trace, or was not called.
    pub fn timeline(&self, stream: impl Into<Stream>) -> Result<Timeline, TimelineError> {
        self.executor.timeline(stream.into())
    }

    /// The same op, with the same options, on the communicator that [`Communicator::rebuild`] has
    /// made. Collective there.
    ///
    /// With fewer ranks each has larger shards: the caller shards its operands anew, as
    /// [`problem`](Self::problem) says.
    ///
    /// # Errors
    /// [`BuildError`], as `build`: the extents may not divide by the number of survivors.
    pub fn rebuild(&self, comm: &Communicator) -> Result<Self, BuildError> {
        Self::build(self.request.clone(), comm)
    }

    /// The problem: shapes of every operand on one rank.
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The plan in use, in its canonical form.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the op needs of the communicator's workspace.
    pub const fn workspace(&self) -> WorkspaceSize {
        self.workspace
    }

    /// How this rank executes the plan, for people.
    pub fn execution(&self) -> Execution {
        self.executor.execution()
    }

    /// The plan and its origin, the executor, the workspace and the transport, for people.
    pub fn explain(&self) -> String {
        let Self { comm, request, problem, plan, origin, workspace, .. } = self;
        format!(
            "{problem}, {}, rank {} of {}\n  plan: {plan} ({origin})\n  executor: {}\n  workspace: {} bytes of the communicator's {}\n  {}",
            request.epilogue,
            comm.rank(),
            problem.world(),
            self.executor.execution(),
            workspace.total_bytes(),
            comm.workspace_size().total_bytes(),
            comm.explain().replace('\n', "\n  "),
        )
    }
}

impl<K: OpMarker, T: Element> FusedLinear<K, T> {
    /// Collective: agrees with the other ranks, prepares the executor, then grows the workspace.
    pub(crate) fn build(request: Request, comm: &Communicator) -> Result<Self, BuildError> {
        // Before anything can fail on one rank alone, so that the others do not wait for it. It
        // also drains earlier launches on all ranks, which loading a module may wait for.
        let name = request.name();
        let own = request.choice(comm);
        comm.note("plan table", request.user_table().explain(comm.device().name()));
        let of_rank_0 = agreement::same_request(comm, &name, &request.to_string(), own.as_ref().ok().copied())?;
        let op = own.and_then(|own| {
            let choice = of_rank_0.unwrap_or(own);
            let resolved = request.resolve(comm, choice)?;
            let (problem, plan, workspace) = (resolved.problem, resolved.plan, resolved.workspace());
            let executor = Executor::prepare(comm, resolved.execution, request.epilogue.activation)?;
            Ok(Self { comm: comm.clone(), request, problem, plan, origin: choice.origin, workspace, executor, kind: PhantomData })
        });
        let op = agreement::all_ready(comm, &name, op)?;
        comm.reserve(op.workspace).map_err(agreement::while_building(&name))?;
        tracing::debug!(rank = %comm.rank(), "{}", op.explain());
        Ok(op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::TileShape;
    use flux_core::plan::KSplit;
    use flux_transport::{Select, World};
    use half::bf16;

    #[test]
    fn an_op_says_its_plan_in_canonical_form_and_where_it_comes_from() {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
        let plan = |plan: Option<Plan>| {
            let builder = AllGatherGemm::<bf16>::builder(16, 16, 128);
            let builder = if let Some(plan) = plan { builder.plan(plan) } else { builder };
            let op = builder.build(&comm).unwrap();
            op.explain().lines().find_map(|line| line.strip_prefix("  plan: ")).unwrap().to_owned()
        };
        let fine = Plan::of(TileShape::new(16, 16, 64));
        assert_eq!(plan(Some(fine)), format!("{fine} (named by the caller)"));
        let asked = Plan { k: KSplit::SplitK(9), ..fine };
        assert_eq!(plan(Some(asked)), format!("{} (named by the caller)", Plan { k: KSplit::SplitK(2), ..fine }));
        assert!(plan(None).ends_with(" (by the cost model)"));
    }
}
