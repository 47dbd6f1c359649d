//! Rule: no two writers share a slot, a split-K slot or an element of a gather place.
//!
//! Scattered rows need no check: each source has a place of its own, and its tiles do not overlap.

use super::rect::{Rect, overlap};
use super::signals::moves;
use super::{Record, Violation};
use crate::Rank;
use crate::program::{Sink, TileProgram};
use std::collections::BTreeMap;

/// A block of a place and its writer.
type Write = (Rect, (Rank, Record));

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut slots: BTreeMap<(&'static str, u32, u32), (Rank, Record)> = BTreeMap::new();
    let mut places: BTreeMap<(u32, u32), Vec<Write>> = BTreeMap::new();
    for p in programs {
        for (index, item) in p.items.iter().enumerate() {
            let (what, owner, slot) = match item.sink {
                Sink::Send => ("slot", item.dest, item.slot),
                Sink::Partial => ("split-K slot", p.rank.get(), item.part),
                Sink::Store | Sink::Reduce | Sink::Scatter | Sink::ReduceRows | Sink::Copy => {
                    continue;
                }
            };
            let second = (p.rank, Record::Item(index));
            if let Some(first) = slots.insert((what, owner, slot), second) {
                return Err(Violation::WrittenTwice {
                    owner: Rank::new(owner),
                    what,
                    index: slot,
                    first,
                    second,
                });
            }
        }
        for (transfer, record) in moves(p).filter(|(transfer, _)| transfer.rows > 0) {
            let by = (p.rank, record);
            places
                .entry((transfer.dest, transfer.place))
                .or_default()
                .push((Rect::of_transfer(transfer), by));
        }
    }
    for ((owner, place), writes) in places {
        let rects: Vec<Rect> = writes.iter().map(|write| write.0).collect();
        if let Some((first, second)) = overlap(&rects) {
            let index =
                place * programs[0].problem.m_shard() + rects[first].row.max(rects[second].row);
            let (first, second) = (writes[first].1, writes[second].1);
            return Err(Violation::WrittenTwice {
                owner: Rank::new(owner),
                what: "gather row",
                index,
                first,
                second,
            });
        }
    }
    Ok(())
}
