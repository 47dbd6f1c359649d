//! From a rank's tile program to its parcels.
//!
//! Invariant: each signal that a program raises for a peer is that of one reader of one parcel, and
//! parcels come in order of completion. Programs that scatter tile by tile have none.

use super::records::{Block, Origin, Parcel, Reader};
use crate::layout::slot_bytes;
use crate::program::{Places, Round, Sink, TileProgram};
use crate::{Rank, SumsTo};
use std::collections::BTreeMap;

/// The parcels that the rank of `program` sends.
pub(super) fn outgoing(program: &TileProgram) -> Vec<Parcel> {
    match program.problem.op().sums_to() {
        SumsTo::Nothing => shard(program),
        SumsTo::Rows if program.rows.is_flattened() => scattered(program),
        SumsTo::All if program.rows.is_flattened() => scattered_to_all(program),
        SumsTo::Rows | SumsTo::All => slots(program),
    }
}

/// Shift from an address in `peer`'s region, as the program has it, to its place in the outbox.
pub(super) fn shift(program: &TileProgram, peer: Rank) -> u64 {
    let rank = program.rank;
    let (at_peer, in_outbox) = match program.problem.op().sums_to() {
        SumsTo::Nothing | SumsTo::All => return 0,
        SumsTo::Rows if program.rows.is_flattened() => (rank.get(), peer.get()),
        SumsTo::Rows => {
            let places = Places::new(program.nodes);
            match (places.destination(rank, peer), places.destination(peer, rank)) {
                (Some((_, at_peer)), Some((_, in_outbox))) => (at_peer, in_outbox),
                _ => return 0,
            }
        }
    };
    u64::from(in_outbox).wrapping_sub(u64::from(at_peer)).wrapping_mul(program.place_bytes())
}

/// The shard: every piece once, with all its readers.
fn shard(program: &TileProgram) -> Vec<Parcel> {
    let element = program.problem.numerics().operand.bytes() as u64;
    let row_bytes = u64::from(program.problem.k()) * element;
    let mut numbers = BTreeMap::new();
    let mut parcels: Vec<Parcel> = Vec::new();
    for t in program.transfers.iter().filter(|t| t.dest != program.rank.get()) {
        let (row, before) = (u64::from(t.row), u64::from(t.col) * element);
        let offset = row * row_bytes + before;
        let number = *numbers.entry((t.row, t.rows, t.col, t.cols)).or_insert(parcels.len());
        if number == parcels.len() {
            let block = Block {
                offset,
                rows: u64::from(t.rows),
                width: u64::from(t.cols) * element,
                pitch: row_bytes,
            };
            parcels.push(Parcel {
                origin: Origin::Shard { row, before },
                block,
                readers: Vec::new(),
            });
        }
        let offset = program.gather_place_offset(t.place) + offset;
        parcels[number].readers.push(Reader {
            rank: t.dest,
            signal: t.raise,
            offset,
            pitch: row_bytes,
            step: t.step,
        });
    }
    parcels
}

fn step(program: &TileProgram, to: Rank) -> u32 {
    let world = program.problem.world().get();
    (to.get() + world - program.rank.get()) % world
}

/// Partial tiles: the consecutive slots of a chunk.
fn slots(program: &TileProgram) -> Vec<Parcel> {
    let slot_bytes = slot_bytes(&program.problem, program.tile);
    let mut chunks: BTreeMap<(u32, u32), (u32, u32, usize)> = BTreeMap::new();
    for (at, item) in program.items.iter().enumerate().filter(|(_, item)| item.sink == Sink::Send) {
        let chunk = chunks.entry((item.dest, item.raise)).or_insert((item.slot, item.slot, at));
        *chunk = (chunk.0.min(item.slot), chunk.1.max(item.slot), at);
    }
    let mut chunks: Vec<_> = chunks.into_iter().collect();
    chunks.sort_by_key(|&(_, (.., last))| last);
    let parcel = |((dest, signal), (first, last, _))| {
        let dest = Rank::new(dest);
        let offset = u64::from(first) * slot_bytes;
        let width = u64::from(last - first + 1) * slot_bytes;
        let block = Block {
            offset: offset.wrapping_add(shift(program, dest)),
            rows: 1,
            width,
            pitch: width,
        };
        let reader =
            Reader { rank: dest.get(), signal, offset, pitch: width, step: step(program, dest) };
        Parcel { origin: Origin::Outbox, block, readers: vec![reader] }
    };
    chunks.into_iter().map(parcel).collect()
}

/// The rows that flattened tiles scatter to every rank: all peers read the same ones.
fn scattered_to_all(program: &TileProgram) -> Vec<Parcel> {
    assert!(program.scatters_at_once(), "{SCATTERED_AT_ONCE}");
    let (rank, bytes) = (program.rank, program.place_bytes());
    let offset = u64::from(rank.get()) * bytes;
    let peers = program.problem.world().ranks().filter(|&peer| peer != rank);
    let reader = |to: Rank| Reader {
        rank: to.get(),
        signal: rank.get(),
        offset,
        pitch: bytes,
        step: step(program, to),
    };
    let block = Block { offset, rows: 1, width: bytes, pitch: bytes };
    vec![Parcel { origin: Origin::Outbox, block, readers: peers.map(reader).collect() }]
}

const SCATTERED_AT_ONCE: &str = "one signal announces all tiles: where each has its own, kernels \
                                 give them to each other themselves";

/// The rows that flattened tiles scatter to each owner but the own rank.
fn scattered(program: &TileProgram) -> Vec<Parcel> {
    let rounds = program.rounds().expect(SCATTERED_AT_ONCE);
    let parcel = |round: &Round| {
        let Round { step, offset, bytes, sent, .. } = *round;
        let offset = u64::from(sent.place) * program.place_bytes() + offset;
        let block = Block {
            offset: offset.wrapping_add(shift(program, sent.peer)),
            rows: 1,
            width: bytes,
            pitch: bytes,
        };
        let reader =
            Reader { rank: sent.peer.get(), signal: sent.signal, offset, pitch: bytes, step };
        Parcel { origin: Origin::Outbox, block, readers: vec![reader] }
    };
    rounds.iter().map(parcel).collect()
}
