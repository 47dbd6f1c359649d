//! Rule: what one rank sends in packets is what the others take from it.

use super::Violation;
use crate::program::{Arrival, TileProgram, Transfer};
use crate::{OpKind, Rank};

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    for p in programs {
        let wrong = |what| Err(Violation::Packets { rank: p.rank, what });
        if p.packed_rows && !(p.stacked && p.problem.op() == OpKind::GemmReduceScatter) {
            return wrong("only scattered rows are packed");
        }
        let Some(lead) = p.transfers.get(..p.arrivals.len()) else {
            return wrong("there are more arrivals than transfers");
        };
        let Some(first) = lead.first() else { continue };
        if (first.row, first.rows, first.col) != (0, p.problem.m_shard(), 0) {
            return wrong("the first transfers are of the first columns of the whole shard");
        }
        if lead.iter().any(|transfer| rectangle(transfer) != rectangle(first)) {
            return wrong("what is packed is the same for every reader");
        }
        let sent_to =
            |reader: &TileProgram| lead.iter().filter(|transfer| transfer.dest == reader.rank.get()).map(arrival_at(p.rank)).next();
        for reader in programs {
            let mut taken = reader.arrivals.iter().filter(|arrival| arrival.source == p.rank.get());
            if taken.next().copied() != sent_to(reader) || taken.next().is_some() {
                return Err(Violation::Packets { rank: reader.rank, what: "the packets that are sent are those that are taken" });
            }
            if !reader.arrivals.is_empty() && reader.transfers.first().map(rectangle) != Some(rectangle(first)) {
                return Err(Violation::Packets { rank: reader.rank, what: "all ranks pack the same rows and columns" });
            }
        }
    }
    Ok(())
}

fn rectangle(transfer: &Transfer) -> [u32; 4] {
    [transfer.row, transfer.rows, transfer.col, transfer.cols]
}

/// What a transfer of `source` is for its reader.
fn arrival_at(source: Rank) -> impl Fn(&Transfer) -> Arrival {
    move |transfer| Arrival { source: source.get(), place: transfer.place, raise: transfer.raise }
}
