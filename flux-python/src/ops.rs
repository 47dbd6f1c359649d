//! The ops of one communicator: built on first use of a shape, then kept.
//!
//! Invariant: ranks that make the same calls build the same ops in the same order.

use crate::error::Error;
use crate::operand::{Weight, further_inputs, name};
use flux_ops::binding::{Class, NamedActivation};
use flux_ops::{
    EpilogueSpec, Epsilon, FusedLinear, NormSpec, Numerics, OpKind, OpSpec, Operand, Operands,
    RawTensor, SumsTo, WeightLayout,
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
    pub(crate) const ALL: [(&str, Self); 3] = [
        ("all_gather_matmul", Self::AllGather),
        ("matmul_reduce_scatter", Self::ReduceScatter),
        ("matmul_all_reduce", Self::AllReduce),
    ];

    /// The op with this name in Python.
    pub(crate) fn named(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.iter().find(|(known, _)| *known == name);
        known.map(|&(_, kind)| kind).ok_or_else(|| {
            Error::operand(format!(
                "{name} is no op: the ops are {}",
                Self::ALL.map(|(name, _)| name).join(", ")
            ))
        })
    }

    pub(crate) const fn from_number(number: u8) -> Self {
        Self::ALL[number as usize].1
    }

    pub(crate) const fn op(self) -> OpKind {
        match self {
            Self::AllGather => OpKind::AllGatherGemm,
            Self::ReduceScatter => OpKind::GemmReduceScatter,
            Self::AllReduce => OpKind::GemmAllReduce,
        }
    }

    fn of(op: OpKind) -> Self {
        match op.sums_to() {
            SumsTo::Nothing => Self::AllGather,
            SumsTo::Rows => Self::ReduceScatter,
            SumsTo::All => Self::AllReduce,
        }
    }

    /// The name in Python.
    const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
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

    /// The error of a weight that is not this rank's part, `[n_r, k_r]`, of features that are split
    /// in such groups.
    fn wrong_part(self, name: &str, found: [usize; 2], part: [usize; 2], group: u32) -> Error {
        let group = if group == 8 { String::new() } else { format!(", multiple={group}") };
        let which = match self {
            // As `n` of several weights is named: weight[1], n[1].
            Self::AllGather => {
                format!("full[comm.features({}{group})]", name.replace("weight", "n"))
            }
            Self::ReduceScatter | Self::AllReduce => format!("full[:, comm.features(k{group})]"),
        };
        Error::operand(format!(
            "{name} is {found:?}, and this rank's part is {part:?}: give {which}"
        ))
    }

    /// Global `n` and `k`, by the extents of the weight and, where the caller says it, the extent
    /// that is split.
    fn extents(
        self,
        [rows, cols]: [usize; 2],
        split: Option<usize>,
        world: usize,
    ) -> (usize, usize) {
        match self {
            Self::AllGather => (split.unwrap_or(rows * world), cols),
            Self::ReduceScatter | Self::AllReduce => (rows, split.unwrap_or(cols * world)),
        }
    }
}

/// The `eps` of a norm.
#[expect(
    clippy::cast_possible_truncation,
    reason = "norms are computed in fp32; an infinite eps is refused by the build"
)]
pub(crate) fn epsilon(eps: f64) -> Epsilon {
    (eps as f32).into()
}

/// A weight of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallWeight {
    pub(crate) weight: Weight,
    /// `n` of an op that gathers, else `k`, of all ranks together. `None`: the weight's times their
    /// number.
    pub(crate) split: Option<usize>,
}

/// One call: the operands of this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'s> {
    pub(crate) kind: Kind,
    pub(crate) activation: NamedActivation,
    /// Rows of all ranks together.
    pub(crate) m: usize,
    /// All of them, with weights as they are stored.
    pub(crate) operands: Operands<RawTensor>,
    /// Element types, of partial sums too.
    pub(crate) numerics: Numerics,
    /// One, or up to four that share the gathered rows.
    pub(crate) weights: &'s [CallWeight],
    pub(crate) norm: Option<NormSpec>,
    pub(crate) stream: Stream<'s>,
}

/// What all ops of a communicator are built with; the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most rows of a call, of all ranks together.
    pub(crate) max_m: usize,
    /// SMs that calls leave to other kernels.
    pub(crate) sm_margin: u32,
    /// Whether a row's bits do not depend on the rows beside it.
    pub(crate) batch_invariant: bool,
}

/// The ops of one communicator.
pub(crate) struct Ops {
    comm: Communicator,
    limits: Limits,
    built: RwLock<HashMap<OpSpec, Arc<FusedLinear>>>,
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
    /// The operands are as [`FusedLinear::run`] asks.
    pub(crate) unsafe fn call(&self, call: &Call<'_>) -> Result<(), Error> {
        let op = self.op(&self.spec(call)?, Some(call.m), call.stream)?;
        let (rank, count) = (self.comm.rank(), call.weights.len());
        for (index, of) in call.weights.iter().enumerate() {
            let (found, part) =
                (of.weight.extents, [op.weight_columns(index, rank).len(), op.inner(rank).len()]);
            if found != part {
                let (weight, group) =
                    (name(Operand::W, index, count), call.numerics.row_multiple());
                return Err(call.kind.wrong_part(weight, found, part, group));
            }
        }
        // SAFETY: as the caller has vouched.
        unsafe { op.run(&call.operands, call.stream) }.map_err(|error| Error::of_call(error, count))
    }

    /// An op with the options of all ops of the communicator alone.
    pub(crate) fn plain(&self, kind: Kind, n: usize, k: usize, numerics: Numerics) -> OpSpec {
        let Limits { max_m, sm_margin, batch_invariant } = self.limits;
        let mut spec = OpSpec::new(kind.op(), max_m, n, k, numerics);
        spec.launch.sm_margin = sm_margin;
        spec.batch_invariant = batch_invariant;
        // SAFETY: `flux_tp.init` asks that graphs go before their communicator, and torch's graphs
        // keep the memory of their operands.
        unsafe { spec.allow_captures() };
        spec
    }

    /// The op of a call, whose weights and results are checked against each other.
    fn spec(&self, call: &Call<'_>) -> Result<OpSpec, Error> {
        let world = self.comm.world_size().get() as usize;
        let Call { kind, activation, m, ref operands, weights, .. } = *call;
        let (first, count) = (&weights[0], weights.len());
        let columns = |of: &CallWeight| kind.extents(of.weight.extents, of.split, world).0;
        for (index, of) in weights.iter().enumerate() {
            let [rows, cols] = of.weight.extents;
            let out = name(Operand::Y, index, count);
            let found = operands.get(Operand::Y, index).map(|y| [y.layout.rows, y.layout.cols]);
            let found = found.unwrap_or_default();
            let needed = kind.result(m, activation.columns(rows), &self.comm);
            if found != needed {
                return Err(Error::operand(format!(
                    "{out} is {found:?}, and the result of m = {m} is {needed:?}"
                )));
            }
            if index == 0 {
                continue;
            }
            if cols != first.weight.extents[1] {
                let words = format!(
                    "{} is {:?}, and weight[0] {:?}",
                    name(Operand::W, index, count),
                    of.weight.extents,
                    first.weight.extents
                );
                return Err(Error::operand(format!("{words}: give weights with the columns of x")));
            }
            for operand in further_inputs().filter(|operand| operand.is_of_weight()) {
                let has = |weight| operands.get(operand, weight).is_some();
                if has(index) != has(0) {
                    let [name, first] = [index, 0].map(|index| name(operand, index, count));
                    return Err(Error::operand(format!(
                        "{name} and {first} are not both given: give all weights a {}, or none",
                        operand.name(0)
                    )));
                }
            }
        }
        let several = weights.len() > 1;
        let transposed =
            weights.iter().position(|of| of.weight.layout == WeightLayout::Kn).filter(|_| several);
        if let Some(index) = transposed {
            let name = name(Operand::W, index, count);
            let words = format!(
                "several weights are read as [n, k], and {name} is a transposed view: give it as a \
                 contiguous [n, k]"
            );
            return Err(Error::operand(words));
        }
        let n = total(weights.iter().map(columns));
        let k = kind.extents(first.weight.extents, first.split, world).1;
        let mut spec = self.plain(kind, n, k, call.numerics);
        spec.columns = several.then(|| weights.iter().map(columns).collect());
        spec.weights = first.weight.layout;
        spec.epilogue = EpilogueSpec {
            operands: Operand::optional()
                .filter(|&operand| operands.get(operand, 0).is_some())
                .collect(),
            activation: activation.activation,
            gates: activation.gates,
            rms_norm: call.norm,
        };
        Ok(spec)
    }

    /// Builds the op where there is none. Collective. `m`: rows of the call it is built for.
    pub(crate) fn op(
        &self,
        spec: &OpSpec,
        m: Option<usize>,
        stream: Stream<'_>,
    ) -> Result<Arc<FusedLinear>, Error> {
        if let Some(op) = self.known(spec) {
            return Ok(op);
        }
        let _one = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(op) = self.known(spec) {
            return Ok(op);
        }
        if is_capturing(stream) {
            return Err(Error::new(
                Class::Build,
                format!(
                    "{} of n = {}, k = {} is built on its first call, and the stream is being \
                     captured: call flux_tp.prepare, or the op once, before the capture",
                    Kind::of(spec.kind).name(),
                    spec.n,
                    spec.k
                ),
            ));
        }
        self.agree_on_rows(Kind::of(spec.kind), m)?;
        let op = Arc::new(FusedLinear::build(spec.clone(), &self.comm)?);
        self.built
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(spec.clone(), Arc::clone(&op));
        Ok(op)
    }

    /// Finds ranks whose first calls have other rows, while nothing is launched. A rank takes its
    /// own rows times their number for `m` where the caller does not say it.
    fn agree_on_rows(&self, kind: Kind, m: Option<usize>) -> Result<(), Error> {
        let own = m.map(|m| (m as u64).to_le_bytes());
        let answers = self.comm.exchange(own.as_ref().map_or(&[], |bytes| bytes.as_slice()))?;
        let rows: Vec<u64> = answers
            .iter()
            .filter_map(|answer| answer.as_slice().try_into().ok().map(u64::from_le_bytes))
            .collect();
        if rows.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(());
        }
        let remedy = match kind {
            Kind::AllGather => "give m=, the rows of all ranks together, on every rank",
            Kind::ReduceScatter | Kind::AllReduce => "give x with all rows on every rank",
        };
        Err(Error::new(
            Class::Disagreed,
            format!("the ranks call {} with m = {rows:?}, by rank: {remedy}", kind.name()),
        ))
    }

    fn known(&self, spec: &OpSpec) -> Option<Arc<FusedLinear>> {
        self.built.read().unwrap_or_else(PoisonError::into_inner).get(spec).map(Arc::clone)
    }
}

/// `n` of all weights; one that no memory holds is refused by the build.
pub(crate) fn total(columns: impl Iterator<Item = usize>) -> usize {
    columns.reduce(usize::saturating_add).unwrap_or(0)
}

fn is_capturing(stream: Stream<'_>) -> bool {
    use cudarc::driver::sys::{CUstream, CUstreamCaptureStatus, cuStreamIsCapturing};
    let Some(stream) = stream.raw() else { return false };
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller's stream, which is alive; `status` is a place for the answer.
    let _code = unsafe { cuStreamIsCapturing(stream as CUstream, &raw mut status) };
    status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}
