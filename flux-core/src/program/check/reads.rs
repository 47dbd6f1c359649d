//! Rule: an item awaits a signal for everything that it reads of other ranks' data, each column of
//! A before the step that reads it. Partial results are of the item's own elements.

use super::Violation;
use super::rect::Rect;
use super::signals::moves;
use crate::Rank;
use crate::program::{Await, Forward, Places, RowSource, Sink, TileProgram, WorkItem};
use std::collections::BTreeMap;
use std::ops::Range;

/// Writers of each location; a slot has one, since writers do not overlap.
#[derive(Default)]
struct Writers<'p> {
    /// By owner and slot.
    slots: BTreeMap<(u32, u32), (&'p TileProgram, &'p WorkItem)>,
    /// By owner and place: signals and what they announce.
    places: BTreeMap<(u32, u32), Vec<(u32, Rect)>>,
    /// By source and first column: its scattered tiles.
    scattered: BTreeMap<(u32, u32), Vec<&'p WorkItem>>,
}

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut writers = Writers::default();
    for p in programs {
        for item in &p.items {
            match item.sink {
                Sink::Send => drop(writers.slots.insert((item.dest, item.slot), (p, item))),
                Sink::Scatter => {
                    writers.scattered.entry((p.rank.get(), item.col)).or_default().push(item);
                }
                Sink::Store | Sink::Reduce | Sink::Partial | Sink::ReduceRows | Sink::Copy => {}
            }
        }
        for (t, _) in moves(p) {
            writers
                .places
                .entry((t.dest, t.place))
                .or_default()
                .push((t.raise, Rect::of_transfer(t)));
        }
    }
    for p in programs {
        for (index, item) in p.items.iter().enumerate() {
            if item.a_source == RowSource::Gather {
                gathered(p, index, item, &writers)?;
            }
            match item.sink {
                Sink::Reduce | Sink::Send => reduced(p, index, item, &writers)?,
                Sink::ReduceRows => reduced_rows(p, index, item, &writers)?,
                Sink::Copy => copied(p, index, item, programs)?,
                Sink::Store | Sink::Partial | Sink::Scatter => {}
            }
        }
        for (index, forward) in p.forwards.iter().enumerate() {
            passed_on(p, index, forward, &writers)?;
        }
    }
    Ok(())
}

/// Checks the rows of A, of one place or with flattened rows of several.
fn gathered(
    p: &TileProgram,
    index: usize,
    item: &WorkItem,
    writers: &Writers<'_>,
) -> Result<(), Violation> {
    let of_rank = |rank: Rank| p.problem.shard_rows(rank);
    let col = item.k_first * p.tile.k;
    let cols =
        p.problem.k_local(p.rank).min((item.k_first + item.k_steps).saturating_mul(p.tile.k)) - col;
    // Shards with their places, and the rows of each that are read.
    let shards: Vec<(Rank, u32, Range<u32>)> = if p.rows.is_flattened() {
        let within = |rank: Rank| {
            let own = of_rank(rank);
            let (first, end) = (item.row.max(own.start), (item.row + item.rows).min(own.end));
            (first < end).then(|| (rank, rank.get(), first - own.start..end - own.start))
        };
        p.problem.world().ranks().filter_map(within).collect()
    } else {
        vec![(Rank::new(item.out_outer), item.a_outer, item.row..item.row + item.rows)]
    };
    for (peer, place, rows) in shards {
        let read = Rect { row: rows.start, rows: rows.len() as u32, col, cols };
        let written = writers.places.get(&(p.rank.get(), place)).map_or(&[][..], Vec::as_slice);
        let announced = written.iter().filter(|(signal, rect)| {
            // The first step that reads the transfer.
            let step = item.k_first.max(rect.col / p.tile.k);
            p.awaits_of(item).iter().any(|entry| entry.signal == *signal && entry.k_step <= step)
        });
        let parts: Vec<Rect> = announced.filter_map(|(_, rect)| rect.meet(read)).collect();
        // The parts are disjoint, so they are complete if the areas are equal.
        if parts.iter().map(|part| part.area()).sum::<u64>() < read.area() {
            let cols_of = |row: u32| {
                parts
                    .iter()
                    .filter(|part| (part.row..part.row + part.rows).contains(&row))
                    .map(|part| part.cols)
                    .sum::<u32>()
            };
            let row = rows.clone().find(|&row| cols_of(row) < cols).unwrap_or(read.row);
            return Err(Violation::Unguarded {
                rank: p.rank,
                item: index,
                what: "gather row",
                index: place * p.problem.m_shard() + row,
                peer,
            });
        }
    }
    Ok(())
}

/// Checks that a forward awaits the signal of the rows that it reads.
fn passed_on(
    p: &TileProgram,
    index: usize,
    forward: &Forward,
    writers: &Writers<'_>,
) -> Result<(), Violation> {
    let read = Rect::of_transfer(&forward.to);
    let written = writers.places.get(&(p.rank.get(), forward.from)).map_or(&[][..], Vec::as_slice);
    let whole = |(signal, rect): &(u32, Rect)| {
        *signal == forward.awaits.signal && (read.rows == 0 || rect.meet(read) == Some(read))
    };
    if written.iter().any(whole) {
        return Ok(());
    }
    Err(Violation::UnguardedForward {
        rank: p.rank,
        forward: index,
        place: forward.from,
        signal: forward.awaits.signal,
    })
}

/// Checks the partial tiles: of each intra-node peer, then for the own shard the sums of other
/// nodes. Mainloop awaits come first, then those after the multiplication, behind the parts.
fn reduced(
    p: &TileProgram,
    index: usize,
    item: &WorkItem,
    writers: &Writers<'_>,
) -> Result<(), Violation> {
    let sources = Places::new(p.nodes).sources(p.rank, Rank::new(item.a_outer));
    for (place, peer) in (0..item.partials).zip(sources) {
        let slot = item.partial_slot + place * p.slots_per_source;
        let sent =
            writers.slots.get(&(p.rank.get(), slot)).filter(|(source, _)| source.rank == peer);
        let entry = match place.checked_sub(p.in_mainloop) {
            None => p.awaits_of(item).get(place as usize),
            Some(number) => p.late_awaits_of(item).get((item.parts + number) as usize),
        };
        match sent {
            Some((_, sent))
                if (Rect::of_item(sent), sent.a_outer) != (Rect::of_item(item), item.a_outer) =>
            {
                return Err(Violation::WrongPartial { rank: p.rank, item: index, slot, peer });
            }
            Some((_, sent)) if entry.is_some_and(|entry| entry.signal == sent.raise) => {}
            _ => {
                return Err(Violation::Unguarded {
                    rank: p.rank,
                    item: index,
                    what: "slot",
                    index: slot,
                    peer,
                });
            }
        }
    }
    Ok(())
}

/// Checks the scattered rows of every rank, by the tiles that hold them. Completeness follows from
/// the cover of each rank's output.
fn reduced_rows(
    p: &TileProgram,
    index: usize,
    item: &WorkItem,
    writers: &Writers<'_>,
) -> Result<(), Violation> {
    let read = Rect { row: p.reduced_rows(p.rank).start + item.row, ..Rect::of_item(item) };
    for source in p.problem.world().ranks() {
        let columns = (source.get(), (item.col + 1).saturating_sub(p.tile.n))
            ..(source.get(), item.col + item.cols);
        let tiles = writers.scattered.range(columns).flat_map(|(_, tiles)| tiles);
        for tile in tiles.filter(|tile| Rect::of_item(tile).meet(read).is_some()) {
            if !awaits(p.late_awaits_of(item), tile.raise) {
                let row = tile.row.max(read.row) - read.row + item.row;
                return Err(Violation::Unguarded {
                    rank: p.rank,
                    item: index,
                    what: "scattered row",
                    index: row,
                    peer: source,
                });
            }
        }
    }
    Ok(())
}

/// Checks that a copy awaits the one signal of a peer's tile, alone or in a chunk, that has all of
/// its elements.
fn copied(
    p: &TileProgram,
    index: usize,
    item: &WorkItem,
    programs: &[TileProgram],
) -> Result<(), Violation> {
    let unguarded = |peer| {
        Err(Violation::Unguarded {
            rank: p.rank,
            item: index,
            what: "result",
            index: item.row,
            peer,
        })
    };
    let [entry] = p.late_awaits_of(item) else { return unguarded(p.rank) };
    let owner = &programs[entry.peer as usize];
    let shard = owner.problem.shard_rows(owner.rank);
    let holds = |tile: &WorkItem| {
        let all = Rect { row: shard.start + tile.row, ..Rect::of_item(tile) };
        item.rows == 0 || all.meet(Rect::of_item(item)) == Some(Rect::of_item(item))
    };
    let finished = owner.items.iter().any(|tile| {
        matches!(tile.sink, Sink::Reduce | Sink::ReduceRows)
            && tile.raise == entry.signal
            && holds(tile)
    });
    if owner.rank != p.rank && finished { Ok(()) } else { unguarded(owner.rank) }
}

fn awaits(entries: &[Await], signal: u32) -> bool {
    entries.iter().any(|entry| entry.signal == signal)
}
