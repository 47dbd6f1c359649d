//! An op whose kind and element type are known at run time.
//!
//! Invariant: ranks with equal specs build the same op. What a kind does not have is refused before
//! any rank is asked.

use crate::epilogue::{EpilogueSpec, Epsilon, Norm};
use crate::op::kind::{AllGather, AllReduce, ReduceScatter};
use crate::op::{OpMarker, Request};
use crate::operands::{MORE, MoreOperands, Operands};
use crate::tensor::View;
use crate::{BuildError, CallError, FusedLinear, RawTensor};
use flux_core::problem::MAX_WEIGHTS;
use flux_core::{DType, OpKind, Partials, Rank};
use flux_kernels::{Activation, Element, GateLayout, WeightLayout};
use flux_transport::{Communicator, Stream};
use half::{bf16, f16};
use std::ops::Range;

/// What an op is built for. All but `max_workspace` is the same on every rank.
#[derive(Clone, Debug, PartialEq)]
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
    /// Of several weights the output features of each, `n` in all; `None` of one.
    pub columns: Option<Vec<usize>>,
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
            ("partials", gathers && self.partials != Partials::Output),
            ("activation", !gathers && self.activation != Activation::None),
            ("gates", !gathers && self.gates.is_some()),
            ("several_weights", !gathers && self.columns.is_some()),
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
        request.columns.clone_from(&self.columns);
        request.weights = self.weights;
        request.batch_invariant = self.batch_invariant;
        request.partials = self.partials;
        request.launch.sm_margin = self.sm_margin;
        request.launch.captures = self.captures;
        request.max_workspace = self.max_workspace;
        request
    }
}

/// A weight of a call, with its bias and its result.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "fields are named after the operands of an op")]
pub struct RawWeight {
    pub w: RawTensor,
    pub bias: Option<RawTensor>,
    pub y: RawTensor,
}

/// The operands of one call.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "fields are named after the operands of an op")]
pub struct RawOperands<'a> {
    pub x: RawTensor,
    /// One, or those of an op with several.
    pub weights: &'a [RawWeight],
    /// It may be `y` itself.
    pub residual: Option<RawTensor>,
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
            (OpKind::GemmReduceScatter, DType::Bf16) => {
                built::<ReduceScatter, bf16>(request, comm)?
            }
            (OpKind::GemmReduceScatter, DType::F16) => built::<ReduceScatter, f16>(request, comm)?,
            (OpKind::GemmAllReduce, DType::Bf16) => built::<AllReduce, bf16>(request, comm)?,
            (OpKind::GemmAllReduce, DType::F16) => built::<AllReduce, f16>(request, comm)?,
        }))
    }

    /// As [`FusedLinear::forward_with`], or as
    /// [`forward_gathered`](crate::AllGatherGemm::forward_gathered) or
    /// [`forward_several`](crate::AllGatherGemm::forward_several).
    ///
    /// # Safety
    /// The operands are as [`TensorRef::from_raw`](crate::TensorRef::from_raw) and
    /// [`TensorMut::from_raw`](crate::TensorMut::from_raw) ask. A residual in the place of `y` is
    /// written with it.
    ///
    /// # Errors
    /// [`CallError`].
    pub unsafe fn forward(
        &self,
        operands: &RawOperands<'_>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
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

    /// Number of weights.
    pub fn weight_count(&self) -> usize {
        self.0.weight_count()
    }

    /// As [`FusedLinear::weight_columns`].
    ///
    /// # Panics
    /// If the op has no weight of this number.
    pub fn weight_columns(&self, weight: usize, rank: Rank) -> Range<usize> {
        self.0.weight_columns(weight, rank)
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

fn built<K: OpMarker, T: Element>(
    request: Request,
    comm: &Communicator,
) -> Result<Box<dyn Linear>, BuildError> {
    Ok(Box::new(FusedLinear::<K, T>::build(request, comm)?))
}

trait Linear: Send + Sync {
    /// # Safety
    /// As [`AnyOp::forward`].
    unsafe fn forward(
        &self,
        operands: &RawOperands<'_>,
        stream: Stream<'_>,
    ) -> Result<(), CallError>;
    fn prepare(&self, rows: &[usize]) -> Result<(), CallError>;
    fn rows(&self, m: usize, rank: Rank) -> Result<Range<usize>, CallError>;
    fn columns(&self, rank: Rank) -> Range<usize>;
    fn weight_count(&self) -> usize;
    fn weight_columns(&self, weight: usize, rank: Rank) -> Range<usize>;
    fn inner(&self, rank: Rank) -> Range<usize>;
    fn explain(&self) -> String;
}

impl<K: OpMarker, T: Element> Linear for FusedLinear<K, T> {
    unsafe fn forward(
        &self,
        operands: &RawOperands<'_>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let view = |operand, raw| {
            View::from_raw::<T>(raw).map_err(|source| CallError::View { operand, source })
        };
        let optional =
            |operand, raw: Option<RawTensor>| raw.map(|raw| view(operand, raw)).transpose();
        let weight = |[w, bias, y]: [&'static str; 3], raw: &RawWeight| {
            Ok::<_, CallError>(MoreOperands {
                w: view(w, raw.w)?,
                bias: optional(bias, raw.bias)?,
                y: view(y, raw.y)?,
            })
        };
        let (first, further) = match operands.weights {
            [first, further @ ..] if further.len() < MAX_WEIGHTS => (first, further),
            others => {
                return Err(CallError::Weights { takes: self.weight_count(), given: others.len() });
            }
        };
        let x = view("x", operands.x)?;
        let MoreOperands { w, bias, y } = weight(["w", "bias", "y"], first)?;
        let mut more = [None; MAX_WEIGHTS - 1];
        for ((to, names), raw) in more.iter_mut().zip(MORE).zip(further) {
            *to = Some(weight(names, raw)?);
        }
        let residual = optional("residual", operands.residual)?;
        let norm = |(gain, rows)| {
            Ok::<_, CallError>(Norm { gain: view("gain", gain)?, y_norm: view("y_norm", rows)? })
        };
        let norm = operands.norm.map(norm).transpose()?;
        let x_full = optional("x_full", operands.gathered)?;
        self.call_with(&Operands { x, w, bias, residual, y, norm, x_full, more }, stream)
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

    fn weight_count(&self) -> usize {
        self.weight_count()
    }

    fn weight_columns(&self, weight: usize, rank: Rank) -> Range<usize> {
        self.weight_columns(weight, rank)
    }

    fn inner(&self, rank: Rank) -> Range<usize> {
        self.inner(rank)
    }

    fn explain(&self) -> String {
        self.explain()
    }
}
