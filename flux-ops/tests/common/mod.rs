//! The same tests for every machine: ranks as threads, on the host transport or on GPUs, or there
//! as processes of a launch.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]
#![allow(unreachable_pub, clippy::missing_panics_doc, reason = "shared by test binaries, not published")]

pub mod case;
#[path = "../../examples/support/device.rs"]
mod device;
pub(crate) mod gpus;
pub mod launched;
pub mod machine;
pub mod meeting;
#[path = "../../../flux-kernels/tests/skipped/mod.rs"]
pub(crate) mod skipped;
pub mod suite;
#[macro_use]
pub mod where_found;

pub use case::{Case, Values};
pub(crate) use device::Memory;
pub use machine::{Machine, Node};
pub use meeting::Meeting;

use flux_core::OpKind;
use flux_core::program::{Schedule, Sending};
use flux_kernels::Element;
use flux_ops::{
    Activation, AllGatherGemm, BuildError, Builder, CallError, GemmReduceScatter, Push, TensorMut, TensorRef, Timeline, TimelineError,
};
use flux_transport::{Communicator, Fault, Stream, TransportKind};

/// Both operations.
pub const OPS: [OpKind; 2] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter];

/// What a builder is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    pub schedule: Option<Schedule>,
    pub workers: Option<u32>,
    pub push: Push,
    pub bias: bool,
    /// AllGather-GEMM only.
    pub activation: Activation,
    pub trace: bool,
    pub sending: Option<Sending>,
}

impl Plan {
    /// Whether calls are one collective and one GEMM.
    pub fn is_sequential(&self) -> bool {
        self.sending == Some(Sending::Before)
    }

    fn tell<Op>(self, mut builder: Builder<Op>) -> Builder<Op> {
        if let Some(schedule) = self.schedule {
            builder = builder.schedule(schedule);
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        if let Some(sending) = self.sending {
            builder = builder.sending(sending);
        }
        builder.push(self.push).bias(self.bias).trace(self.trace)
    }
}

/// An op of either kind.
#[derive(Debug)]
pub enum AnyOp<T> {
    Ag(AllGatherGemm<T>),
    Rs(GemmReduceScatter<T>),
}

impl<T: Element> AnyOp<T> {
    pub fn build(op: OpKind, [m, n, k]: [usize; 3], plan: Plan, comm: &Communicator) -> Result<Self, BuildError> {
        match op {
            OpKind::AllGatherGemm => plan.tell(AllGatherGemm::builder(m, n, k)).activation(plan.activation).build(comm).map(Self::Ag),
            OpKind::GemmReduceScatter => plan.tell(GemmReduceScatter::builder(m, n, k)).build(comm).map(Self::Rs),
        }
    }

    pub fn of(case: &Case<T>, plan: Plan, node: &Node) -> Self {
        let p = &case.problem;
        // Bits are modelled of sums in rank order, which those of a collective are not.
        let sending = plan.sending.or_else(|| (node.comm.transport() == TransportKind::Nccl).then_some(Sending::ALL));
        let workers = plan.workers.or(node.workers);
        let plan = Plan { workers, bias: case.has_bias(), activation: case.activation, sending, ..plan };
        Self::build(p.op(), [p.m() as usize, p.n() as usize, p.k() as usize], plan, &node.comm).unwrap()
    }

    pub fn forward(&self, x: &TensorRef<'_, T>, w: &TensorRef<'_, T>, y: &mut TensorMut<'_, T>, stream: Stream) -> Result<(), CallError> {
        match self {
            Self::Ag(op) => op.forward(x, w, y, stream),
            Self::Rs(op) => op.forward(x, w, y, stream),
        }
    }

    pub fn forward_with_bias(
        &self,
        x: &TensorRef<'_, T>,
        w: &TensorRef<'_, T>,
        bias: &TensorRef<'_, T>,
        y: &mut TensorMut<'_, T>,
        stream: Stream,
    ) -> Result<(), CallError> {
        match self {
            Self::Ag(op) => op.forward_with_bias(x, w, bias, y, stream),
            Self::Rs(op) => op.forward_with_bias(x, w, bias, y, stream),
        }
    }

    pub fn status(&self) -> Result<(), Fault> {
        match self {
            Self::Ag(op) => op.status(),
            Self::Rs(op) => op.status(),
        }
    }

    pub fn timeline(&self, stream: Stream) -> Result<Timeline, TimelineError> {
        match self {
            Self::Ag(op) => op.timeline(stream),
            Self::Rs(op) => op.timeline(stream),
        }
    }

    pub fn explain(&self) -> String {
        match self {
            Self::Ag(op) => op.explain(),
            Self::Rs(op) => op.explain(),
        }
    }
}
