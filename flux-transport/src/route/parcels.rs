//! From a rank's tile program to what it sends.
//!
//! Invariant: each signal that a program raises for a peer is that of one reader of one parcel, and parcels come in the order in which the program
//! completes them.

use super::{Block, Origin, Parcel, Reader};
use flux_core::layout::{gather_place_bytes, scatter_place_bytes, slot_bytes};
use flux_core::program::{Places, Round, TileProgram, WorkItem, sink};
use flux_core::{OpKind, Rank};
use std::collections::BTreeMap;

/// What the rank of `program` sends.
pub(super) fn outgoing(program: &TileProgram) -> Vec<Parcel> {
    match program.problem.op() {
        OpKind::AllGatherGemm => shard(program),
        OpKind::GemmReduceScatter if program.stacked => scattered(program).unwrap_or_else(|| scattered_by_tile(program)),
        OpKind::GemmReduceScatter => slots(program),
    }
}

/// What leads from an address of `peer`'s region, as the program has it, to that of its place in the outbox.
pub(super) fn shift(program: &TileProgram, peer: Rank) -> u64 {
    let rank = program.rank;
    let (at_peer, in_outbox) = match program.problem.op() {
        OpKind::AllGatherGemm => return 0,
        OpKind::GemmReduceScatter if program.stacked => (rank.get(), peer.get()),
        OpKind::GemmReduceScatter => {
            let places = Places::new(program.nodes);
            match (places.destination(rank, peer), places.destination(peer, rank)) {
                (Some((_, at_peer)), Some((_, in_outbox))) => (at_peer, in_outbox),
                _ => return 0,
            }
        }
    };
    u64::from(in_outbox).wrapping_sub(u64::from(at_peer)).wrapping_mul(place_bytes(program))
}

/// Bytes of a source's place at a destination of a GEMM-ReduceScatter.
fn place_bytes(program: &TileProgram) -> u64 {
    if program.stacked {
        scatter_place_bytes(&program.problem)
    } else {
        u64::from(program.slots_per_source) * slot_bytes(&program.problem, program.tile)
    }
}

/// The shard: every piece once, whoever reads it.
fn shard(program: &TileProgram) -> Vec<Parcel> {
    let element = program.problem.dtype().bytes() as u64;
    let row_bytes = u64::from(program.problem.k_local()) * element;
    let mut numbers = BTreeMap::new();
    let mut parcels: Vec<Parcel> = Vec::new();
    for t in &program.transfers {
        let (row, before) = (u64::from(t.row), u64::from(t.col) * element);
        let offset = row * row_bytes + before;
        let number = *numbers.entry((t.row, t.rows, t.col, t.cols)).or_insert(parcels.len());
        if number == parcels.len() {
            let block = Block { offset, rows: u64::from(t.rows), width: u64::from(t.cols) * element, pitch: row_bytes };
            parcels.push(Parcel { origin: Origin::Shard { row, before }, block, readers: Vec::new() });
        }
        let offset = u64::from(t.place) * gather_place_bytes(&program.problem) + offset;
        parcels[number].readers.push(Reader { rank: t.dest, signal: t.raise, offset, pitch: row_bytes, step: t.step });
    }
    parcels
}

fn step(program: &TileProgram, to: Rank) -> u32 {
    let world = program.problem.world().get();
    (to.get() + world - program.rank.get()) % world
}

/// Partial tiles: the slots of a chunk, which follow each other.
fn slots(program: &TileProgram) -> Vec<Parcel> {
    let slot_bytes = slot_bytes(&program.problem, program.tile);
    let mut chunks: BTreeMap<(u32, u32), (u32, u32, usize)> = BTreeMap::new();
    for (at, item) in program.items.iter().enumerate().filter(|(_, item)| item.sink == sink::SEND) {
        let chunk = chunks.entry((item.dest, item.raise)).or_insert((item.slot, item.slot, at));
        *chunk = (chunk.0.min(item.slot), chunk.1.max(item.slot), at);
    }
    let mut chunks: Vec<_> = chunks.into_iter().collect();
    chunks.sort_by_key(|&(_, (.., last))| last);
    let parcel = |((dest, signal), (first, last, _))| {
        let dest = Rank::new(dest);
        let offset = u64::from(first) * slot_bytes;
        let width = u64::from(last - first + 1) * slot_bytes;
        let block = Block { offset: offset.wrapping_add(shift(program, dest)), rows: 1, width, pitch: width };
        let reader = Reader { rank: dest.get(), signal, offset, pitch: width, step: step(program, dest) };
        Parcel { origin: Origin::Outbox, block, readers: vec![reader] }
    };
    chunks.into_iter().map(parcel).collect()
}

/// All that the tiles of a stacked program scatter to each owner, but for what the rank keeps, where one signal announces it.
fn scattered(program: &TileProgram) -> Option<Vec<Parcel>> {
    let rounds = program.rounds()?;
    let parcel = |round: &Round| {
        let Round { step, offset, bytes, sent, .. } = *round;
        let offset = u64::from(sent.place) * place_bytes(program) + offset;
        let block = Block { offset: offset.wrapping_add(shift(program, sent.peer)), rows: 1, width: bytes, pitch: bytes };
        let reader = Reader { rank: sent.peer.get(), signal: sent.signal, offset, pitch: bytes, step };
        Parcel { origin: Origin::Outbox, block, readers: vec![reader] }
    };
    Some(rounds.iter().map(parcel).collect())
}

/// What each tile of a stacked program scatters, but for what the rank keeps.
fn scattered_by_tile(program: &TileProgram) -> Vec<Parcel> {
    let problem = &program.problem;
    let element = problem.dtype().bytes() as u64;
    let row_bytes = u64::from(problem.n_local()) * element;
    let place = u64::from(program.rank.get()) * place_bytes(program);
    let to = |item: &WorkItem, owner: Rank| {
        let shard = problem.shard_rows(owner);
        let (first, end) = (item.row.max(shard.start), (item.row + item.rows).min(shard.end));
        let offset = place + u64::from(first - shard.start) * row_bytes + u64::from(item.col) * element;
        let (rows, width) = (u64::from(end - first), u64::from(item.cols) * element);
        let block = Block { offset: offset.wrapping_add(shift(program, owner)), rows, width, pitch: row_bytes };
        let reader = Reader { rank: owner.get(), signal: item.raise, offset, pitch: row_bytes, step: step(program, owner) };
        Parcel { origin: Origin::Outbox, block, readers: vec![reader] }
    };
    let items = program.items.iter().filter(|item| item.sink == sink::SCATTER);
    let owners = |item| program.heard_by(item).filter(|&owner| owner != program.rank).map(move |owner| to(item, owner));
    items.flat_map(owners).collect()
}
