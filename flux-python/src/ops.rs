//! The ops of one communicator: built on first use of a shape, then kept.
//!
//! Invariant: ranks that make the same calls build the same ops in the same order. This file alone
//! knows how flux-ops builds and calls them.

use crate::error::{Error, of_view};
use flux_ops::{
    Activation, AllGatherGemm, CallError, DType, Element, EpilogueArgs, GemmAllReduce, GemmReduceScatter, Layout, RawTensor, TensorMut,
    TensorRef, bf16, f16,
};
use flux_transport::{Communicator, Stream};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The ops, by the numbers of their kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Kind {
    AllGather,
    ReduceScatter,
    AllReduce,
}

impl Kind {
    const ALL: [(&str, Self); 3] =
        [("all_gather_matmul", Self::AllGather), ("matmul_reduce_scatter", Self::ReduceScatter), ("matmul_all_reduce", Self::AllReduce)];

    /// The op with this name in Python.
    pub(crate) fn named(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.iter().find(|(known, _)| *known == name);
        known
            .map(|&(_, kind)| kind)
            .ok_or_else(|| Error::operand(format!("{name} is no op: the ops are {}", Self::ALL.map(|(name, _)| name).join(", "))))
    }

    pub(crate) const fn from_number(number: u8) -> Self {
        Self::ALL[number as usize].1
    }

    /// The name in Python.
    const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }

    /// The global rows of a call, where the caller does not say them.
    pub(crate) fn rows(self, m: Option<usize>, x_rows: usize, comm: &Communicator) -> usize {
        match self {
            Self::AllGather => m.unwrap_or(x_rows * comm.world_size().get() as usize),
            Self::ReduceScatter | Self::AllReduce => x_rows,
        }
    }

    /// Rows and columns of the result, by the rows of the weight.
    pub(crate) fn result(self, m: usize, weight_rows: usize, comm: &Communicator) -> [usize; 2] {
        let (rank, world) = (comm.rank().get() as usize, comm.world_size().get() as usize);
        let rows = match self {
            Self::AllGather | Self::AllReduce => m,
            // As `torch.tensor_split` cuts them.
            Self::ReduceScatter => m / world + usize::from(rank < m % world),
        };
        [rows, weight_rows]
    }

    /// Global `n` and `k`, by the extents of the weight.
    const fn extents(self, weight: Layout, world: usize) -> (usize, usize) {
        match self {
            Self::AllGather => (weight.rows * world, weight.cols),
            Self::ReduceScatter | Self::AllReduce => (weight.rows, weight.cols * world),
        }
    }
}

/// What an op is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OpSpec {
    pub(crate) kind: Kind,
    /// Global.
    pub(crate) n: usize,
    /// Global.
    pub(crate) k: usize,
    pub(crate) dtype: DType,
    pub(crate) bias: bool,
    pub(crate) activation: Activation,
}

/// One call: the operands of this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'s> {
    pub(crate) kind: Kind,
    pub(crate) activation: Activation,
    /// Rows of all ranks together.
    pub(crate) m: usize,
    pub(crate) x: RawTensor,
    pub(crate) weight: RawTensor,
    pub(crate) bias: Option<RawTensor>,
    pub(crate) y: RawTensor,
    pub(crate) stream: Stream<'s>,
}

/// What all ops of a communicator are built with; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most rows of a call, of all ranks together.
    pub(crate) max_m: usize,
    /// SMs that calls leave to other kernels.
    pub(crate) sm_margin: u32,
}

type Forward = Box<dyn Fn(&Call<'_>) -> Result<(), Error> + Send + Sync>;
type Prepare = Box<dyn Fn(&[usize]) -> Result<(), Error> + Send + Sync>;

/// An op, whatever its kind and dtype.
pub(crate) struct Op {
    forward: Forward,
    prepare: Prepare,
}

impl Op {
    /// Has these numbers of rows ready for calls that are captured in a graph.
    pub(crate) fn prepare(&self, rows: &[usize]) -> Result<(), Error> {
        (self.prepare)(rows)
    }
}

/// The ops of one communicator.
pub(crate) struct Ops {
    comm: Communicator,
    limits: Limits,
    built: RwLock<HashMap<OpSpec, Arc<Op>>>,
    /// Held while an op is built, which is collective: one at a time.
    building: Mutex<()>,
}

impl Ops {
    pub(crate) fn new(comm: Communicator, limits: Limits) -> Self {
        Self { comm, limits, built: RwLock::default(), building: Mutex::default() }
    }

    /// Makes a call; builds its op first where there is none.
    ///
    /// # Safety
    /// The operands are as [`TensorRef::from_raw`] and [`TensorMut::from_raw`] ask.
    pub(crate) unsafe fn call(&self, call: &Call<'_>) -> Result<(), Error> {
        let world = self.comm.world_size().get() as usize;
        let Call { kind, activation, m, .. } = *call;
        let (found, needed) = ([call.y.layout.rows, call.y.layout.cols], kind.result(m, call.weight.layout.rows, &self.comm));
        if found != needed {
            return Err(Error::operand(format!("out is {found:?}, and the result of m = {m} is {needed:?}")));
        }
        let (n, k) = kind.extents(call.weight.layout, world);
        let spec = OpSpec { kind, n, k, dtype: call.x.dtype, bias: call.bias.is_some(), activation };
        let op = self.op(&spec, call.stream)?;
        (op.forward)(call)
    }

    /// Builds the op where there is none. Collective.
    pub(crate) fn op(&self, spec: &OpSpec, stream: Stream<'_>) -> Result<Arc<Op>, Error> {
        if let Some(op) = self.known(spec) {
            return Ok(op);
        }
        let _one = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(op) = self.known(spec) {
            return Ok(op);
        }
        if is_capturing(stream) {
            return Err(Error::new(
                "BuildError",
                format!(
                    "{} of n = {}, k = {} is built on its first call, and the stream is being captured: call flux_tp.prepare, or the op \
                     once, before the capture",
                    spec.kind.name(),
                    spec.n,
                    spec.k
                ),
            ));
        }
        let op = Arc::new(build(spec, &self.comm, self.limits)?);
        self.built.write().unwrap_or_else(PoisonError::into_inner).insert(*spec, Arc::clone(&op));
        Ok(op)
    }

    fn known(&self, spec: &OpSpec) -> Option<Arc<Op>> {
        self.built.read().unwrap_or_else(PoisonError::into_inner).get(spec).map(Arc::clone)
    }
}

/// Builds an op of a kind and dtype.
macro_rules! built {
    ($op:ident, $element:ty, $comm:expr, $limits:expr, $spec:expr $(, $option:ident)*) => {{
        let (spec, limits): (&OpSpec, Limits) = ($spec, $limits);
        let builder = $op::<$element>::builder(limits.max_m, spec.n, spec.k).bias(spec.bias)$(.$option(spec.$option))*;
        // SAFETY: `flux_tp.init` asks that graphs go before their communicator, and torch's graphs
        // keep the memory of their operands.
        let builder = unsafe { builder.captures() };
        let op = Arc::new(builder.sm_margin(limits.sm_margin).build($comm)?);
        let prepared = Arc::clone(&op);
        let forward = move |call: &Call<'_>| {
            // SAFETY: as `Ops::call` asks.
            unsafe {
                with_views::<$element>(call, |x, weight, epilogue, y| op.forward_with(x, weight, epilogue, y, call.stream))
            }
        };
        Op { forward: Box::new(forward), prepare: Box::new(move |rows: &[usize]| Ok(prepared.prepare(rows)?)) }
    }};
}

fn build(spec: &OpSpec, comm: &Communicator, limits: Limits) -> Result<Op, Error> {
    if spec.kind != Kind::AllGather && spec.activation != Activation::None {
        return Err(Error::operand(format!("activation = {}: all_gather_matmul alone has activations", spec.activation)));
    }
    Ok(match (spec.kind, spec.dtype) {
        (Kind::AllGather, DType::Bf16) => built!(AllGatherGemm, bf16, comm, limits, spec, activation),
        (Kind::AllGather, DType::F16) => built!(AllGatherGemm, f16, comm, limits, spec, activation),
        (Kind::ReduceScatter, DType::Bf16) => built!(GemmReduceScatter, bf16, comm, limits, spec),
        (Kind::ReduceScatter, DType::F16) => built!(GemmReduceScatter, f16, comm, limits, spec),
        (Kind::AllReduce, DType::Bf16) => built!(GemmAllReduce, bf16, comm, limits, spec),
        (Kind::AllReduce, DType::F16) => built!(GemmAllReduce, f16, comm, limits, spec),
    })
}

/// Hands the operands on as views.
///
/// # Safety
/// As [`Ops::call`].
unsafe fn with_views<T: Element>(
    call: &Call<'_>,
    forward: impl FnOnce(&TensorRef<'_, T>, &TensorRef<'_, T>, EpilogueArgs<'_, T>, &mut TensorMut<'_, T>) -> Result<(), CallError>,
) -> Result<(), Error> {
    // SAFETY: as the caller has vouched.
    let (x, weight) = unsafe { (TensorRef::<T>::from_raw(call.x), TensorRef::<T>::from_raw(call.weight)) };
    // SAFETY: as above.
    let bias = call.bias.map(|bias| unsafe { TensorRef::<T>::from_raw(bias) }).transpose();
    // SAFETY: as above.
    let y = unsafe { TensorMut::<T>::from_raw(call.y) };
    let (x, weight, bias) = (x.map_err(of_view("x"))?, weight.map_err(of_view("weight"))?, bias.map_err(of_view("bias"))?);
    let epilogue = bias.as_ref().map_or_else(EpilogueArgs::new, |bias| EpilogueArgs::new().bias(bias));
    Ok(forward(&x, &weight, epilogue, &mut y.map_err(of_view("out"))?)?)
}

fn is_capturing(stream: Stream<'_>) -> bool {
    use cudarc::driver::sys::{CUstream, CUstreamCaptureStatus, cuStreamIsCapturing};
    let Some(stream) = stream.raw() else { return false };
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller's stream, which is alive; `status` is a place for the answer.
    let _code = unsafe { cuStreamIsCapturing(stream as CUstream, &raw mut status) };
    status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}
