//! The ops as a caller sees them.
//!
//! Invariant: an op exists only when every rank of the communicator has built the same one. The
//! communicator's workspace, its kernels and the plans suffice for every `m` of the op.

mod builder;
mod call;
mod inspect;
mod kind;
mod request;
mod typed;

pub use builder::Builder;
pub use call::Call;
pub use typed::{AllGatherGemm, GemmAllReduce, GemmReduceScatter, TypedLinear};

use crate::agreement;
use crate::error::{BuildError, CallError};
use crate::execute::{Executor, Recipe, location};
use crate::operands::Operands;
use crate::planning::{self, Buckets};
use crate::spec::OpSpec;
use crate::tensor::{RawTensor, TensorMut, TensorRef, View};
use crate::timeline::{Timeline, TimelineError};
use flux_core::Problem;
use flux_core::layout::WorkspaceSize;
use flux_kernels::{Element, KernelTarget};
use flux_transport::{Communicator, Failure, Fault, Stream};

/// One rank's part of a fused linear layer: an [`AllGatherGemm`], a [`GemmReduceScatter`] or a
/// [`GemmAllReduce`].
///
/// `m` tokens, `n` output features and the inner extent `k` are global, `W` is the number of ranks.
/// Rank `r` has `m_r` rows: [`rows`](Self::rows), as PyTorch's `tensor_split` cuts them. It has
/// `n_r` [`columns`](Self::columns) or `k_r` [`inner`](Self::inner) elements: groups of 8 are split
/// likewise, of e4m3 operands groups of 16, with scales of blocks of 128. All operands are
/// row-major:
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
pub struct FusedLinear {
    // Before the communicator, which outlives what its ops share.
    executor: Executor,
    comm: Communicator,
    spec: OpSpec,
    /// With the most rows.
    largest: Problem,
    buckets: Buckets,
    /// By which ranks compare the op.
    number: u32,
    workspace: WorkspaceSize,
}

impl FusedLinear {
    /// Computes `y`, which is overwritten. Collective: every rank makes the same calls in the same
    /// order.
    ///
    /// - `x`, `w`, `y`: shapes as [above](Self), of one `m`. Rows begin at multiples of
    ///   16 bytes.
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
    pub fn forward<'s, X: Element, Y: Element>(
        &self,
        x: &TensorRef<'_, X>,
        w: &TensorRef<'_, X>,
        y: &mut TensorMut<'_, Y>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        self.call(x).weight(w, y).on(stream)
    }

    /// Begins a call whose operands are named one by one, of any options that the op was built
    /// with: `op.call(&x).weight(&w, &mut y).on(stream)`.
    pub fn call<'a, X: Element, Y: Element>(&'a self, x: &'a TensorRef<'_, X>) -> Call<'a, X, Y> {
        Call::new(self, x.view())
    }

    /// A call with operands that another framework describes. Otherwise as
    /// [`forward`](Self::forward).
    ///
    /// # Safety
    /// The operands are as [`TensorRef::from_raw`] and [`TensorMut::from_raw`] ask. A residual in
    /// the place of `y` is written with it.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and [`CallError::View`] for a description of no operand.
    pub unsafe fn run<'s>(
        &self,
        operands: &Operands<RawTensor>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        self.run_checked(&operands.views()?, stream.into())
    }

    /// Makes a call with these operands, which are checked.
    fn run_checked(&self, operands: &Operands<View>, stream: Stream<'_>) -> Result<(), CallError> {
        let m = operands.rows(self.spec.kind);
        let problem = if m == 0 { self.largest } else { self.problem(m)? };
        operands.check(&self.spec, &problem, self.comm.rank(), m, location(&self.comm))?;
        if let Some(stream) = stream.raw() {
            operands.check_stream(stream)?;
        }
        if m == 0 {
            return Ok(self.comm.empty_call(stream)?);
        }
        self.executor.run(&self.comm, &self.recipe(problem), self.number, operands, stream)
    }

    fn recipe(&self, problem: Problem) -> Recipe {
        Recipe::new(problem, self.buckets.get(problem.m()), self.spec.launch)
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
            .try_for_each(|problem| self.executor.prepare(&self.comm, &self.recipe(problem)))
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
        Self::build(self.spec.clone(), comm)
    }

    /// Builds an op of any kind and element types: what [`Builder::build`] does for those that are
    /// known when the program is compiled. Collective, as that.
    ///
    /// # Errors
    /// As [`Builder::build`], and [`BuildError::Option`] for an option that the kind does not have.
    pub fn build(spec: OpSpec, comm: &Communicator) -> Result<Self, BuildError> {
        spec.check_kind()?;
        // Before anything can fail on one rank alone, so that the others do not wait for it. It
        // also drains earlier launches on all ranks, which loading a module may wait for.
        let (name, agreed) = (spec.name(), spec.agreement());
        // Rank 0's plans hold: others need none of their own.
        let own = if comm.rank().get() == 0 { spec.choices(comm).map(Some) } else { Ok(None) };
        let compute = comm.device().info().map(|info| info.compute);
        comm.note(
            "plan table",
            spec.user_table().explain(comm.device().name(), planning::generation(compute)),
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
            &agreed,
            own.as_ref().ok().and_then(Option::as_ref),
        )?;
        let op = own.and_then(|_| {
            let largest = spec.largest(comm.world_size())?;
            spec.check_options()?;
            let buckets = of_rank_0.map_or_else(|| spec.choices(comm), Ok)?;
            let resolved = spec.resolve(comm, &buckets)?;
            let number = agreement::number(&agreed, &buckets);
            let workspace = request::workspace(&resolved);
            spec.check_workspace(workspace)?;
            let executor =
                agreement::working(comm, &name, || Executor::new(comm, &resolved, &spec))??;
            Ok(Self { executor, comm: comm.clone(), spec, largest, buckets, number, workspace })
        });
        let op = agreement::all_ready(comm, &name, op)?;
        comm.reserve(op.workspace).map_err(agreement::while_building(&name))?;
        tracing::debug!(rank = %comm.rank(), "{}", op.explain());
        Ok(op)
    }
}
