//! The ops as a caller sees them.
//!
//! Invariant: an op exists only when every rank of the communicator has built the same one. The
//! communicator's workspace, its kernels and the plans suffice for every `m` of the op.

mod builder;
mod gathered;
mod inspect;
pub(crate) mod kind;
mod request;
mod several;

pub use builder::Builder;
pub(crate) use kind::OpMarker;
pub(crate) use request::Request;
pub use several::WeightOperands;

use crate::agreement;
use crate::epilogue::{EpilogueArgs, Residual};
use crate::error::{BuildError, CallError};
use crate::execute::{Executor, Planned, Recipe, location};
use crate::operands::Operands;
use crate::planning::{self, Buckets};
use crate::tensor::{TensorMut, TensorRef};
use crate::timeline::{Timeline, TimelineError};
use flux_core::Problem;
use flux_core::layout::WorkspaceSize;
use flux_core::problem::MAX_WEIGHTS;
use flux_kernels::{Element, KernelTarget};
use flux_transport::{Communicator, Failure, Fault, Stream};
use std::marker::PhantomData;

/// `y = act(gather(x) * transpose(w) + bias)`: the column-parallel linear layer of a
/// tensor-parallel model, with rows of `x` split over the ranks.
///
/// Each rank gives its rows `x[m_r, k]` and gets all rows of its columns `y[m, n_r]`, or with
/// [gates](Builder::gated) `y[m, n_r/2]`. Bias, activation and gates are applied in fp32, before
/// the one rounding.
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
/// Each rank gives all rows of its part of the inner dimension, `x[m, k_r]`, and gets its rows
/// `y[m_r, n]` of the sum. Partial sums travel in the operands' type and are added in fp32. The
/// plan and the nodes fix the order, so every run has the same bits. There is no activation.
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
/// Each rank gives all rows of its part of the inner dimension, `x[m, k_r]`, and gets the whole sum
/// `y[m, n]`: the same bits on every rank and in every run. Partial sums travel in the operands'
/// type and are added in rank order in fp32. There is no activation. A library's collective
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
/// Rank `r` has `m_r` rows: [`rows`](Self::rows), as PyTorch's `tensor_split` cuts them. It has
/// `n_r` [`columns`](Self::columns) or `k_r` [`inner`](Self::inner) elements: groups of 8 are split
/// likewise. All operands are row-major:
///
/// | op | `x` | `w` | bias | `y` |
/// |---|---|---|---|---|
/// | [`AllGatherGemm`] | `[m_r, k]` | `[n_r, k]` | `[n_r]`, the rank's columns | `[m, n_r]` |
/// | [`GemmReduceScatter`] | `[m, k_r]` | `[n, k_r]` | `[n]`, the same on every rank | `[m_r, n]` |
/// | [`GemmAllReduce`] | `[m, k_r]` | `[n, k_r]` | `[n]`, the same on every rank | `[m, n]` |
///
/// With gates `y` is `[m, n_r/2]`. With [`WeightLayout::Kn`](crate::WeightLayout) `w` is the
/// transpose.
///
/// An op is built for at most `max_m` rows. Each call takes its `m` from its operands, 0 to
/// `max_m`, the same on every rank; another `m` costs no exchange, allocation or wait. Without rows
/// there is nothing to do, but every rank makes the call.
///
/// An op holds no weights: one op serves every layer with its `n`, `k`, element type and options.
///
/// Ops of a communicator share their programs and buffers ([`Communicator::memory`]). It outlives
/// the graphs that calls were captured in, whose kernels read that memory: [`Builder::captures`].
#[derive(Debug)]
pub struct FusedLinear<K, T> {
    // Before the communicator, which outlives what its ops share.
    executor: Executor<T>,
    comm: Communicator,
    request: Request,
    /// With the most rows.
    largest: Problem,
    buckets: Buckets,
    /// By which ranks compare the op.
    number: u32,
    workspace: WorkspaceSize,
    kind: PhantomData<fn() -> K>,
}

impl<K: OpMarker, T: Element> FusedLinear<K, T> {
    /// Starts an op of global extents, for calls with at most `max_m` rows. `n` and `k` are
    /// multiples of 8, and what is split is at least 8 for each rank.
    pub fn builder(max_m: usize, n: usize, k: usize) -> Builder<Self> {
        Builder::new(Request::new(K::OP, max_m, n, k, T::DTYPE))
    }

    /// Computes `y`, which is overwritten. Collective: every rank makes the same calls in the same
    /// order.
    ///
    /// - `x`, `w`, `y`: shapes as [above](Self), of one `m`. Row strides are multiples of 8
    ///   elements.
    /// - `stream`: of the communicator's device. On CUDA the call is put on it and returns: it
    ///   allocates no device memory and waits for nothing. The stream may be in capture where
    ///   [`Builder::captures`] allows it, if this `m` was [prepared](Self::prepare) or called
    ///   before. Calls of one communicator run in the order in which they are made, on whatever
    ///   streams. On the host the call returns when `y` is written.
    ///
    /// # Errors
    /// [`CallError`]. Bad operands are refused before anything is launched; peers wait until this
    /// rank makes a good call or [aborts](Communicator::abort). Ranks that make different calls all
    /// fail, with [`Fault::Disagreed`] or [`Fault::Aborted`]. [`status`](Self::status) finds what
    /// goes wrong on the device later.
    pub fn forward<'s>(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        self.forward_with(x, w, EpilogueArgs::new(), y, stream)
    }

    /// As [`forward`](Self::forward), of an op built with options that bring operands.
    ///
    /// ```
    /// use flux_ops::{Activation, AllGatherGemm, EpilogueArgs, TensorMut, TensorRef};
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
    /// op.forward_with(
    ///     &TensorRef::host(&x, (m, k))?,
    ///     &TensorRef::host(&w, (n, k))?,
    ///     EpilogueArgs::new().bias(&TensorRef::host(&bias, (n,))?),
    ///     &mut TensorMut::host(&mut y, (m, n))?,
    ///     Stream::Host,
    /// )?;
    /// assert_eq!(y[..n].iter().map(|y| y.to_f32()).sum::<f32>(), 36.0, "8, 7, ..., 1, 0, 0, ...");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    #[expect(clippy::needless_pass_by_value, reason = "the borrows of a call end with it")]
    pub fn forward_with<'s>(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        epilogue: EpilogueArgs<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        self.call((x, w), &epilogue, y, None, stream.into())
    }

    /// A call that hands out the gathered rows, where there is a place for them.
    pub(crate) fn call(
        &self,
        (x, w): (&TensorRef<'_, T>, &TensorRef<'_, T>),
        epilogue: &EpilogueArgs<'_, T>,
        y: &mut TensorMut<'_, T>,
        x_full: Option<&mut TensorMut<'_, T>>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let y = y.view();
        let EpilogueArgs { bias, residual, norm, memory: _ } = *epilogue;
        let residual = residual.map(|residual| match residual {
            Residual::Given(view) => view,
            Residual::InY => y,
        });
        let more = [None; MAX_WEIGHTS - 1];
        let operands = Operands {
            x: x.view(),
            w: w.view(),
            bias,
            residual,
            y,
            norm,
            x_full: x_full.map(|rows| rows.view()),
            more,
        };
        self.call_with(&operands, stream)
    }

    /// A call with these operands, which are checked.
    pub(crate) fn call_with(
        &self,
        operands: &Operands,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let m = operands.rows(K::OP);
        let problem = if m == 0 { self.largest } else { self.problem(m)? };
        operands.check::<T>(
            (&problem, self.comm.rank(), m),
            (self.request.epilogue, self.request.weights),
            location(&self.comm),
        )?;
        if let Some(stream) = stream.raw() {
            operands.check_stream(stream)?;
        }
        if m == 0 {
            return Ok(self.comm.empty_call(stream)?);
        }
        self.executor.run(&self.comm, &self.planned(problem), operands, stream)
    }

    /// What is known of calls of `problem`.
    fn planned(&self, problem: Problem) -> Planned {
        Planned { recipe: self.recipe(problem), number: self.number }
    }

    fn recipe(&self, problem: Problem) -> Recipe {
        Recipe::new(problem, self.buckets.get(problem.m()), self.request.launch)
    }

    /// Makes the programs of these `m` and puts them on the device, where they stay for good: such
    /// calls can be captured in a graph. Not collective; waits for this rank's calls. Before a
    /// capture begins.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, bf16};
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let op = AllGatherGemm::<bf16>::builder(512, 1024, 256).build(&comm)?;
    /// op.prepare(&[1, 2, 4, 8])?;
    /// assert!(op.prepare(&[513]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`CallError`]: too many rows, or no room for a program.
    pub fn prepare(&self, rows: &[usize]) -> Result<(), CallError> {
        let problems = rows
            .iter()
            .filter(|&&m| m > 0)
            .map(|&m| self.problem(m))
            .collect::<Result<Vec<_>, _>>()?;
        problems
            .into_iter()
            .try_for_each(|problem| self.executor.prepare(&self.comm, &self.planned(problem)))
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
    pub fn timeline<'s>(&self, stream: impl Into<Stream<'s>>) -> Result<Timeline, TimelineError> {
        self.executor.timeline(stream.into())
    }

    /// The same op, with the same options, on the communicator that [`Communicator::rebuild`] has
    /// made. Collective there.
    ///
    /// With fewer ranks each has larger shards: the caller shards its operands anew, as
    /// [`rows`](Self::rows), [`columns`](Self::columns) and [`inner`](Self::inner) say.
    ///
    /// # Errors
    /// [`BuildError`], as `build`.
    pub fn rebuild(&self, comm: &Communicator) -> Result<Self, BuildError> {
        Self::build(self.request.clone(), comm)
    }

    /// Collective: agrees with the other ranks, prepares the executor, then grows the workspace.
    pub(crate) fn build(request: Request, comm: &Communicator) -> Result<Self, BuildError> {
        // Before anything can fail on one rank alone, so that the others do not wait for it. It
        // also drains earlier launches on all ranks, which loading a module may wait for.
        let name = request.name();
        // Rank 0's plans hold: others need none of their own.
        let own = if comm.rank().get() == 0 { request.choices(comm).map(Some) } else { Ok(None) };
        let compute = comm.device().info().map(|info| info.compute);
        comm.note(
            "plan table",
            request.user_table().explain(comm.device().name(), planning::generation(compute)),
        );
        if let Some(compute) = compute {
            comm.note(
                "kernel",
                KernelTarget::explain(compute).unwrap_or_else(|none| none.to_string()),
            );
        }
        let of_rank_0 = agreement::same_request(
            comm,
            &name,
            &request.to_string(),
            own.as_ref().ok().and_then(Option::as_ref),
        )?;
        let op = own.and_then(|_| {
            request.epilogue.check(
                &request.largest(comm)?,
                request.weights,
                request.plan.as_ref(),
            )?;
            let buckets = of_rank_0.map_or_else(|| request.choices(comm), Ok)?;
            let resolved = request.resolve(comm, &buckets)?;
            let number = agreement::number(&request.to_string(), &buckets);
            let (largest, workspace) = (request.largest(comm)?, request::workspace(&resolved));
            request.check_workspace(workspace)?;
            let executor = agreement::working(comm, &name, || {
                Executor::new(comm, &resolved, (request.epilogue, request.weights))
            })??;
            Ok(Self {
                executor,
                comm: comm.clone(),
                request,
                largest,
                buckets,
                number,
                workspace,
                kind: PhantomData,
            })
        });
        let op = agreement::all_ready(comm, &name, op)?;
        comm.reserve(op.workspace).map_err(agreement::while_building(&name))?;
        tracing::debug!(rank = %comm.rank(), "{}", op.explain());
        Ok(op)
    }
}
