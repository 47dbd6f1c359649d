//! A fused op, chosen by the problem.

use crate::harness::EpilogueSpec;
use crate::plan::Overrides;
use anyhow::bail;
use flux_core::plan::Plan;
use flux_core::{OpKind, Problem};
use flux_kernels::Element;
use flux_ops::{
    Activation, AllGatherGemm, Builder, CallError, Execution, GemmAllReduce, GemmReduceScatter, TensorMut, TensorRef, Timeline,
    TimelineError,
};
use flux_transport::{Communicator, Fault, Stream};

/// The ops that ranks of `comm` can make: a GEMM-AllReduce crosses no nodes of several ranks.
pub(crate) fn ops_on(comm: &Communicator) -> &'static [OpKind] {
    if comm.nodes().are_mixed() { &[OpKind::AllGatherGemm, OpKind::GemmReduceScatter] } else { &OpKind::ALL }
}

#[derive(Debug)]
pub(crate) enum FusedOp<T> {
    AllGather(AllGatherGemm<T>),
    ReduceScatter(GemmReduceScatter<T>),
    AllReduce(GemmAllReduce<T>),
}

impl<T: Element> FusedOp<T> {
    /// Builds `problem` on `comm` with `overrides`; collective.
    pub(crate) fn build(problem: &Problem, comm: &Communicator, overrides: Overrides) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, overrides, EpilogueSpec::default(), false)
    }

    /// As [`Self::build`], with a bias and an activation.
    pub(crate) fn build_with(problem: &Problem, comm: &Communicator, overrides: Overrides, epilogue: EpilogueSpec) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, overrides, epilogue, false)
    }

    /// As [`Self::build`], with a time line of each call.
    pub(crate) fn build_traced(problem: &Problem, comm: &Communicator, overrides: Overrides) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, overrides, EpilogueSpec::default(), true)
    }

    fn build_as(problem: &Problem, comm: &Communicator, overrides: Overrides, epilogue: EpilogueSpec, trace: bool) -> anyhow::Result<Self> {
        if problem.dtype() != T::DTYPE {
            bail!("a problem of {} elements cannot be built for {}", problem.dtype(), T::DTYPE);
        }
        let (m, n, k) = (problem.m() as usize, problem.n() as usize, problem.k() as usize);
        if problem.op().reduces() && epilogue.activation != Activation::None {
            bail!("{} takes no activation, and {} was asked for", problem.op(), epilogue.activation);
        }
        Ok(match problem.op() {
            OpKind::AllGatherGemm => {
                let builder = AllGatherGemm::builder(m, n, k).bias(epilogue.bias).activation(epilogue.activation);
                Self::AllGather(with(builder, overrides).trace(trace).build(comm)?)
            }
            OpKind::GemmReduceScatter => {
                let builder = GemmReduceScatter::builder(m, n, k).bias(epilogue.bias);
                Self::ReduceScatter(with(builder, overrides).trace(trace).build(comm)?)
            }
            OpKind::GemmAllReduce => {
                let builder = GemmAllReduce::builder(m, n, k).bias(epilogue.bias);
                Self::AllReduce(with(builder, overrides).trace(trace).build(comm)?)
            }
        })
    }

    pub(crate) fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: Option<&TensorRef<'_, T>>,
        y: &mut TensorMut<'_, T>,
        stream: Stream,
    ) -> Result<(), CallError> {
        match (self, bias) {
            (Self::AllGather(op), None) => op.forward(x, w, y, stream),
            (Self::AllGather(op), Some(bias)) => op.forward_with_bias(x, w, bias, y, stream),
            (Self::ReduceScatter(op), None) => op.forward(x, w, y, stream),
            (Self::AllReduce(op), None) => op.forward(x, w, y, stream),
            (Self::ReduceScatter(op), Some(bias)) => op.forward_with_bias(x, w, bias, y, stream),
            (Self::AllReduce(op), Some(bias)) => op.forward_with_bias(x, w, bias, y, stream),
        }
    }

    pub(crate) fn timeline(&self, stream: Stream) -> Result<Timeline, TimelineError> {
        match self {
            Self::AllGather(op) => op.timeline(stream),
            Self::ReduceScatter(op) => op.timeline(stream),
            Self::AllReduce(op) => op.timeline(stream),
        }
    }

    pub(crate) fn status(&self) -> Result<(), Fault> {
        match self {
            Self::AllGather(op) => op.status(),
            Self::ReduceScatter(op) => op.status(),
            Self::AllReduce(op) => op.status(),
        }
    }

    pub(crate) fn problem(&self) -> &Problem {
        match self {
            Self::AllGather(op) => op.problem(),
            Self::ReduceScatter(op) => op.problem(),
            Self::AllReduce(op) => op.problem(),
        }
    }

    pub(crate) fn execution(&self) -> Execution {
        match self {
            Self::AllGather(op) => op.execution(),
            Self::ReduceScatter(op) => op.execution(),
            Self::AllReduce(op) => op.execution(),
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        match self {
            Self::AllGather(op) => op.plan(),
            Self::ReduceScatter(op) => op.plan(),
            Self::AllReduce(op) => op.plan(),
        }
    }
}

/// Tells a builder what is not left to the op.
fn with<Op>(mut builder: Builder<Op>, Overrides { plan, workers }: Overrides) -> Builder<Op> {
    if let Some(plan) = plan {
        builder = builder.plan(plan);
    }
    match workers {
        Some(workers) => builder.workers(workers),
        None => builder,
    }
}
