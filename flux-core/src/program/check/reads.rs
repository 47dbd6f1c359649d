//! Rule: whatever an item reads of its peers' data was announced by a signal that it awaits, and partial tiles are of the item's own
//! elements.

use super::{Record, Violation};
use crate::Rank;
use crate::program::{Await, TileProgram, WorkItem, sink, source};
use std::collections::BTreeMap;

/// Who writes what, by owner and first slot or gather row. Writers do not overlap, so a key has one.
type Writers<'p> = BTreeMap<(u32, u32), (&'p TileProgram, Record)>;

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut writers = Writers::new();
    for p in programs {
        for (index, item) in p.items.iter().enumerate().filter(|(_, item)| item.sink == sink::SEND) {
            writers.insert((item.dest, item.slot), (p, Record::Item(index)));
        }
        for (index, transfer) in p.transfers.iter().enumerate() {
            writers.insert((transfer.dest, transfer.place * p.problem.m_shard() + transfer.row), (p, Record::Transfer(index)));
        }
    }
    for p in programs {
        for (index, item) in p.items.iter().enumerate() {
            if item.a_source == source::GATHER {
                gathered(p, index, item, &writers)?;
            }
            if item.sink == sink::REDUCE {
                reduced(p, index, item, &writers)?;
            }
        }
    }
    Ok(())
}

/// The rows of A, which one or more transfers bring.
fn gathered(p: &TileProgram, index: usize, item: &WorkItem, writers: &Writers<'_>) -> Result<(), Violation> {
    let mut row = item.a_outer * p.problem.m_shard() + item.row;
    let end = row + item.rows;
    while row < end {
        let transfer = writers.range((p.rank.get(), 0)..=(p.rank.get(), row)).next_back().and_then(|(&(_, first), writer)| match writer {
            (source, Record::Transfer(transfer)) => Some((first, &source.transfers[*transfer])),
            _ => None,
        });
        match transfer {
            Some((first, t)) if first + t.rows > row && awaits(p.awaits_of(item), t.raise) => row = first + t.rows,
            _ => {
                let peer = Rank::new(item.out_outer);
                return Err(Violation::Unguarded { rank: p.rank, item: index, what: "gather row", index: row, peer });
            }
        }
    }
    Ok(())
}

/// The partial tiles, one of each peer in rank order.
fn reduced(p: &TileProgram, index: usize, item: &WorkItem, writers: &Writers<'_>) -> Result<(), Violation> {
    let elements = |item: &WorkItem| (item.row, item.rows, item.col, item.cols);
    let peers = p.problem.world().ranks().filter(|&peer| peer != p.rank);
    for (place, peer) in (0..item.partials).zip(peers) {
        let slot = item.slot + place * p.slots_per_source;
        let sent = writers.get(&(p.rank.get(), slot)).and_then(|&(source, writer)| match writer {
            Record::Item(send) if source.rank == peer => Some(&source.items[send]),
            _ => None,
        });
        match sent {
            Some(sent) if elements(sent) != elements(item) => {
                return Err(Violation::WrongPartial { rank: p.rank, item: index, slot, peer });
            }
            Some(sent) if awaits(p.late_awaits_of(item), sent.raise) => {}
            _ => return Err(Violation::Unguarded { rank: p.rank, item: index, what: "slot", index: slot, peer }),
        }
    }
    Ok(())
}

fn awaits(entries: &[Await], signal: u32) -> bool {
    entries.iter().any(|entry| entry.signal == signal)
}
