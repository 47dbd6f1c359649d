//! Either fused op, chosen by the problem.

use crate::harness::EpilogueSpec;
use crate::plan::Plan;
use anyhow::bail;
use flux_core::program::Schedule;
use flux_core::{OpKind, Problem};
use flux_kernels::Element;
use flux_ops::{Activation, AllGatherGemm, CallError, GemmReduceScatter, TensorMut, TensorRef, Timeline, TimelineError};
use flux_transport::{Communicator, Fault, Stream};

/// A built op.
#[derive(Debug)]
pub enum FusedOp<T> {
    /// AllGather-GEMM.
    AllGather(AllGatherGemm<T>),
    /// GEMM-ReduceScatter.
    ReduceScatter(GemmReduceScatter<T>),
}

impl<T: Element> FusedOp<T> {
    /// Builds `problem` on `comm`, whose world it is for, as `plan` says; collective.
    ///
    /// # Errors
    /// What the op's `build` says.
    pub fn build(problem: &Problem, comm: &Communicator, plan: &Plan) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, plan, EpilogueSpec::default(), false)
    }

    /// The same, with a bias and an activation.
    ///
    /// # Errors
    /// As [`Self::build`], and GEMM-ReduceScatter with an activation.
    pub fn build_with(problem: &Problem, comm: &Communicator, plan: &Plan, epilogue: EpilogueSpec) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, plan, epilogue, false)
    }

    /// The same, with each call leaving its time line.
    ///
    /// # Errors
    /// As [`Self::build`]; on the host there are no time lines.
    pub fn build_traced(problem: &Problem, comm: &Communicator, plan: &Plan) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, plan, EpilogueSpec::default(), true)
    }

    fn build_as(problem: &Problem, comm: &Communicator, plan: &Plan, epilogue: EpilogueSpec, trace: bool) -> anyhow::Result<Self> {
        if problem.dtype() != T::DTYPE {
            bail!("a problem of {} elements cannot be built for {}", problem.dtype(), T::DTYPE);
        }
        let (m, n, k) = (problem.m() as usize, problem.n() as usize, problem.k() as usize);
        Ok(match problem.op() {
            OpKind::AllGatherGemm => {
                let builder = AllGatherGemm::builder(m, n, k).bias(epilogue.bias).activation(epilogue.activation);
                Self::AllGather(plan.apply(builder, problem, comm).trace(trace).build(comm)?)
            }
            OpKind::GemmReduceScatter => {
                if epilogue.activation != Activation::None {
                    bail!("{} takes no activation, and {} was asked for", problem.op(), epilogue.activation);
                }
                let builder = GemmReduceScatter::builder(m, n, k).bias(epilogue.bias);
                Self::ReduceScatter(plan.apply(builder, problem, comm).trace(trace).build(comm)?)
            }
        })
    }

    /// The op's `forward`, or `forward_with_bias` where there is one.
    ///
    /// # Errors
    /// What the op says.
    pub fn forward(
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
            (Self::ReduceScatter(op), Some(bias)) => op.forward_with_bias(x, w, bias, y, stream),
        }
    }

    /// The op's `timeline`.
    ///
    /// # Errors
    /// What the op says.
    pub fn timeline(&self, stream: Stream) -> Result<Timeline, TimelineError> {
        match self {
            Self::AllGather(op) => op.timeline(stream),
            Self::ReduceScatter(op) => op.timeline(stream),
        }
    }

    /// The op's `status`.
    ///
    /// # Errors
    /// The fault that broke the communicator.
    pub fn status(&self) -> Result<(), Fault> {
        match self {
            Self::AllGather(op) => op.status(),
            Self::ReduceScatter(op) => op.status(),
        }
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        match self {
            Self::AllGather(op) => op.problem(),
            Self::ReduceScatter(op) => op.problem(),
        }
    }

    /// Who works, in words.
    pub fn executor(&self) -> String {
        match self {
            Self::AllGather(op) => op.executor(),
            Self::ReduceScatter(op) => op.executor(),
        }
    }

    /// The schedule in use.
    pub fn schedule(&self) -> &Schedule {
        match self {
            Self::AllGather(op) => op.schedule(),
            Self::ReduceScatter(op) => op.schedule(),
        }
    }
}
