//! Rule: no two writers have a slot or a row of a gather place in common.

use super::{Record, Violation};
use crate::Rank;
use crate::program::{TileProgram, sink};
use std::collections::BTreeMap;

/// A range of slots, or of rows of gather places, of one rank.
struct Write {
    owner: u32,
    what: &'static str,
    first: u32,
    end: u32,
    by: (Rank, Record),
}

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut seen: BTreeMap<(u32, u32), Write> = BTreeMap::new();
    for write in programs.iter().flat_map(writes) {
        let Write { owner, what, first, end, by } = write;
        // of what is known not to overlap, only the range that begins last before the end of this one can
        if let Some((_, other)) = seen.range((owner, 0)..(owner, end)).next_back()
            && other.end > first
        {
            let index = first.max(other.first);
            return Err(Violation::WrittenTwice { owner: Rank::new(owner), what, index, first: other.by, second: by });
        }
        seen.insert((owner, first), write);
    }
    Ok(())
}

fn writes(p: &TileProgram) -> impl Iterator<Item = Write> {
    let sends = p.items.iter().enumerate().filter(|(_, item)| item.sink == sink::SEND);
    let sends = sends.map(|(index, item)| Write {
        owner: item.dest,
        what: "slot",
        first: item.slot,
        end: item.slot + 1,
        by: (p.rank, Record::Item(index)),
    });
    let transfers = p.transfers.iter().enumerate().map(|(index, transfer)| {
        let first = transfer.place * p.problem.m_shard() + transfer.row;
        let by = (p.rank, Record::Transfer(index));
        Write { owner: transfer.dest, what: "gather row", first, end: first + transfer.rows, by }
    });
    sends.chain(transfers)
}
