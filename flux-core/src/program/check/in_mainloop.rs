//! Rule: an item with mainloop partial tiles adds all that the program counts, multiplies all of
//! `k`, and awaits each partial tile before its step.
//!
//! The kernel adds as many as the program counts, at steps that follow from all of `k`. With fewer
//! it would read another tile's slot, or wait for operands that nobody loads.

use super::{Record, Violation};
use crate::program::mainloop::gap;
use crate::program::{Sink, TileProgram, WorkItem};

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    if p.problem.op().gathers() {
        return Ok(());
    }
    let (rank, all) = (p.rank, p.k_steps());
    for (index, item) in p.items.iter().enumerate() {
        let violation = |what| Err(Violation::Form { rank, record: Record::Item(index), what });
        let in_mainloop = if matches!(item.sink, Sink::Send | Sink::Reduce) && item.partials > 0 {
            p.in_mainloop
        } else {
            0
        };
        if p.in_mainloop > 0 && p.in_mainloop_steps().1 < gap(&p.problem) {
            return violation("mainloop partial tiles are too few steps apart");
        }
        if in_mainloop > item.partials {
            return Err(Violation::FewerThanInMainloop {
                rank,
                item: index,
                partials: item.partials,
                in_mainloop,
            });
        }
        if in_mainloop > 0 && item.k_steps < all {
            return Err(Violation::InMainloopOfPart {
                rank,
                item: index,
                k_steps: item.k_steps,
                all,
            });
        }
        if !awaits(p, item, in_mainloop) {
            return violation(
                "the mainloop awaits its partial tiles, each before its step, and nothing else",
            );
        }
    }
    Ok(())
}

/// Whether each mainloop partial tile has an await at its step.
fn awaits(p: &TileProgram, item: &WorkItem, in_mainloop: u32) -> bool {
    let (first, gap) = p.in_mainloop_steps();
    let steps = (0..in_mainloop).map(|number| first + number * gap);
    p.awaits_of(item).iter().map(|entry| entry.k_step).eq(steps)
}
