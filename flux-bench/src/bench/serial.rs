//! The serial path: what its contenders on GPUs and on the host have in common.
//!
//! Invariant: it has the next number of rows that libraries take.

use crate::harness::{Fill, MadeBy, OperandSet, Operands, RankContext, Verdict};
use flux_core::{Nodes, Problem, SumsTo};
use flux_kernels::Element;
use flux_ops::EpilogueSpec;

/// cuBLASLt refuses columns of scales of blocks that are no multiple of 16 bytes.
const ROWS_OF_BLOCK_SCALES: u32 = 4;

/// The problem with its rows padded, where a collective needs shards of equal length, or cuBLASLt
/// some multiple of rows.
pub(super) fn of_libraries(problem: &Problem) -> anyhow::Result<Problem> {
    let of_shards = match problem.op().sums_to() {
        SumsTo::Nothing | SumsTo::Rows => problem.world().get(),
        SumsTo::All => 1,
    };
    let has_blocks = problem.numerics().scales.along_k().is_some();
    let of_scales = if has_blocks { ROWS_OF_BLOCK_SCALES } else { 1 };
    let mut steps = (1..=of_scales).map(|times| times * of_shards);
    let step = steps.find(|step| step.is_multiple_of(of_scales)).unwrap_or(of_shards);
    Ok(problem.with_m(problem.m().next_multiple_of(step))?)
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
