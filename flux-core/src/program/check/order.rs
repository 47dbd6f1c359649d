//! Rule: no rank waits on work that comes after its own.
//!
//! The check walks all programs with one worker on each rank until none can advance. This is the
//! worst case: with more workers an item follows only some of the items before it, so it waits for
//! fewer. Movers only wait for other movers, whose
//! signals need no worker.

use super::signals::raises;
use super::{Record, Violation};
use crate::Rank;
use crate::program::{Await, TileProgram, WorkItem};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut raised: BTreeSet<(u32, u32)> = BTreeSet::new();
    // By rank: the signals that its items raise, by item.
    let mut to_raise: Vec<BTreeMap<usize, Vec<(u32, u32)>>> = Vec::with_capacity(programs.len());
    for p in programs {
        let mut by_item: BTreeMap<usize, Vec<(u32, u32)>> = BTreeMap::new();
        for (key, record) in raises(p) {
            match record {
                Record::Item(item) => by_item.entry(item).or_default().push(key),
                _ => drop(raised.insert(key)),
            }
        }
        to_raise.push(by_item);
    }

    let mut next = vec![0; programs.len()];
    let mut ready: Vec<usize> = (0..programs.len()).collect();
    // By signal: the waiting rank.
    let mut waiting: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    while let Some(rank) = ready.pop() {
        let p = &programs[rank];
        while let Some(item) = p.items.get(next[rank]) {
            let keys = awaits(p, item).map(|entry| (p.rank.get(), entry.signal));
            if let Some(missing) = keys.into_iter().find(|key| !raised.contains(key)) {
                waiting.insert(missing, rank);
                break;
            }
            for &key in to_raise[rank].get(&next[rank]).into_iter().flatten() {
                raised.insert(key);
                ready.extend(waiting.remove(&key));
            }
            next[rank] += 1;
        }
    }
    let stuck: BTreeMap<usize, u32> =
        waiting.into_iter().map(|((_, signal), rank)| (rank, signal)).collect();
    let awaited = |rank: usize| {
        let (p, signal) = (&programs[rank], *stuck.get(&rank)?);
        let entry = awaits(p, &p.items[next[rank]]).find(|entry| entry.signal == signal)?;
        Some((signal, entry.peer))
    };
    let Some(&first) = stuck.keys().next() else { return Ok(()) };
    // The awaited rank is stuck too, so a walk of as many steps as ranks ends on the circle.
    let on_circle = (0..programs.len())
        .fold(first, |rank, _| awaited(rank).map_or(rank, |(_, peer)| peer as usize));
    let (signal, peer) = awaited(on_circle).unwrap_or_default();
    Err(Violation::Deadlock {
        rank: programs[on_circle].rank,
        item: next[on_circle],
        signal,
        peer: Rank::new(peer),
    })
}

/// All awaits of an item, in order.
fn awaits<'p>(p: &'p TileProgram, item: &WorkItem) -> impl Iterator<Item = &'p Await> {
    p.awaits_of(item).iter().chain(p.late_awaits_of(item))
}
