//! Mock peers: how one GPU's memory stands for that of all ranks, and which signals they raise.
//!
//! Invariant: before a call exactly the awaited signals that only peers or movers raise hold its
//! epoch. The program raises its own.

use crate::harness::FIRST;
use crate::harness::data::Window;
use flux_core::layout::{gather_place_bytes, pad_bytes, signal_offset};
use flux_core::program::{NONE, TileProgram};
use flux_core::{SumsTo, WorldSize};
use std::collections::BTreeSet;
use std::ops::Range;

/// Dense words of a pad, of which those that are polled start a line each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Words {
    /// Offset of the first in the pad.
    pub(super) offset: u64,
    pub(super) count: u64,
}

/// The words of the program's own pad that peers raise before a call, in both buffers.
pub(super) fn raised_before(program: &TileProgram) -> Vec<Words> {
    let words = |from: u64, to: u64| Words { offset: from, count: (to - from) / 4 };
    by_peers(program)
        .into_iter()
        .map(|run| words(signal_offset(run.start, 0), signal_offset(run.end, 0)))
        .collect()
}

/// Runs of consecutive signals that are awaited and that none of the program's own items raises.
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

/// The rows of the global `x` that rank 0 finds at the start of its gather buffer.
pub(super) fn gathered(program: &TileProgram) -> Window {
    let problem = &program.problem;
    let row0 = if program.rows.is_flattened() { 0 } else { problem.m_shard() };
    Window { row0, col0: 0, rows: problem.m() - row0, cols: problem.k() }
}

/// Every rank's data region as rank 0 sees it: `own`, and parts of `elsewhere` for the peers.
/// Peers' slots do not overlap, so as many bytes are written as in a real world.
pub(super) fn data_of_first(program: &TileProgram, own: u64, elsewhere: u64) -> Vec<u64> {
    let place = match program.problem.op().sums_to() {
        SumsTo::Nothing => gather_place_bytes(&program.problem),
        SumsTo::Rows | SumsTo::All
            if program.rows.is_flattened() && !program.rows.has_two_exchanges() =>
        {
            program.scatter_place_bytes()
        }
        SumsTo::Rows | SumsTo::All => 0,
    };
    let peers =
        (0..program.problem.world().peers()).map(|peer| elsewhere + u64::from(peer) * place);
    std::iter::once(own).chain(peers).collect()
}

/// The same for a peer that makes rank 0's partial tiles: all else goes to `elsewhere`.
pub(super) fn data_of_peer(world: WorldSize, own: u64, elsewhere: u64) -> Vec<u64> {
    world.ranks().map(|rank| if rank == FIRST { own } else { elsewhere }).collect()
}

/// Every rank's pad, of memory that begins at `first` and has one for each.
pub(super) fn pads(program: &TileProgram, first: u64) -> Vec<u64> {
    let bytes = pad_bytes(program.workspace().signals);
    (0..u64::from(program.problem.world().get())).map(|rank| first + rank * bytes).collect()
}
