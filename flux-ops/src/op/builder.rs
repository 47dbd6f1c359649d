//! The options of an op.

use super::kind::{OpMarker, Reduces};
use super::{AllGatherGemm, TypedLinear, request};
use crate::error::BuildError;
use crate::spec::{NormSpec, OpSpec};
use flux_core::layout::WorkspaceSize;
use flux_core::plan::Plan;
use flux_core::{Partials, Scales};
use flux_kernels::{Activation, Element, GateLayout, Operand, QuantizedElement, WeightLayout};
use flux_transport::Communicator;
use std::marker::PhantomData;
use std::path::PathBuf;

/// Options of an op; [`TypedLinear::builder`] starts one.
#[derive(Debug)]
#[must_use = "a builder does nothing until build is called"]
pub struct Builder<Op> {
    spec: OpSpec,
    op: PhantomData<fn() -> Op>,
}

impl<Op> Builder<Op> {
    pub(super) const fn new(spec: OpSpec) -> Self {
        Self { spec, op: PhantomData }
    }

    /// What the op is built for.
    pub const fn spec(&self) -> &OpSpec {
        &self.spec
    }

    /// How calls of any `m` are executed, in place of the plan table's or the cost model's choices.
    /// The same on every rank.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, Plan};
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let plan: Plan = "tile=128x256x64 k=stream-k".parse()?;
    /// let op = AllGatherGemm::<half::bf16>::builder(512, 1024, 256).plan(plan).build(&comm)?;
    /// assert_eq!(op.plan(512)?.tile.to_string(), "128x256x64");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn plan(mut self, plan: Plan) -> Self {
        self.spec.plan = Some(plan);
        self
    }

    /// The file of measured plans, in place of the user's (`FLUX_PLAN_TABLE`, else `flux/plans.csv`
    /// in the user's data folder). It may differ between ranks: rank 0's decides.
    pub fn plan_table(mut self, file: impl Into<PathBuf>) -> Self {
        self.spec.plan_table = Some(file.into());
        self
    }

    /// Whether calls add a bias, in place of `false`:
    /// [`Call::bias`](crate::Call::bias). The same on every rank.
    pub fn bias(mut self, bias: bool) -> Self {
        self.spec.epilogue.operands.set(Operand::Bias, bias);
        self
    }

    /// How `w` lies, in place of [`WeightLayout::Nk`]. The same on every rank. The result has the
    /// same bits.
    ///
    /// Some kernels of [`WeightLayout::Kn`], with an activation among them, are compiled when an op
    /// first needs them.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, TensorMut, TensorRef, WeightLayout};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let op = AllGatherGemm::<bf16>::builder(m, n, k).weights(WeightLayout::Kn).build(&comm)?;
    /// let (x, mut y) = (vec![bf16::ONE; m * k], vec![bf16::NAN; m * n]);
    /// let w: Vec<_> = (0..k * n).map(|i| bf16::from_f32((i % n) as f32)).collect();
    /// op.forward(
    ///     &TensorRef::host(&x, (m, k))?,
    ///     &TensorRef::host(&w, (k, n))?,
    ///     &mut TensorMut::host(&mut y, (m, n))?,
    ///     Stream::Host,
    /// )?;
    /// assert_eq!(y[..3].iter().map(|y| y.to_f32()).collect::<Vec<_>>(), [0.0, 8.0, 16.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn weights(mut self, layout: WeightLayout) -> Self {
        self.spec.weights = layout;
        self
    }

    /// SMs that calls leave to others, in place of none: for kernels on other streams that must run
    /// beside them. It has no effect on threads of the host executor. The same on every rank.
    pub fn sm_margin(mut self, sms: u32) -> Self {
        self.spec.launch.sm_margin = sms;
        self
    }

    /// Whether a row of the result has the same bits whatever rows share its call, in place of
    /// `false`. They then depend on the row's values, the weights, `n`, `k`, the number of ranks
    /// and the element type: not on `m`, the row's position or owner, or the transport. GPUs of one
    /// generation agree; threads of the host executor have bits of their own.
    ///
    /// Only plans with [`SumOrder::Fixed`](crate::SumOrder) are taken. A GEMM-AllReduce then holds
    /// all ranks' partial sums of `max_m` rows. The same on every rank.
    ///
    /// ```
    /// use flux_ops::{BuildError, GemmReduceScatter, Plan, SumOrder, bf16};
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let builder = || GemmReduceScatter::<bf16>::builder(512, 1024, 256).batch_invariant(true);
    /// assert!(builder().build(&comm)?.explain().contains("batch-invariant"));
    /// let split: Plan = "tile=128x256x64 k=split-k:2".parse()?;
    /// let refused = builder().plan(split).build(&comm);
    /// assert!(matches!(refused, Err(BuildError::SumOrder { order: SumOrder::PartsOfK, .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Of the build: [`BuildError::SumOrder`] for a plan of the caller's,
    /// [`BuildError::NoInvariantPlan`] where there is none.
    pub fn batch_invariant(mut self, batch_invariant: bool) -> Self {
        self.spec.batch_invariant = batch_invariant;
        self
    }

    /// Refuses the build, on all ranks, where calls need more bytes of workspace than this, in
    /// place of no limit. It may differ between ranks.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, BuildError, bf16};
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let refused = AllGatherGemm::<bf16>::builder(512, 1024, 256).max_workspace(1).build(&comm);
    /// assert!(matches!(refused, Err(BuildError::Workspace { limit: 1, .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn max_workspace(mut self, bytes: u64) -> Self {
        self.spec.max_workspace = Some(bytes);
        self
    }

    /// Workers on this rank, in place of as many as the device runs at once: CTAs of the kernel, or
    /// threads of the host executor. It does not change the result.
    pub fn workers(mut self, workers: u32) -> Self {
        self.spec.launch.workers = Some(workers);
        self
    }

    /// Whether each call of this rank leaves its time line, for
    /// [`timeline`](crate::FusedLinear::timeline) to read. A kernel that records is a little
    /// slower, and a call on the host allocates. It does not change the result.
    pub fn trace(mut self, trace: bool) -> Self {
        self.spec.launch.trace = trace;
        self
    }

    /// Lets calls be captured in CUDA graphs, where `comm.capabilities().graphs` says so.
    ///
    /// # Safety
    /// A graph's kernels use memory that no type ties to the graph. Every graph with a call of the
    /// op, or of one that [`rebuild`](crate::FusedLinear::rebuild) makes of it, is destroyed before
    /// the last handle of its communicator. Until then the operands of its captured calls stay
    /// where they are, and nothing else accesses them while the graph runs.
    ///
    /// ```compile_fail,E0133
    /// use flux_ops::{AllGatherGemm, bf16};
    /// let builder = AllGatherGemm::<bf16>::builder(512, 1024, 256).captures();
    /// ```
    pub unsafe fn captures(mut self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { self.spec.allow_captures() };
        self
    }

    /// What `build` would reserve on `comm` by this rank's choice of plans: enough for every `m`.
    /// Not collective. The same for every rank with the same plan tables.
    ///
    /// A communicator holds the largest of its ops, not the sum;
    /// [`Communicator::memory`] says what it holds besides.
    ///
    /// # Errors
    /// [`BuildError`], as `build` would find on this rank alone.
    pub fn workspace(&self, comm: &Communicator) -> Result<WorkspaceSize, BuildError> {
        Ok(request::workspace(&self.spec.resolve(comm, &self.spec.choices(comm)?)?))
    }
}

impl<X: Element, Y: Element> Builder<AllGatherGemm<X, Y>> {
    /// What is applied to each element after the bias, in place of [`Activation::None`]. The same
    /// on every rank.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.spec.epilogue.activation = activation;
        self
    }

    /// Multiplies activated gates by their ups, in place of storing every column: `y[m, n_r/2] =
    /// act(gate) * up`. Of the `n_r` rows of a rank's `w`, and of its bias, half are gates and half
    /// are ups, which lie as `layout` says. The ranks split `n` in groups of 16, of e4m3 operands
    /// of 32, with scales of blocks of 256. So a rank's columns of `y` are the inner elements of a
    /// row-parallel layer with `k = n / 2`. The same on every rank.
    ///
    /// With [`Activation::Silu`] it is SwiGLU, with [`Activation::Gelu`] GeGLU, with
    /// [`Activation::Relu`] ReGLU.
    ///
    /// ```
    /// use flux_ops::{Activation, AllGatherGemm, GateLayout, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let builder = AllGatherGemm::<bf16>::builder(m, n, k).activation(Activation::Relu);
    /// let op = builder.gated(GateLayout::Concatenated).build(&comm)?;
    ///
    /// let (x, mut y) = (vec![bf16::ONE; m * k], vec![bf16::NAN; m * n / 2]);
    /// // Gates of 1, then ups of 2.
    /// let values = (0..n * k).map(|i| if i < n / 2 * k { 1.0 } else { 2.0 });
    /// let w: Vec<_> = values.map(bf16::from_f32).collect();
    /// op.forward(
    ///     &TensorRef::host(&x, (m, k))?,
    ///     &TensorRef::host(&w, (n, k))?,
    ///     &mut TensorMut::host(&mut y, (m, n / 2))?,
    ///     Stream::Host,
    /// )?;
    /// assert!(y.iter().all(|y| y.to_f32() == 8.0 * 16.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Of the build: [`BuildError::GatedWeights`] with [`WeightLayout::Kn`].
    /// [`BuildError::Problem`] where `n` is no multiple of such a group, or a rank has none.
    /// [`BuildError::GatedTile`] where 16 does not divide the columns of a plan's tiles.
    pub fn gated(mut self, layout: GateLayout) -> Self {
        self.spec.epilogue.gates = Some(layout);
        self
    }

    /// Several weights that share the gathered rows, in place of one: `columns` has the output
    /// features of each, `n` in all, as of queries, keys and values. Each is split over the ranks
    /// on its own. Calls bring each with [`Call::weight`](crate::Call::weight). The same on every
    /// rank.
    ///
    /// Weights are `[n, k]`, without gates. An activation is applied to every result. The kernels
    /// are compiled when an op first needs them.
    ///
    /// # Errors
    /// Of the build: [`BuildError::Problem`] for more than
    /// [`MAX_WEIGHTS`](flux_core::problem::MAX_WEIGHTS), for columns that are not `n` in all or
    /// that the ranks cannot split, and for gates; [`BuildError::SeveralWeights`] with
    /// [`WeightLayout::Kn`].
    pub fn several_weights(mut self, columns: &[usize]) -> Self {
        self.spec.columns = Some(columns.to_vec());
        self
    }
}

impl<K: Reduces, X: Element, Y: Element> Builder<TypedLinear<K, X, Y>> {
    /// Element type in which ranks send partial sums to each other, in place of
    /// [`Partials::Output`]. With [`Partials::F32`] the result is rounded once, and fp16 partial
    /// sums do not overflow where their total does not. The bytes of partial sums double, on links
    /// and in the workspace. The same on every rank.
    ///
    /// ```
    /// use flux_ops::{GemmReduceScatter, Partials, bf16};
    /// use flux_transport::{Communicator, Select, World};
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let builder = GemmReduceScatter::<bf16>::builder(512, 1024, 256);
    /// let op = builder.partials(Partials::F32).build(&comm)?;
    /// assert!(op.explain().contains("bf16+f32"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Of the build: [`BuildError::SequentialPartials`] for a plan with `comm=sequential`.
    pub fn partials(mut self, partials: Partials) -> Self {
        self.spec.numerics.partials = partials;
        self
    }

    /// Whether calls add a residual of the shape of `y`, in place of `false`:
    /// [`Call::residual`](crate::Call::residual). It is added to the sum in fp32,
    /// after the bias and before the one rounding. The same on every rank.
    ///
    /// A library's collective (`comm=sequential`) rounds sums of its own. There a rank adds the
    /// residual to its partial sum, before that is rounded.
    ///
    /// ```
    /// use flux_ops::{GemmAllReduce, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let op = GemmAllReduce::<bf16>::builder(m, n, k).residual(true).build(&comm)?;
    ///
    /// let (x, w) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k]);
    /// let mut hidden = vec![bf16::from_f32(100.0); m * n];
    /// op.call(&TensorRef::host(&x, (m, k))?)
    ///     .weight(&TensorRef::host(&w, (n, k))?, &mut TensorMut::host(&mut hidden, (m, n))?)
    ///     .residual_in_y()
    ///     .on(Stream::Host)?;
    /// assert!(hidden.iter().all(|&h| h == bf16::from_f32(108.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn residual(mut self, residual: bool) -> Self {
        self.spec.epilogue.operands.set(Operand::Residual, residual);
        self
    }

    /// Also writes the normalised rows of the result, in place of none: `y_norm = y /
    /// sqrt(mean(y^2) + eps) * gain` for each row, in fp32 from the rounded `y`, rounded once.
    /// [`Call::norm`](crate::Call::norm) brings gain and output. The same on every
    /// rank.
    ///
    /// On CUDA it is a kernel of its own, behind the op on the call's stream.
    ///
    /// ```
    /// use flux_ops::{GemmAllReduce, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let builder = GemmAllReduce::<bf16>::builder(m, n, k).residual(true).rms_norm(1e-5);
    /// let op = builder.build(&comm)?;
    ///
    /// let (x, w, gain) = (vec![bf16::ONE; m * k], vec![bf16::ONE; n * k], vec![bf16::ONE; n]);
    /// let (mut hidden, mut normalised) = (vec![bf16::ONE; m * n], vec![bf16::NAN; m * n]);
    /// op.call(&TensorRef::host(&x, (m, k))?)
    ///     .weight(&TensorRef::host(&w, (n, k))?, &mut TensorMut::host(&mut hidden, (m, n))?)
    ///     .residual_in_y()
    ///     .norm(&TensorRef::host(&gain, (n,))?, &mut TensorMut::host(&mut normalised, (m, n))?)
    ///     .on(Stream::Host)?;
    /// assert!(hidden.iter().all(|&h| h == bf16::from_f32(9.0)));
    /// assert!(normalised.iter().all(|&z| z == bf16::ONE));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rms_norm(mut self, eps: f32) -> Self {
        self.spec.epilogue.rms_norm = Some(eps.into());
        self
    }

    /// As [`rms_norm`](Self::rms_norm), with normalised rows as 8-bit operands of the next op: what
    /// a [`Quantizer`](crate::Quantizer) with a norm makes of the rounded `y`, in one launch. `n`
    /// is a multiple of 16, with [`Scales::Block`] of 128. On CUDA it needs compute capability 8.9.
    ///
    /// ```
    /// use flux_ops::{F8E4M3, GemmAllReduce, Scales, TensorMut, TensorRef};
    /// use flux_transport::{Communicator, Select, Stream, World};
    /// use half::bf16;
    ///
    /// let (m, n, k) = (4, 16, 8);
    /// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
    /// let builder = GemmAllReduce::<bf16>::builder(m, n, k);
    /// let op = builder.quantized_rms_norm(1e-5, Scales::Row).build(&comm)?;
    ///
    /// let [x, w, gain] = [m * k, n * k, n].map(|count| vec![bf16::ONE; count]);
    /// // Codes, and behind those of each row its scale, in 128 bytes.
    /// let mut codes = vec![F8E4M3::from_f32(0.0); m * 128];
    /// let mut y = vec![bf16::NAN; m * n];
    /// op.call(&TensorRef::host(&x, (m, k))?)
    ///     .weight(&TensorRef::host(&w, (n, k))?, &mut TensorMut::host(&mut y, (m, n))?)
    ///     .norm(&TensorRef::host(&gain, (n,))?, &mut TensorMut::host(&mut codes, (m, 128))?)
    ///     .on(Stream::Host)?;
    /// assert!(codes[..n].iter().all(|code| code.to_f32() == 448.0));
    /// let (next_x, scale_x) = TensorRef::host(&codes, (m, 128))?.with_scales(n, Scales::Row)?;
    /// # let _ = (next_x, scale_x);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Of the build: [`BuildError::QuantizedNorm`] for another `n`,
    /// [`BuildError::NoQuantizedRows`] on another device.
    pub fn quantized_rms_norm(mut self, eps: f32, scales: Scales) -> Self {
        self.spec.epilogue.rms_norm = Some(NormSpec { eps: eps.into(), scales });
        self
    }
}

impl<K: OpMarker, X: QuantizedElement, Y: Element> Builder<TypedLinear<K, X, Y>> {
    /// Whether tensor cores add all products, in place of `false`. They keep 13 bits of a sum or
    /// so, and without this option sums leave for fp32 registers every 128 elements along `k`. Not
    /// with [`Scales::Block`](crate::Scales). The same on every rank.
    pub fn fast_accumulation(mut self, fast: bool) -> Self {
        self.spec.numerics.fast_accumulation = fast;
        self
    }
}

impl<K: OpMarker, X: Element, Y: Element> Builder<TypedLinear<K, X, Y>> {
    /// Builds the op; collective. Blocks its thread until all ranks have come, and drains earlier
    /// launches on `comm`: no other thread of this rank may be in a call meanwhile. Asynchronous
    /// tasks call it in `spawn_blocking`, as ranks that share a thread would wait for each other.
    ///
    /// On CUDA, build all ops before the first graph is captured: growing the workspace moves it,
    /// and a captured call does not follow.
    ///
    /// # Errors
    /// [`BuildError`]. Where all ranks build, all have then left the build with an error, and
    /// `comm` can be used unless it is [`BuildError::Transport`]. A rank that builds alone waits
    /// for the others until the deadline of `comm`, and `comm` must be rebuilt.
    pub fn build(self, comm: &Communicator) -> Result<TypedLinear<K, X, Y>, BuildError> {
        TypedLinear::build(self.spec, comm)
    }
}
