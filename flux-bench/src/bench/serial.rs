//! The serial path: what its contenders on GPUs and on the host have in common.
//!
//! Invariant: its shards are equal, as those of NCCL's collectives are. Where an op's are not, it
//! has the next number of rows with which they are.

use crate::harness::{Fill, MadeBy, OperandSet, Operands, RankContext, Verdict};
use flux_core::{Nodes, Problem, SumsTo};
use flux_kernels::Element;
use flux_ops::EpilogueSpec;

/// The problem with its rows padded, where a collective needs shards of equal length.
pub(super) fn with_equal_shards(problem: &Problem) -> anyhow::Result<Problem> {
    let padded = match problem.op().sums_to() {
        SumsTo::Nothing | SumsTo::Rows => problem.m().next_multiple_of(problem.world().get()),
        SumsTo::All => problem.m(),
    };
    Ok(problem.with_m(padded)?)
}

/// Fills a set for a call of `problem` that is to be checked, and returns what it held: integers,
/// where the serial path rounds as seldom as the op.
pub(super) fn prepare_check<X: Element, Y: Element>(
    ctx: &RankContext,
    set: &mut OperandSet<X, Y>,
    problem: Problem,
) -> anyhow::Result<Operands> {
    let held = set.held()?;
    let fill = if rounds_once(&held) { Fill::SmallInts } else { Fill::Uniform };
    ctx.fill(set, Operands { problem, fill, ..held })?;
    ctx.poison_results(set)?;
    Ok(held)
}

/// Checks what the call has left: integers for equality, and random data within the bound of an
/// unfused layer, whose sums are rounded in an order that is not known.
pub(super) fn check<X: Element, Y: Element>(
    ctx: &RankContext,
    set: &OperandSet<X, Y>,
) -> anyhow::Result<Verdict> {
    let held = set.held()?;
    let (unfused, nodes) = (!rounds_once(&held), Nodes::apart(held.problem.world()));
    Ok(ctx.verify_made_by(set, MadeBy { flattened: unfused, unfused, nodes })?.of_wrong_elements())
}

/// Whether a result is rounded once: a product of gathered rows, without an epilogue.
fn rounds_once(operands: &Operands) -> bool {
    operands.problem.op().gathers() && operands.epilogue == EpilogueSpec::default()
}
