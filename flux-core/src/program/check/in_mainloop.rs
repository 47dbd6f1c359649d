//! Rule: an item that adds partial tiles while it multiplies adds all that are early, multiplies
//! all steps along `k`, and awaits each before its step.
//!
//! A kernel adds as many as the program says, at steps that follow from all of `k`: with fewer
//! partial tiles it would take another's slot for one, and with fewer steps it would wait for
//! operands that nobody loads.

use super::{Record, Violation};
use crate::OpKind;
use crate::program::{MAINLOOP_GAP, TileProgram, WorkItem, sink};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    if p.problem.op() == OpKind::AllGatherGemm {
        return Ok(());
    }
    let (rank, all) = (p.rank, p.k_steps());
    for (index, item) in p.items.iter().enumerate() {
        let fault = |what| Err(Violation::Form { rank, record: Record::Item(index), what });
        let in_mainloop = if matches!(item.sink, sink::SEND | sink::REDUCE) && item.partials > 0 { p.in_mainloop } else { 0 };
        if p.in_mainloop > 0 && p.in_mainloop_steps().1 < MAINLOOP_GAP {
            return fault("early partial tiles leave too few steps to each other");
        }
        if in_mainloop > item.partials {
            return Err(Violation::FewerThanInMainloop { rank, item: index, partials: item.partials, in_mainloop });
        }
        if in_mainloop > 0 && item.k_steps < all {
            return Err(Violation::InMainloopOfPart { rank, item: index, k_steps: item.k_steps, all });
        }
        if !awaits(p, item, in_mainloop) {
            return fault(
                "during the multiplication the signals of in_mainloop partial tiles are awaited, each before its step, and nothing else",
            );
        }
    }
    Ok(())
}

/// Whether there is an entry for each partial tile that is added during the multiplication, at its
/// step.
fn awaits(p: &TileProgram, item: &WorkItem, in_mainloop: u32) -> bool {
    let (first, gap) = p.in_mainloop_steps();
    let steps = (0..in_mainloop).map(|number| first + number * gap);
    p.awaits_of(item).iter().map(|entry| entry.k_step).eq(steps)
}
