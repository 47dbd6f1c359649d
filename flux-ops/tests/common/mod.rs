//! The same tests for every machine: ranks as threads, on the host transport or on GPUs, or there
//! as processes of a launch.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(
    clippy::unwrap_used,
    reason = "clippy knows test functions, not the functions that they call"
)]
#![allow(
    unreachable_pub,
    clippy::missing_panics_doc,
    reason = "shared by test binaries, not published"
)]

pub mod case;
#[path = "../../examples/support/device.rs"]
mod device;
pub(crate) mod gpus;
#[path = "../../../flux-transport/tests/lateness/mod.rs"]
pub(crate) mod lateness;
pub mod launched;
pub mod machine;
pub mod meeting;
pub mod plans;
#[path = "../../../flux-kernels/tests/skipped/mod.rs"]
pub(crate) mod skipped;
pub mod suite;
#[macro_use]
pub mod where_found;

pub use case::{Case, Values};
pub(crate) use device::Memory;
pub use machine::{Machine, Node};
pub use meeting::Meeting;

use flux_core::{OpKind, Partials};
use flux_kernels::Element;
use flux_ops::{
    Activation, AllGatherGemm, BuildError, Builder, CallError, CommMode, EpilogueArgs, GateLayout,
    GemmAllReduce, GemmReduceScatter, Plan, TensorMut, TensorRef, Timeline, TimelineError,
    WeightLayout,
};
use flux_transport::{Communicator, Fault, Stream, TransportKind};
use std::time::Duration;

/// A deadline of all ranks, later on a late machine. Where they are processes, every one of the
/// launch asks, so not within a run.
pub fn scaled(time: Duration) -> Duration {
    launched::launched().map_or_else(|| lateness::scaled(time), |launch| launch.scaled(time))
}

/// Every op.
pub const OPS: [OpKind; 3] = OpKind::ALL;
/// The ops that ranks of several nodes make, and that messages beside the kernel carry out.
pub const SHARDED: [OpKind; 2] = [OPS[0], OPS[1]];

/// What a builder is told.
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "options of a builder")]
pub struct OpOptions {
    pub plan: Option<Plan>,
    pub workers: Option<u32>,
    pub bias: bool,
    /// Not of AllGather-GEMM.
    pub residual: bool,
    /// Its addend; not of AllGather-GEMM.
    pub rms_norm: Option<f32>,
    pub weights: WeightLayout,
    /// AllGather-GEMM only.
    pub activation: Activation,
    /// AllGather-GEMM only.
    pub gates: Option<GateLayout>,
    pub batch_invariant: bool,
    /// Not of AllGather-GEMM.
    pub partials: Partials,
    pub trace: bool,
}

impl OpOptions {
    /// With this plan, or where there is none the builder's default.
    pub fn of(plan: impl Into<Option<Plan>>) -> Self {
        Self { plan: plan.into(), ..Self::default() }
    }

    fn tell<Op>(self, mut builder: Builder<Op>) -> Builder<Op> {
        if let Some(plan) = self.plan {
            builder = builder.plan(plan);
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        builder = builder.batch_invariant(self.batch_invariant);
        // SAFETY: the tests declare a graph after its op, its communicator and the operands.
        unsafe { builder.bias(self.bias).weights(self.weights).trace(self.trace).captures() }
    }
}

/// An op of any kind.
#[derive(Debug)]
pub enum AnyOp<T> {
    Ag(AllGatherGemm<T>),
    Rs(GemmReduceScatter<T>),
    Ar(GemmAllReduce<T>),
}

impl<T: Element> AnyOp<T> {
    pub fn build(
        op: OpKind,
        [m, n, k]: [usize; 3],
        options: OpOptions,
        comm: &Communicator,
    ) -> Result<Self, BuildError> {
        match op {
            OpKind::AllGatherGemm => {
                let builder =
                    options.tell(AllGatherGemm::builder(m, n, k)).activation(options.activation);
                let builder =
                    if let Some(layout) = options.gates { builder.gated(layout) } else { builder };
                builder.build(comm).map(Self::Ag)
            }
            OpKind::GemmReduceScatter => {
                let builder = options
                    .tell(GemmReduceScatter::builder(m, n, k))
                    .residual(options.residual)
                    .partials(options.partials);
                let builder =
                    if let Some(eps) = options.rms_norm { builder.rms_norm(eps) } else { builder };
                builder.build(comm).map(Self::Rs)
            }
            OpKind::GemmAllReduce => {
                let builder = options
                    .tell(GemmAllReduce::builder(m, n, k))
                    .residual(options.residual)
                    .partials(options.partials);
                let builder =
                    if let Some(eps) = options.rms_norm { builder.rms_norm(eps) } else { builder };
                builder.build(comm).map(Self::Ar)
            }
        }
    }

    /// The op of several weights, one for each case.
    pub fn of_several(cases: &[Case<T>], options: OpOptions, node: &Node) -> Self {
        let columns: Vec<_> = cases.iter().map(|case| case.problem.n() as usize).collect();
        let (first, n) = (&cases[0], columns.iter().sum());
        let options = OpOptions {
            workers: options.workers.or(node.workers),
            bias: first.has_bias(),
            ..options
        };
        let builder =
            AllGatherGemm::builder(first.problem.m() as usize, n, first.problem.k() as usize);
        let builder = options.tell(builder).activation(first.activation).several_weights(&columns);
        Self::Ag(builder.build(&node.comm).unwrap())
    }

    /// The op of a case, with its bias, residual, activation and gates. Without a plan, messages
    /// over NCCL go beside the kernel: a library's collective adds in an order that is not
    /// modelled.
    pub fn of(case: &Case<T>, options: OpOptions, node: &Node) -> Self {
        let p = &case.problem;
        let workers = options.workers.or(node.workers);
        let messages = || {
            flux_ops::ranked_plans(&node.comm, p)
                .into_iter()
                .find(|plan| plan.comm != CommMode::Sequential)
        };
        let plan = if node.comm.transport() == TransportKind::Nccl {
            options.plan.or_else(messages)
        } else {
            options.plan
        };
        let options = OpOptions {
            plan,
            workers,
            bias: case.has_bias(),
            residual: case.has_residual(),
            ..options
        };
        let options = OpOptions {
            activation: case.activation,
            gates: case.gates,
            partials: p.numerics().partials,
            ..options
        };
        Self::build(p.op(), [p.m() as usize, p.n() as usize, p.k() as usize], options, &node.comm)
            .unwrap()
    }

    pub fn forward(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        match self {
            Self::Ag(op) => op.forward(x, w, y, stream),
            Self::Rs(op) => op.forward(x, w, y, stream),
            Self::Ar(op) => op.forward(x, w, y, stream),
        }
    }

    pub fn forward_with(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        epilogue: EpilogueArgs<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        match self {
            Self::Ag(op) => op.forward_with(x, w, epilogue, y, stream),
            Self::Rs(op) => op.forward_with(x, w, epilogue, y, stream),
            Self::Ar(op) => op.forward_with(x, w, epilogue, y, stream),
        }
    }

    pub fn status(&self) -> Result<(), Fault> {
        match self {
            Self::Ag(op) => op.status(),
            Self::Rs(op) => op.status(),
            Self::Ar(op) => op.status(),
        }
    }

    pub fn timeline(&self, stream: Stream<'_>) -> Result<Timeline, TimelineError> {
        match self {
            Self::Ag(op) => op.timeline(stream),
            Self::Rs(op) => op.timeline(stream),
            Self::Ar(op) => op.timeline(stream),
        }
    }

    pub fn plan(&self, m: u32) -> Plan {
        match self {
            Self::Ag(op) => op.plan(m as usize).unwrap(),
            Self::Rs(op) => op.plan(m as usize).unwrap(),
            Self::Ar(op) => op.plan(m as usize).unwrap(),
        }
    }

    pub fn max_m(&self) -> u32 {
        match self {
            Self::Ag(op) => op.max_m() as u32,
            Self::Rs(op) => op.max_m() as u32,
            Self::Ar(op) => op.max_m() as u32,
        }
    }

    pub fn prepare(&self, rows: &[usize]) -> Result<(), CallError> {
        match self {
            Self::Ag(op) => op.prepare(rows),
            Self::Rs(op) => op.prepare(rows),
            Self::Ar(op) => op.prepare(rows),
        }
    }

    pub fn explain(&self) -> String {
        match self {
            Self::Ag(op) => op.explain(),
            Self::Rs(op) => op.explain(),
            Self::Ar(op) => op.explain(),
        }
    }
}
