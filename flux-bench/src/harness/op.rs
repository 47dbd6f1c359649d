//! A fused op, chosen by the problem.

use crate::harness::EpilogueSpec;
use crate::harness::epilogue::EPS;
use crate::plan::Overrides;
use anyhow::bail;
use flux_core::plan::Plan;
use flux_core::{OpKind, Partials, Problem};
use flux_kernels::Element;
use flux_ops::{
    Activation, AllGatherGemm, Builder, CallError, EpilogueArgs, Execution, GemmAllReduce,
    GemmReduceScatter, TensorMut, TensorRef, Timeline, TimelineError, WeightOperands,
};
use flux_transport::{Communicator, Fault, Stream};

/// The ops that ranks of `comm` can make: a GEMM-AllReduce crosses no nodes of several ranks.
pub(crate) fn ops_on(comm: &Communicator) -> &'static [OpKind] {
    if comm.nodes().are_mixed() {
        &[OpKind::AllGatherGemm, OpKind::GemmReduceScatter]
    } else {
        &OpKind::ALL
    }
}

/// An op with what is known of its calls with the most rows.
#[derive(Debug)]
pub(crate) struct FusedOp<T> {
    op: Kind<T>,
    problem: Problem,
    plan: Plan,
    execution: Execution,
}

#[derive(Debug)]
enum Kind<T> {
    AllGather(AllGatherGemm<T>),
    ReduceScatter(GemmReduceScatter<T>),
    AllReduce(GemmAllReduce<T>),
}

impl<T: Element> FusedOp<T> {
    /// Builds `problem` on `comm` with `overrides`; collective.
    pub(crate) fn build(
        problem: &Problem,
        comm: &Communicator,
        overrides: Overrides,
    ) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, overrides, EpilogueSpec::default(), false)
    }

    /// As [`Self::build`], with an epilogue.
    pub(crate) fn build_with(
        problem: &Problem,
        comm: &Communicator,
        overrides: Overrides,
        epilogue: EpilogueSpec,
    ) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, overrides, epilogue, false)
    }

    /// As [`Self::build`], with a time line of each call.
    pub(crate) fn build_traced(
        problem: &Problem,
        comm: &Communicator,
        overrides: Overrides,
    ) -> anyhow::Result<Self> {
        Self::build_as(problem, comm, overrides, EpilogueSpec::default(), true)
    }

    fn build_as(
        problem: &Problem,
        comm: &Communicator,
        overrides: Overrides,
        epilogue: EpilogueSpec,
        trace: bool,
    ) -> anyhow::Result<Self> {
        let numerics = problem.numerics();
        if numerics.with_partials(Partials::Output) != T::DTYPE.into() {
            bail!("a problem of {numerics} elements cannot be built for {}", T::DTYPE);
        }
        let (m, n, k) = (problem.m() as usize, problem.n() as usize, problem.k() as usize);
        if problem.op().reduces() && epilogue.activation != Activation::None {
            bail!(
                "{} takes no activation, and {} was asked for",
                problem.op(),
                epilogue.activation
            );
        }
        if problem.op().reduces() && epilogue.gates.is_some() {
            bail!("{} takes no gates", problem.op());
        }
        let op = match problem.op() {
            OpKind::AllGatherGemm => {
                let builder = AllGatherGemm::builder(m, n, k)
                    .bias(epilogue.bias)
                    .activation(epilogue.activation);
                let builder =
                    if let Some(layout) = epilogue.gates { builder.gated(layout) } else { builder };
                let columns: Vec<_> = problem.weights().iter().map(|&n| n as usize).collect();
                let builder =
                    if columns.len() > 1 { builder.several_weights(&columns) } else { builder };
                Kind::AllGather(with(builder, overrides).trace(trace).build(comm)?)
            }
            OpKind::GemmReduceScatter => {
                let builder = GemmReduceScatter::builder(m, n, k)
                    .bias(epilogue.bias)
                    .residual(epilogue.residual);
                let builder = builder.partials(numerics.partials);
                let builder = if epilogue.norm { builder.rms_norm(EPS) } else { builder };
                Kind::ReduceScatter(with(builder, overrides).trace(trace).build(comm)?)
            }
            OpKind::GemmAllReduce => {
                let builder =
                    GemmAllReduce::builder(m, n, k).bias(epilogue.bias).residual(epilogue.residual);
                let builder = builder.partials(numerics.partials);
                let builder = if epilogue.norm { builder.rms_norm(EPS) } else { builder };
                Kind::AllReduce(with(builder, overrides).trace(trace).build(comm)?)
            }
        };
        let (plan, execution) = match &op {
            Kind::AllGather(op) => (op.plan(m)?, op.execution(m)?),
            Kind::ReduceScatter(op) => (op.plan(m)?, op.execution(m)?),
            Kind::AllReduce(op) => (op.plan(m)?, op.execution(m)?),
        };
        Ok(Self { op, problem: epilogue.problem(*problem)?, plan, execution })
    }

    pub(crate) fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        epilogue: EpilogueArgs<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        match &self.op {
            Kind::AllGather(op) => op.forward_with(x, w, epilogue, y, stream),
            Kind::ReduceScatter(op) => op.forward_with(x, w, epilogue, y, stream),
            Kind::AllReduce(op) => op.forward_with(x, w, epilogue, y, stream),
        }
    }

    /// As [`Self::forward`], of an op with several weights.
    pub(crate) fn forward_several(
        &self,
        x: &TensorRef<'_, T>,
        weights: &[WeightOperands<'_, T>],
        stream: Stream<'_>,
    ) -> anyhow::Result<()> {
        let Kind::AllGather(op) = &self.op else { bail!("{} takes one weight", self.problem.op()) };
        Ok(op.forward_several(x, weights, None, stream)?)
    }

    pub(crate) fn timeline(&self, stream: Stream<'_>) -> Result<Timeline, TimelineError> {
        match &self.op {
            Kind::AllGather(op) => op.timeline(stream),
            Kind::ReduceScatter(op) => op.timeline(stream),
            Kind::AllReduce(op) => op.timeline(stream),
        }
    }

    pub(crate) fn status(&self) -> Result<(), Fault> {
        match &self.op {
            Kind::AllGather(op) => op.status(),
            Kind::ReduceScatter(op) => op.status(),
            Kind::AllReduce(op) => op.status(),
        }
    }

    /// The problem with the most rows.
    pub(crate) const fn problem(&self) -> &Problem {
        &self.problem
    }

    pub(crate) const fn execution(&self) -> &Execution {
        &self.execution
    }

    pub(crate) const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan of calls with fewer rows.
    pub(crate) fn plan_of(&self, problem: &Problem) -> Result<Plan, CallError> {
        match &self.op {
            Kind::AllGather(op) => op.plan(problem.m() as usize),
            Kind::ReduceScatter(op) => op.plan(problem.m() as usize),
            Kind::AllReduce(op) => op.plan(problem.m() as usize),
        }
    }
}

/// Tells a builder what is not left to the op.
fn with<Op>(
    builder: Builder<Op>,
    Overrides { plan, workers, batch_invariant }: Overrides,
) -> Builder<Op> {
    let mut builder = builder.batch_invariant(batch_invariant);
    if let Some(plan) = plan {
        builder = builder.plan(plan);
    }
    match workers {
        Some(workers) => builder.workers(workers),
        None => builder,
    }
}
