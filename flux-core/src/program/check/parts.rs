//! Rule: the items of a tile multiply each step along `k` once, in the order in which parts are
//! added. Each split-K slot has one partial item and one reader of the same tile, which awaits the
//! partial items in that order.

use super::Violation;
use crate::program::{Sink, TileProgram, WorkItem};
use std::collections::BTreeMap;

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    let rank = p.rank;
    let partial_items = p.items.iter().enumerate().filter(|(_, item)| item.sink == Sink::Partial);
    let partials: BTreeMap<u32, usize> =
        partial_items.map(|(index, item)| (item.part, index)).collect();
    let mut readers: BTreeMap<u32, usize> = BTreeMap::new();
    for (index, fix_up) in p
        .items
        .iter()
        .enumerate()
        .filter(|(_, item)| !matches!(item.sink, Sink::Partial | Sink::ReduceRows | Sink::Copy))
    {
        let split = |step| Err(Violation::KNotCovered { rank, item: index, step });
        if fix_up.k_first != 0 {
            return split(0);
        }
        let mut step = fix_up.k_steps;
        for (number, part) in (0..fix_up.parts as usize).zip(fix_up.part..) {
            if let Some(first) = readers.insert(part, index) {
                return Err(Violation::PartReadTwice { rank, part, first, second: index });
            }
            let Some(&partial_item) = partials.get(&part) else {
                return Err(Violation::PartMissing { rank, item: index, part });
            };
            let partial = &p.items[partial_item];
            if tile(partial) != tile(fix_up) {
                return Err(Violation::WrongPart { rank, item: index, part, partial_item });
            }
            if partial.k_first != step {
                return split(step);
            }
            step += partial.k_steps;
            // The kernel awaits parts by their number.
            if p.late_awaits_of(fix_up)
                .get(number)
                .is_none_or(|entry| entry.signal != partial.raise)
            {
                return Err(Violation::Unguarded {
                    rank,
                    item: index,
                    what: "split-K slot",
                    index: part,
                    peer: rank,
                });
            }
        }
        if step != p.k_steps() {
            return split(step);
        }
    }
    match partials.into_iter().find(|(part, _)| !readers.contains_key(part)) {
        Some((part, item)) => Err(Violation::PartNotRead { rank, item, part }),
        None => Ok(()),
    }
}

/// Fields that the items of one tile share.
fn tile(item: &WorkItem) -> [u32; 7] {
    [item.a_source as u32, item.a_outer, item.row, item.rows, item.col, item.cols, item.out_outer]
}
