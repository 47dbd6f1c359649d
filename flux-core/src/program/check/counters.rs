//! Rule: a counter counts all items of one chunk, and an item without counter is a chunk.

use super::Violation;
use crate::program::{NONE, TileProgram};
use std::collections::BTreeMap;

pub(super) fn check(p: &TileProgram) -> Result<(), Violation> {
    // By counter: the first item, the last, and their number.
    let mut chunks: BTreeMap<u32, (usize, usize, u32)> = BTreeMap::new();
    for (index, item) in p.items.iter().enumerate() {
        if item.raise == NONE {
            continue;
        }
        if item.counter == NONE {
            if item.raise_after != 1 {
                return Err(Violation::Miscounted {
                    rank: p.rank,
                    item: index,
                    items: 1,
                    raise_after: item.raise_after,
                });
            }
            continue;
        }
        let (first, last, items) = chunks.entry(item.counter).or_insert((index, index, 0));
        let other = &p.items[*first];
        if (item.dest, item.raise, item.raise_after) != (other.dest, other.raise, other.raise_after)
        {
            return Err(Violation::CounterShared {
                rank: p.rank,
                counter: item.counter,
                first: *first,
                second: index,
            });
        }
        (*last, *items) = (index, *items + 1);
    }
    for (_, item, items) in chunks.into_values() {
        let raise_after = p.items[item].raise_after;
        if items != raise_after {
            return Err(Violation::Miscounted { rank: p.rank, item, items, raise_after });
        }
    }
    Ok(())
}
