//! How one GPU's memory stands in for that of a world's ranks, and which words say that the peers
//! have done their part.
//!
//! Invariant: before a call of an epoch, exactly the awaited words that nobody but a peer or a
//! mover raises hold that epoch. A word that the program's own items raise is left to them: raised
//! before, it would hand over what is not written yet.

use crate::harness::FIRST;
use crate::harness::data::Window;
use flux_core::layout::{gather_place_bytes, pad_bytes, scatter_place_bytes, signal_offset};
use flux_core::program::{NONE, TileProgram};
use flux_core::{OpKind, WorldSize};
use std::collections::BTreeSet;
use std::ops::Range;

/// Dense words of a pad, of which those that are polled start a line each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Words {
    /// Offset of the first in the pad.
    pub(super) offset: u64,
    /// How many.
    pub(super) count: u64,
}

/// The words of the program's own pad that hold a call's epoch before it begins: what peers raise,
/// in both halves.
pub(super) fn raised_before(program: &TileProgram) -> Vec<Words> {
    let words = |from: u64, to: u64| Words { offset: from, count: (to - from) / 4 };
    by_peers(program).into_iter().map(|run| words(signal_offset(run.start, 0), signal_offset(run.end, 0))).collect()
}

/// The signals that are awaited and raised by none of the program's own items, as runs of
/// consecutive ones.
fn by_peers(program: &TileProgram) -> Vec<Range<u32>> {
    let mut signals: BTreeSet<u32> = program.awaits.iter().map(|a| a.signal).collect();
    for item in program.items.iter().filter(|item| item.raise != NONE) {
        if program.signalled_ranks(item).any(|rank| rank == program.rank) {
            signals.remove(&item.raise);
        }
    }
    let mut runs: Vec<Range<u32>> = Vec::new();
    for signal in signals {
        match runs.last_mut() {
            Some(run) if run.end == signal => run.end += 1,
            _ => runs.push(signal..signal + 1),
        }
    }
    runs
}

/// The rows of the global `x` that rank 0 of an AllGather-GEMM finds at the start of its gather
/// buffer: its peers' places follow each other in rank order.
pub(super) fn gathered(program: &TileProgram) -> Window {
    let problem = &program.problem;
    let row0 = if program.flattened { 0 } else { problem.m_shard() };
    Window { row0, col0: 0, rows: problem.m() - row0, cols: problem.k_local() }
}

/// Every rank's data region as rank 0 sees it: `own`, and at each peer a part of `elsewhere`, which
/// is as large. These parts do not overlap, so as many bytes of memory are written as at the peers:
/// of a GEMM-ReduceScatter's slots rank 0 has another place at every peer, else the first at all of
/// them.
pub(super) fn data_of_first(program: &TileProgram, own: u64, elsewhere: u64) -> Vec<u64> {
    let place = match program.problem.op() {
        OpKind::AllGatherGemm => gather_place_bytes(&program.problem),
        OpKind::GemmReduceScatter if program.flattened => scatter_place_bytes(&program.problem),
        OpKind::GemmReduceScatter => 0,
    };
    let peers = (0..program.problem.world().peers()).map(|peer| elsewhere + u64::from(peer) * place);
    std::iter::once(own).chain(peers).collect()
}

/// The same as a peer sees it that makes rank 0's partial tiles: what it sends to others, and what
/// it adds itself, is all in `elsewhere` and of no use.
pub(super) fn data_of_peer(world: WorldSize, own: u64, elsewhere: u64) -> Vec<u64> {
    world.ranks().map(|rank| if rank == FIRST { own } else { elsewhere }).collect()
}

/// Every rank's pad, of memory that begins at `first` and has one for each.
pub(super) fn pads(program: &TileProgram, first: u64) -> Vec<u64> {
    let bytes = pad_bytes(program.workspace().signals);
    (0..u64::from(program.problem.world().get())).map(|rank| first + rank * bytes).collect()
}
