//! Rule: every awaited signal is raised once in a call, by the rank that the await names, and every
//! raised signal is awaited, but those of chunks without rows.

use super::{Record, Violation};
use crate::Rank;
use crate::program::{NONE, TileProgram, Transfer};
use std::collections::{BTreeMap, BTreeSet};

/// The signals that a program raises, by owner and index, and the raising record: a transfer, or
/// the last item of a chunk. A scattering item raises its signal on several pads.
pub(super) fn raises(p: &TileProgram) -> impl Iterator<Item = ((u32, u32), Record)> {
    let mut left: BTreeMap<u32, u32> = BTreeMap::new();
    let items = p.items.iter().enumerate().filter(move |(_, item)| {
        item.raise != NONE && {
            let left = left.entry(item.counter).or_insert(item.raise_after);
            *left -= u32::from(item.counter != NONE);
            item.counter == NONE || *left == 0
        }
    });
    let items = items.flat_map(|(index, item)| {
        p.signalled_ranks(item).map(move |owner| ((owner.get(), item.raise), Record::Item(index)))
    });
    items.chain(moves(p).map(|(t, record)| ((t.dest, t.raise), record)))
}

/// All copies of a rank's mover: transfers and forwards.
pub(super) fn moves(p: &TileProgram) -> impl Iterator<Item = (&Transfer, Record)> {
    let own =
        p.transfers.iter().enumerate().map(|(index, transfer)| (transfer, Record::Transfer(index)));
    own.chain(
        p.forwards.iter().enumerate().map(|(index, forward)| (&forward.to, Record::Forward(index))),
    )
}

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut raised: BTreeMap<(u32, u32), (Rank, Record)> = BTreeMap::new();
    for p in programs {
        for (key, record) in raises(p) {
            let second = (p.rank, record);
            if let Some(first) = raised.insert(key, second) {
                return Err(Violation::RaisedTwice {
                    owner: Rank::new(key.0),
                    signal: key.1,
                    first,
                    second,
                });
            }
        }
    }

    let mut awaited: BTreeSet<(u32, u32)> = BTreeSet::new();
    for p in programs {
        for (item, record) in p.items.iter().enumerate() {
            for entry in p.awaits_of(record).iter().chain(p.late_awaits_of(record)) {
                let key = (p.rank.get(), entry.signal);
                let (signal, named) = (entry.signal, Rank::new(entry.peer));
                match raised.get(&key) {
                    None => {
                        return Err(Violation::NeverRaised {
                            rank: p.rank,
                            item,
                            signal,
                            peer: named,
                        });
                    }
                    Some(&(raiser, _)) if raiser != named => {
                        return Err(Violation::WrongPeer {
                            rank: p.rank,
                            item,
                            signal,
                            named,
                            raiser,
                        });
                    }
                    Some(_) => awaited.insert(key),
                };
            }
        }
    }
    let announces_rows = |key: &(u32, u32), (by, record): &(Rank, Record)| {
        let p = &programs[by.index()];
        let moved = match *record {
            Record::Transfer(index) => Some(&p.transfers[index]),
            Record::Forward(index) => Some(&p.forwards[index].to),
            _ => None,
        };
        !awaited.contains(key) && moved.is_none_or(|transfer| transfer.rows > 0)
    };
    match raised.into_iter().find(|(key, by)| announces_rows(key, by)) {
        None => Ok(()),
        Some(((owner, signal), by)) => {
            Err(Violation::NeverAwaited { owner: Rank::new(owner), signal, by })
        }
    }
}
