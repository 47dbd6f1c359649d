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

mod check;
#[path = "../../examples/support/device.rs"]
mod device;
pub(crate) mod gpus;
#[path = "../../../flux-transport/tests/lateness/mod.rs"]
pub(crate) mod lateness;
pub mod launched;
pub mod machine;
pub mod meeting;
#[path = "../../../flux-kernels/tests/skipped/mod.rs"]
pub(crate) mod skipped;
pub mod suite;
#[macro_use]
pub mod where_found;

pub use check::Check;
pub(crate) use device::Memory;
pub use flux_testkit::{Case, Values};
pub use machine::{Machine, Node};
pub use meeting::Meeting;

use flux_core::{OpKind, Partials};
use flux_kernels::Element;
use flux_ops::{
    Activation, BuildError, CommMode, EpilogueSpec, FusedLinear, GateLayout, NormSpec, OpSpec,
    Operand, OperandSet, Plan, WeightLayout,
};
use flux_transport::{Communicator, TransportKind};
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
    /// Not of AllGather-GEMM.
    pub rms_norm: Option<NormSpec>,
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

    fn tell(self, spec: &mut OpSpec) {
        spec.plan = self.plan;
        spec.weights = self.weights;
        let operands = OperandSet::EMPTY.with(Operand::Bias, self.bias);
        spec.epilogue = EpilogueSpec {
            operands: operands.with(Operand::Residual, self.residual),
            activation: self.activation,
            gates: self.gates,
            rms_norm: self.rms_norm,
        };
        spec.numerics.partials = self.partials;
        spec.batch_invariant = self.batch_invariant;
        spec.launch.workers = self.workers;
        spec.launch.trace = self.trace;
        // SAFETY: the tests declare a graph after its op, its communicator and the operands.
        unsafe { spec.allow_captures() };
    }
}

/// Builds an op of elements of this type.
pub fn build<T: Element>(
    op: OpKind,
    [m, n, k]: [usize; 3],
    options: OpOptions,
    comm: &Communicator,
) -> Result<FusedLinear, BuildError> {
    let mut spec = OpSpec::new(op, m, n, k, T::DTYPE);
    options.tell(&mut spec);
    FusedLinear::build(spec, comm)
}

/// Builds the op of several weights, one for each case.
pub fn build_several<T: Element>(
    cases: &[Case<T>],
    options: OpOptions,
    node: &Node,
) -> FusedLinear {
    let columns: Vec<_> = cases.iter().map(|case| case.problem.n() as usize).collect();
    let first = &cases[0];
    let [m, k] = [first.problem.m(), first.problem.k()].map(|extent| extent as usize);
    let mut spec = OpSpec::new(OpKind::AllGatherGemm, m, columns.iter().sum(), k, T::DTYPE);
    let workers = options.workers.or(node.workers);
    let (bias, activation) = (first.has_bias(), first.activation);
    OpOptions { workers, bias, activation, ..options }.tell(&mut spec);
    spec.columns = Some(columns);
    FusedLinear::build(spec, &node.comm).unwrap()
}

/// Builds the op of a case, with its bias, residual, activation and gates. Without a plan, messages
/// over NCCL go beside the kernel: a library's collective adds in an order that is not modelled.
pub fn build_case<T: Element>(case: &Case<T>, options: OpOptions, node: &Node) -> FusedLinear {
    let p = &case.problem;
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
        workers: options.workers.or(node.workers),
        bias: case.has_bias(),
        residual: case.has_residual(),
        activation: case.activation,
        gates: case.gates,
        partials: p.numerics().partials,
        ..options
    };
    build::<T>(p.op(), [p.m(), p.n(), p.k()].map(|extent| extent as usize), options, &node.comm)
        .unwrap()
}
