//! Tiles to choose from for rows that are no whole tiles of 128, what each can do, and what its
//! steps cost.
//!
//! Invariant: there is a kernel of each that does what is said of it (`TILES` of
//! `flux-kernels/src/variant.rs`).

use super::tiles::{LARGE, LARGE_STEPS, area};
use crate::{OpKind, Problem, TileShape};

/// A tile to choose from.
pub(super) struct Candidate {
    pub(super) tile: TileShape,
    /// Whether its rows may be scattered: there is room for it as a whole.
    pub(super) scattered: bool,
    /// Whether it may be sent as a partial tile.
    pub(super) sent: bool,
}

const fn candidate(m: u32, n: u32, scattered: bool, sent: bool) -> Candidate {
    Candidate { tile: TileShape::new(m, n, 64), scattered, sent }
}

/// Those of whole shards, and tiles whose columns take the place of rows in their multiplication,
/// so that they have any multiple of eight rows.
pub(super) const CANDIDATES: [Candidate; 19] = [
    candidate(128, 256, true, true),
    candidate(128, 224, true, true),
    candidate(128, 192, true, true),
    candidate(128, 128, true, true),
    candidate(192, 256, false, true),
    candidate(184, 256, false, true),
    candidate(176, 256, false, true),
    candidate(168, 256, false, true),
    candidate(160, 256, false, true),
    candidate(152, 256, false, true),
    candidate(144, 256, false, true),
    candidate(136, 256, true, false),
    candidate(160, 192, true, true),
    candidate(144, 192, true, false),
    candidate(240, 128, true, true),
    candidate(208, 128, true, false),
    candidate(176, 128, true, false),
    candidate(152, 128, true, false),
    candidate(LARGE.0.m, LARGE.0.n, false, true),
];

/// How what ranks have for each other comes. Costs of tiles were measured with each apart, and
/// differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::program) enum Comes {
    /// Stored by kernels, or copied, to peers' memory.
    ToPeers,
    /// Carried through memory of the host, or as messages.
    Carried,
    /// As messages while kernels multiply tiles of one shard each.
    BesideKernels,
}

/// Percent of the rows of tiles that are beyond the last row from which on those of 128 columns
/// take longer for it, twice as much, turned ones over peers' memory half as much again, and those
/// of 128x192 as much: rows that are not there seem to take longer to load than others, and steps
/// of 0.5 us leave no time for it. Those of 256 columns have the time, or most of it.
const BEYOND: u64 = 3;
/// The same beside messages of tiles whose steps take less than 0.5 us: with 3 and 6 % of 176x128
/// AllGather-GEMM took 11 % longer than with tiles of 176x256, which were shared, on another
/// machine (GPT-3 at 1700 rows, Llama at 1320; results/h100-x2-ragged-nccl.json,
/// tuning/ragged-nccl.txt, 1.). With these, which they have since, they take 1.01 and 1.03 of
/// serial's time (the record of 19ac363).
const BEYOND_BESIDE_MESSAGES: u64 = 1;
/// The largest of these.
const QUICK: u64 = 176 * 128;
/// Percent that tiles of 128x224 and 128x192 take more than by their steps: of two ranks a
/// GEMM-ReduceScatter of GPT-3 with 350 rows in the first, and with 450 in the second, takes 3 and
/// 10 % more than by this estimate without.
const NARROWER: u64 = 4;
/// The same over peers' memory of 128x224 and of 128x192 (results/tuning/plans-of-rows.txt).
const NARROWER_TO_PEERS: [u64; 2] = [9, 3];
/// Percent that tiles of 256x192 and 192x256 take less, which move less through L2
/// (results/tuning/back-to-back.txt, tile-rows.txt).
const SPARED: u64 = 2;

/// Those that tiles of one shard each may have.
pub(super) fn of_one_shard(problem: &Problem) -> impl Iterator<Item = &'static Candidate> + use<> {
    let sends = problem.op() == OpKind::GemmReduceScatter && problem.world().peers() > 0;
    let is_long = problem.k_local().div_ceil(LARGE.0.k) >= LARGE_STEPS;
    CANDIDATES.iter().filter(move |tile| (tile.sent || !sends) && (is_long || tile.tile != LARGE.0))
}

/// Percent of the rows of such tiles, of so many, that are beyond the last, rounded down.
pub(super) fn beyond_percent(tile: TileShape, rows: u32) -> u64 {
    let covered = u64::from(rows.next_multiple_of(tile.m));
    100 * (covered - u64::from(rows)) / covered
}

/// The time of a step of such tiles of so many rows relative to its operations, in percent.
pub(super) fn percent(tile: TileShape, rows: u32, comes: Comes) -> u64 {
    let to_peers = comes == Comes::ToPeers;
    let free = if comes == Comes::BesideKernels && area(tile) <= QUICK { BEYOND_BESIDE_MESSAGES } else { BEYOND };
    let beyond = beyond_percent(tile, rows).saturating_sub(free);
    let beyond = match tile.n {
        _ if tile == LARGE.0 => 0,
        128 if tile.swaps_ab() && to_peers => 3 * beyond / 2,
        128 if tile.swaps_ab() || to_peers => 2 * beyond,
        192 if !tile.swaps_ab() => beyond,
        256 if !tile.swaps_ab() && to_peers => beyond / 2,
        _ => 0,
    };
    let narrower = match tile.n {
        _ if tile == LARGE.0 || tile.swaps_ab() => 0,
        192 | 224 if !to_peers => NARROWER,
        224 => NARROWER_TO_PEERS[0],
        192 => NARROWER_TO_PEERS[1],
        _ => 0,
    };
    // At the card's power limit, and in long calls.
    let spared = if area(tile) == area(LARGE.0) { SPARED } else { 0 };
    (tile.step_percent() + narrower - spared) * (100 + beyond) / 100
}
