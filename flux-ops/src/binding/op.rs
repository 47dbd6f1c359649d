//! An op whose kind and element type are known at run time.
//!
//! Invariant: ranks with equal specs build the same op. What a kind does not have is refused before
//! any rank is asked.

use crate::epilogue::{EpilogueArgs, EpilogueSpec, Epsilon};
use crate::op::kind::{AllGather, AllReduce, ReduceScatter};
use crate::op::{OpMarker, Request};
use crate::tensor::TensorError;
use crate::{BuildError, CallError, FusedLinear, RawTensor, TensorMut, TensorRef};
use flux_core::{DType, OpKind, Partials, Rank};
use flux_kernels::{Activation, Element, GateLayout, WeightLayout};
use flux_transport::{Communicator, Stream};
use half::{bf16, f16};
use std::ops::Range;

/// What an op is built for. All but `max_workspace` is the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "fields are named after the methods of Builder")]
#[expect(clippy::struct_excessive_bools, reason = "options of a builder")]
pub struct OpSpec {
    pub op: OpKind,
    pub dtype: DType,
    pub max_m: usize,
    /// Global.
    pub n: usize,
    /// Global.
    pub k: usize,
    pub weights: WeightLayout,
    pub bias: bool,
    pub residual: bool,
    pub activation: Activation,
    pub gates: Option<GateLayout>,
    pub rms_norm: Option<f32>,
    pub batch_invariant: bool,
    pub partials: Partials,
    pub sm_margin: u32,
    pub max_workspace: Option<u64>,
    /// Calls may be captured.
    pub captures: bool,
}

impl OpSpec {
    /// Refuses options that the kind does not have.
    fn check(&self) -> Result<(), BuildError> {
        let gathers = self.op == OpKind::AllGatherGemm;
        let given = [
            ("residual", gathers && self.residual),
            ("rms_norm", gathers && self.rms_norm.is_some()),
            ("partials", gathers && self.partials != Partials::OpDType),
            ("activation", !gathers && self.activation != Activation::None),
            ("gates", !gathers && self.gates.is_some()),
        ];
        match given.into_iter().find(|&(_, given)| given) {
            Some((option, _)) => Err(BuildError::Option { op: self.op, option }),
            None => Ok(()),
        }
    }

    fn request(&self) -> Request {
        let mut request = Request::new(self.op, self.max_m, self.n, self.k, self.dtype);
        let rms_norm = self.rms_norm.map(Epsilon::new);
        let Self { bias, residual, activation, gates, .. } = *self;
        request.epilogue = EpilogueSpec { bias, residual, activation, gates, rms_norm };
        request.weights = self.weights;
        request.batch_invariant = self.batch_invariant;
        request.partials = self.partials;
        request.launch.sm_margin = self.sm_margin;
        request.launch.captures = self.captures;
        request.max_workspace = self.max_workspace;
        request
    }
}

/// The operands of one call.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "fields are named after the operands of an op")]
pub struct RawOperands {
    pub x: RawTensor,
    pub w: RawTensor,
    pub bias: Option<RawTensor>,
    /// It may be `y` itself.
    pub residual: Option<RawTensor>,
    pub y: RawTensor,
    /// Gain, and the normalised rows.
    pub norm: Option<(RawTensor, RawTensor)>,
    /// Where all rows of `x` go; of an AllGather-GEMM.
    pub gathered: Option<RawTensor>,
}

/// An op, whatever its kind and element type.
pub struct AnyOp(Box<dyn Linear>);

impl std::fmt::Debug for AnyOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("AnyOp").field(&self.0.explain()).finish()
    }
}

impl AnyOp {
    /// Builds the op; collective, as [`Builder::build`](crate::Builder::build).
    ///
    /// # Safety
    /// Of a spec with `captures`, as [`Builder::captures`](crate::Builder::captures).
    ///
    /// # Errors
    /// [`BuildError`].
    pub unsafe fn build(spec: &OpSpec, comm: &Communicator) -> Result<Self, BuildError> {
        spec.check()?;
        let request = spec.request();
        Ok(Self(match (spec.op, spec.dtype) {
            (OpKind::AllGatherGemm, DType::Bf16) => built::<AllGather, bf16>(request, comm)?,
            (OpKind::AllGatherGemm, DType::F16) => built::<AllGather, f16>(request, comm)?,
            (OpKind::GemmReduceScatter, DType::Bf16) => built::<ReduceScatter, bf16>(request, comm)?,
            (OpKind::GemmReduceScatter, DType::F16) => built::<ReduceScatter, f16>(request, comm)?,
            (OpKind::GemmAllReduce, DType::Bf16) => built::<AllReduce, bf16>(request, comm)?,
            (OpKind::GemmAllReduce, DType::F16) => built::<AllReduce, f16>(request, comm)?,
        }))
    }

    /// As [`FusedLinear::forward_with`], or as
    /// [`forward_gathered`](crate::AllGatherGemm::forward_gathered).
    ///
    /// # Safety
    /// The operands are as [`TensorRef::from_raw`] and [`TensorMut::from_raw`] ask. A residual in
    /// the place of `y` is written with it.
    ///
    /// # Errors
    /// [`CallError`].
    pub unsafe fn forward(&self, operands: &RawOperands, stream: Stream<'_>) -> Result<(), CallError> {
        // SAFETY: as the caller has vouched.
        unsafe { self.0.forward(operands, stream) }
    }

    /// As [`FusedLinear::prepare`].
    ///
    /// # Errors
    /// [`CallError`].
    pub fn prepare(&self, rows: &[usize]) -> Result<(), CallError> {
        self.0.prepare(rows)
    }

    /// As [`FusedLinear::rows`].
    ///
    /// # Errors
    /// [`CallError`].
    pub fn rows(&self, m: usize, rank: Rank) -> Result<Range<usize>, CallError> {
        self.0.rows(m, rank)
    }

    /// As [`FusedLinear::columns`].
    pub fn columns(&self, rank: Rank) -> Range<usize> {
        self.0.columns(rank)
    }

    /// As [`FusedLinear::inner`].
    pub fn inner(&self, rank: Rank) -> Range<usize> {
        self.0.inner(rank)
    }

    /// As [`FusedLinear::explain`].
    pub fn explain(&self) -> String {
        self.0.explain()
    }
}

fn built<K: OpMarker, T: Element>(request: Request, comm: &Communicator) -> Result<Box<dyn Linear>, BuildError> {
    Ok(Box::new(FusedLinear::<K, T>::build(request, comm)?))
}

trait Linear: Send + Sync {
    /// # Safety
    /// As [`AnyOp::forward`].
    unsafe fn forward(&self, operands: &RawOperands, stream: Stream<'_>) -> Result<(), CallError>;
    fn prepare(&self, rows: &[usize]) -> Result<(), CallError>;
    fn rows(&self, m: usize, rank: Rank) -> Result<Range<usize>, CallError>;
    fn columns(&self, rank: Rank) -> Range<usize>;
    fn inner(&self, rank: Rank) -> Range<usize>;
    fn explain(&self) -> String;
}

impl<K: OpMarker, T: Element> Linear for FusedLinear<K, T> {
    unsafe fn forward(&self, operands: &RawOperands, stream: Stream<'_>) -> Result<(), CallError> {
        let view = |operand| move |source: TensorError| CallError::View { operand, source };
        // SAFETY: as the caller has vouched.
        let read = |name, raw| unsafe { TensorRef::<T>::from_raw(raw) }.map_err(view(name));
        // SAFETY: as the caller has vouched.
        let written = |name, raw| unsafe { TensorMut::<T>::from_raw(raw) }.map_err(view(name));
        let (x, w) = (read("x", operands.x)?, read("w", operands.w)?);
        let bias = operands.bias.map(|bias| read("bias", bias)).transpose()?;
        let place = |of: &RawTensor| (of.address, of.layout, of.dtype);
        // No view may be of memory that another one writes.
        let in_y = operands.residual.is_some_and(|residual| place(&residual) == place(&operands.y));
        let residual = operands.residual.filter(|_| !in_y).map(|residual| read("residual", residual)).transpose()?;
        let gain = operands.norm.map(|(gain, _)| read("gain", gain)).transpose()?;
        let mut y_norm = operands.norm.map(|(_, rows)| written("y_norm", rows)).transpose()?;

        let mut epilogue = EpilogueArgs::new();
        if let Some(bias) = &bias {
            epilogue = epilogue.bias(bias);
        }
        if let Some(residual) = &residual {
            epilogue = epilogue.residual(residual);
        } else if in_y {
            epilogue = epilogue.residual_in_y();
        }
        if let (Some(gain), Some(y_norm)) = (&gain, &mut y_norm) {
            epilogue = epilogue.norm(gain, y_norm);
        }
        let mut y = written("y", operands.y)?;
        let mut x_full = operands.gathered.map(|rows| written("x_full", rows)).transpose()?;
        self.call((&x, &w), &epilogue, &mut y, x_full.as_mut(), stream)
    }

    fn prepare(&self, rows: &[usize]) -> Result<(), CallError> {
        self.prepare(rows)
    }

    fn rows(&self, m: usize, rank: Rank) -> Result<Range<usize>, CallError> {
        self.rows(m, rank)
    }

    fn columns(&self, rank: Rank) -> Range<usize> {
        self.columns(rank)
    }

    fn inner(&self, rank: Rank) -> Range<usize> {
        self.inner(rank)
    }

    fn explain(&self) -> String {
        self.explain()
    }
}
