//! A fused op of a problem, as the command line asks for it.

use crate::plan::Overrides;
use flux_core::{OpKind, Problem};
use flux_ops::{EpilogueSpec, FusedLinear, OpSpec};
use flux_transport::{Communicator, Mover};

/// The ops that ranks of `comm` can make: only a library's collective carries a GEMM-AllReduce
/// across nodes of several ranks.
pub(crate) fn ops_on(comm: &Communicator) -> &'static [OpKind] {
    let collectives =
        matches!(comm.capabilities().mover, Mover::Messages { collectives: true, .. });
    if comm.nodes().are_mixed() && !collectives {
        &[OpKind::AllGatherGemm, OpKind::GemmReduceScatter]
    } else {
        &OpKind::ALL
    }
}

/// Builds the op of a problem on `comm` with `overrides`; collective.
pub(crate) fn build(
    problem: &Problem,
    comm: &Communicator,
    overrides: Overrides,
) -> anyhow::Result<FusedLinear> {
    build_with(problem, comm, overrides, EpilogueSpec::default())
}

/// As [`build`], with an epilogue.
pub(crate) fn build_with(
    problem: &Problem,
    comm: &Communicator,
    overrides: Overrides,
    epilogue: EpilogueSpec,
) -> anyhow::Result<FusedLinear> {
    let mut spec = OpSpec::of_problem(problem);
    spec.epilogue = epilogue;
    spec.plan = overrides.plan;
    spec.launch.workers = overrides.workers;
    spec.launch.trace = overrides.trace;
    spec.batch_invariant = overrides.batch_invariant;
    Ok(FusedLinear::build(spec, comm)?)
}
