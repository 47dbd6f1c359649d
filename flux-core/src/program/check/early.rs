//! Rule: an item that adds partial tiles while it multiplies adds all that are early, multiplies
//! all steps along `k`, and awaits each before its step.
//!
//! A kernel adds as many as the program says, at steps that follow from all of `k`: with fewer
//! partial tiles it would take another's slot for one, and with fewer steps it would wait for
//! operands that nobody loads.

use super::{Record, Violation};
use crate::OpKind;
use crate::program::{EARLY_GAP, TileProgram, WorkItem, sink};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    if p.problem.op() == OpKind::AllGatherGemm {
        return Ok(());
    }
    let (rank, all) = (p.rank, p.k_steps());
    for (index, item) in p.items.iter().enumerate() {
        let fault = |what| Err(Violation::Form { rank, record: Record::Item(index), what });
        let early = if matches!(item.sink, sink::SEND | sink::REDUCE) && item.partials > 0 { p.early } else { 0 };
        if p.early > 0 && p.early_steps().1 < EARLY_GAP {
            return fault("early partial tiles leave too few steps to each other");
        }
        if early > item.partials {
            return Err(Violation::FewerThanEarly { rank, item: index, partials: item.partials, early });
        }
        if early > 0 && item.k_steps < all {
            return Err(Violation::EarlyInPart { rank, item: index, k_steps: item.k_steps, all });
        }
        if !awaits(p, item, early) {
            return fault(
                "during the multiplication the signals of early partial tiles are awaited, each before its step, and nothing else",
            );
        }
    }
    Ok(())
}

/// Whether there is an entry for each partial tile that is added during the multiplication, at its
/// step.
fn awaits(p: &TileProgram, item: &WorkItem, early: u32) -> bool {
    let (first, gap) = p.early_steps();
    let steps = (0..early).map(|number| first + number * gap);
    p.awaits_of(item).iter().map(|entry| entry.k_step).eq(steps)
}
