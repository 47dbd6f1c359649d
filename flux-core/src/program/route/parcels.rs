//! From a rank's tile program to its parcels.
//!
//! Invariant: each signal that a program raises for a peer is that of one reader of one parcel, and
//! parcels come in order of completion. Programs that scatter tile by tile have none.

use super::records::{Block, Origin, Parcel, Reader};
use crate::layout::slot_bytes;
use crate::program::{NONE, Places, Round, Sink, TileProgram, WorkItem};
use crate::{Rank, SumsTo};
use std::collections::BTreeMap;

/// The parcels that the rank of `program` sends.
pub(super) fn outgoing(program: &TileProgram) -> Vec<Parcel> {
    match program.problem.op().sums_to() {
        SumsTo::Nothing => shard(program),
        SumsTo::Rows if program.rows.is_flattened() => scattered(program),
        SumsTo::All if program.rows.is_flattened() => scattered_to_all(program),
        SumsTo::Rows | SumsTo::All => tiles(program),
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
    let row_bytes = program.problem.gathered_row_bytes();
    let mut numbers = BTreeMap::new();
    let mut parcels: Vec<Parcel> = Vec::new();
    for t in program.transfers.iter().filter(|t| t.dest != program.rank.get()) {
        let (row, before) = (u64::from(t.row), u64::from(t.col) * element);
        let number = *numbers.entry((t.row, t.rows, t.col, t.cols)).or_insert(parcels.len());
        if number == parcels.len() {
            let block = Block {
                offset: row * row_bytes + before,
                rows: u64::from(t.rows),
                width: u64::from(t.cols) * element,
                pitch: row_bytes,
            };
            parcels.push(Parcel {
                origin: Origin::Shard { row, before },
                blocks: vec![block],
                readers: Vec::new(),
            });
        }
        let shift = program.gather_place_offset(t.place);
        let reader = Reader { rank: t.dest, signal: t.raise, shift, step: t.step };
        parcels[number].readers.push(reader);
    }
    parcels
}

fn step(program: &TileProgram, to: Rank) -> u32 {
    let world = program.problem.world().get();
    (to.get() + world - program.rank.get()) % world
}

/// Chunks of partial tiles and of results, in the order of their last tiles.
fn tiles(program: &TileProgram) -> Vec<Parcel> {
    let mut chunks: BTreeMap<(u32, u32), (usize, Parcel)> = BTreeMap::new();
    for (at, item) in program.items.iter().enumerate() {
        let block = match item.sink {
            Sink::Send => slot(program, item),
            Sink::Reduce if item.raise != NONE => result(program, item),
            _ => continue,
        };
        let (last, parcel) = chunks
            .entry((item.dest, item.raise))
            .or_insert_with(|| (at, without_bytes(program, item)));
        *last = at;
        parcel.blocks.push(block);
    }
    let mut chunks: Vec<_> = chunks.into_values().collect();
    chunks.sort_by_key(|&(last, _)| last);
    let joined = |parcel: Parcel| Parcel { blocks: Block::join(parcel.blocks), ..parcel };
    chunks.into_iter().map(|(_, parcel)| joined(parcel)).collect()
}

/// A parcel of an item's chunk, as yet without bytes.
fn without_bytes(program: &TileProgram, item: &WorkItem) -> Parcel {
    let origin = if item.sink == Sink::Reduce { Origin::Results } else { Origin::Outbox };
    let reader = |to: Rank| Reader {
        rank: to.get(),
        signal: item.raise,
        shift: shift(program, to).wrapping_neg(),
        step: step(program, to),
    };
    Parcel {
        origin,
        blocks: Vec::new(),
        readers: program.signalled_ranks(item).map(reader).collect(),
    }
}

/// The slot of a partial tile in the outbox. The slots of a chunk follow one another, as rows do.
fn slot(program: &TileProgram, item: &WorkItem) -> Block {
    let bytes = slot_bytes(&program.problem, program.tile);
    let offset = u64::from(item.slot) * bytes;
    let offset = offset.wrapping_add(shift(program, Rank::new(item.dest)));
    Block { offset, rows: 1, width: bytes, pitch: bytes }
}

/// The place of an own tile among the results.
fn result(program: &TileProgram, item: &WorkItem) -> Block {
    let problem = &program.problem;
    let bytes = problem.numerics().output.bytes() as u64;
    let pitch = u64::from(problem.n()) * bytes;
    let row = u64::from(problem.shard_rows(program.rank).start + item.row);
    Block {
        offset: program.results_offset() + row * pitch + u64::from(item.col) * bytes,
        rows: u64::from(item.rows),
        width: u64::from(item.cols) * bytes,
        pitch,
    }
}

/// The rows that flattened tiles scatter to every rank: all peers read the same ones.
fn scattered_to_all(program: &TileProgram) -> Vec<Parcel> {
    assert!(program.scatters_at_once(), "{SCATTERED_AT_ONCE}");
    let (rank, bytes) = (program.rank, program.place_bytes());
    let offset = u64::from(rank.get()) * bytes;
    let peers = program.problem.world().ranks().filter(|&peer| peer != rank);
    let reader =
        |to: Rank| Reader { rank: to.get(), signal: rank.get(), shift: 0, step: step(program, to) };
    let blocks = vec![Block { offset, rows: 1, width: bytes, pitch: bytes }];
    vec![Parcel { origin: Origin::Outbox, blocks, readers: peers.map(reader).collect() }]
}

const SCATTERED_AT_ONCE: &str = "one signal announces all tiles: where each has its own, kernels \
                                 give them to each other themselves";

/// The rows that flattened tiles scatter to each owner but the own rank.
fn scattered(program: &TileProgram) -> Vec<Parcel> {
    let rounds = program.rounds().expect(SCATTERED_AT_ONCE);
    let parcel = |round: &Round| {
        let Round { step, offset, bytes, sent, .. } = *round;
        let at_peer = u64::from(sent.place) * program.place_bytes() + offset;
        let shift = shift(program, sent.peer);
        let block =
            Block { offset: at_peer.wrapping_add(shift), rows: 1, width: bytes, pitch: bytes };
        let shift = shift.wrapping_neg();
        let reader = Reader { rank: sent.peer.get(), signal: sent.signal, shift, step };
        Parcel { origin: Origin::Outbox, blocks: vec![block], readers: vec![reader] }
    };
    rounds.iter().map(parcel).collect()
}
