//! Rows that are no whole tiles of 128, and such that leave half of one of 256: the tile that they
//! fill best, whether it spans shards, and whether what whole waves leave is shared.
//!
//! Invariant: of the candidates it is the one whose [estimate](super::estimate) is the least.

use super::super::MAX_ITEMS;
use super::super::pushing::COPY_ENGINE_BYTES;
use super::candidates::{CANDIDATES, Candidate, Comes, of_one_shard, percent};
use super::estimate::by_host_ns;
use super::tiles::{LARGE, TILES, TO_SEND};
use super::{MULTIPROCESSORS, ROWS, Schedule};
use crate::layout::gather_place_bytes;
use crate::tile::TileGrid;
use crate::{OpKind, Problem, TileShape};

/// Hundredths of a tile that sharing has to gain where tiles are those of a GEMM-ReduceScatter of
/// one shard each: its own, which come last, do not all end with the others then
/// (results/tuning/rests.txt).
const UNEVEN: u64 = 30;
/// Ranks of a GEMM-ReduceScatter up to which tiles span shards of a tile and more: of 16 it is up
/// to 13 % slower by simulation.
pub(super) const MOST_FOLDED: u32 = 8;

/// Rows in all up to which a GEMM-ReduceScatter of small shards is bound by reading `w`, and of
/// those the ones with which tiles of 128 rows are nearly full: with 240 rows two H100 take 0.272
/// ms of GPT-3 in tiles of 240x128 and 0.274 of 128x256, shared, and 0.118 and 0.113 of Llama in
/// 240x128 and 128x128; with 256 rows 0.248 and 0.114 in 128x192 and 128x128, whole
/// (results/tuning/tile-240.txt, halves-tp2.txt). By estimate, which is 40 us short of the first,
/// that would be faster. With the tiles of 256 rows 228, 240 and 250 take 0.247 to 0.249 and 0.114
/// to 0.117 ms (tile-240.txt, at its end).
const NEARLY_WHOLE: std::ops::RangeInclusive<u32> = 2 * ROWS - 32..=2 * ROWS;

/// Whether the rows that tiles would be cut from are no whole tiles of 128, and more than one.
pub(in crate::program) fn is_ragged(problem: &Problem) -> bool {
    let small = problem.m_shard() < ROWS;
    let rows = if small { problem.m() } else { problem.m_shard() };
    let nearly_whole = small && problem.op() == OpKind::GemmReduceScatter && NEARLY_WHOLE.contains(&rows);
    rows > ROWS && !rows.is_multiple_of(ROWS) && !nearly_whole
}

/// Whether what tiles would be cut from is whole tiles of 128 rows, more than two, that leave half
/// of one of 256: shards, or all rows where shards are less than a tile. With 384 rows four H200
/// take 20 % less time of GPT-3's GEMM-ReduceScatter, 14 of its AllGather-GEMM, and 10 of Llama's
/// former, where what whole waves leave is shared (results/tuning/slices-tp4.txt, 3.).
pub(super) fn leaves_half_a_tile(problem: &Problem) -> bool {
    let rows = if problem.m_shard() < ROWS { problem.m() } else { problem.m_shard() };
    rows > 2 * ROWS && !rows.is_multiple_of(2 * ROWS)
}

/// The tile of shards that are no whole tiles, of one shard each, for what is carried.
pub(super) fn usual(problem: &Problem, may_be_large: bool) -> TileShape {
    let may_be = |tile| may_be_large || tile != LARGE.0;
    best_of_one_shard(problem, may_be, |tile| Schedule::by_shard(problem, tile).carried_ns(problem).into())
}

/// The same of a GEMM-ReduceScatter whose partial tiles go through the host, where swap-AB tiles of
/// 192 columns were not measured.
pub(super) fn by_host(problem: &Problem, may_be_large: bool) -> TileShape {
    let may_be = |tile: TileShape| (may_be_large || tile != LARGE.0) && !(tile.swaps_ab() && tile.n == 192);
    best_of_one_shard(problem, may_be, |tile| by_host_ns(problem, tile))
}

fn best_of_one_shard(problem: &Problem, may_be: impl Fn(TileShape) -> bool, estimate_ns: impl Fn(TileShape) -> u128) -> TileShape {
    let tiles = of_one_shard(problem).map(|candidate| candidate.tile).filter(|&tile| may_be(tile));
    tiles.min_by_key(|&tile| estimate_ns(tile)).unwrap_or(TILES[0].0)
}

/// This tile for tiles of one shard each, or another where these are to be sent as partial tiles,
/// which it has not.
pub(in crate::program) fn unless_unsent(problem: &Problem, tile: TileShape) -> TileShape {
    let is_unsent = CANDIDATES.iter().any(|candidate| candidate.tile == tile && !candidate.sent);
    if problem.op() == OpKind::GemmReduceScatter && is_unsent { usual(problem, false) } else { tile }
}

/// Whole tiles whose partial sums go to so many peers as messages, with what they cost. To several
/// 128x128 cost GPT-3 at 2048 rows 8 to 17 % more than serial takes on four H100, and 128x224 to
/// two peers at once 1 % less; on four H200 both take 2 % less (results/tuning/nccl-tp4.txt, 1. and
/// 3.). With 128x192, which it has so, four H100 take 4 % less (results/h100-x4-nccl.json).
fn sent_to(peers: u32) -> [(TileShape, u64); 4] {
    let [large, wide, narrow, (small, cost)] = TILES;
    [large, wide, narrow, (small, if peers > 1 { cost + 5 } else { cost })]
}

/// Tiles of one shard each for messages, with what they cost.
pub(in crate::program) fn of_shards(problem: &Problem) -> Vec<(TileShape, u64)> {
    if !is_ragged(problem) {
        // Messages carry partial tiles either way; of rows that come as messages narrow tiles cost
        // what they cost where partial tiles are sent: GPT-3 at TP 4 and 4096 takes 1.88 ms with
        // 128x128, and 1.80 with 128x256 though these leave it fewer multiprocessors
        // (results/tuning/nccl-tp4.txt).
        return match problem.op() {
            OpKind::AllGatherGemm => TILES.map(|(tile, _)| tile).into_iter().zip(TO_SEND).collect(),
            OpKind::GemmReduceScatter => sent_to(problem.world().peers()).to_vec(),
        };
    }
    let tiles = of_one_shard(problem).filter(|tile| tile.tile != LARGE.0);
    tiles.map(|tile| (tile.tile, percent(tile.tile, problem.m_shard(), Comes::BesideKernels))).collect()
}

/// Tiles that span shards, with what they cost.
pub(in crate::program) fn that_span(problem: &Problem) -> Vec<(TileShape, u64)> {
    let tiles = CANDIDATES.iter().filter(|tile| may_span(problem, tile));
    tiles.map(|tile| (tile.tile, percent(tile.tile, problem.m(), Comes::Carried))).collect()
}

/// The same of an AllGather-GEMM's rows that are all there when they begin, however many: nobody
/// pushes them.
pub(in crate::program) fn that_span_at_once(problem: &Problem) -> Vec<(TileShape, u64)> {
    let tiles = CANDIDATES.iter().filter(|tile| tile.tile != LARGE.0);
    tiles.map(|tile| (tile.tile, percent(tile.tile, problem.m(), Comes::Carried))).collect()
}

impl Schedule {
    /// The schedule of such rows over peer memory.
    pub(super) fn ragged(problem: &Problem) -> Self {
        Self::compared(problem).min_by_key(|schedule| schedule.estimate_ns(problem)).unwrap_or(Self::of(TILES[0].0))
    }

    /// All that are compared, the fastest by estimate first.
    pub(super) fn by_estimate(problem: &Problem) -> Vec<Self> {
        let mut all: Vec<Self> = Self::compared(problem).collect();
        all.sort_by_cached_key(|schedule| schedule.estimate_ns(problem));
        all
    }

    /// Each tile that there is for the problem, of one shard each and spanning shards; with what
    /// whole waves leave shared, where that may gain, and without.
    fn compared(problem: &Problem) -> impl Iterator<Item = Self> {
        let by_shard = of_one_shard(problem).filter(|_| problem.m_shard() >= ROWS);
        let by_shard = by_shard.flat_map(|tile| {
            let banded = Self::by_shard(problem, tile.tile);
            // The own rows of an AllGather-GEMM can be worked on while the others come, and those
            // of two peers side by side when they have.
            let one_by_one = (problem.op() == OpKind::AllGatherGemm && banded.band > 1).then_some(Self { band: 1, k_slices: 1, ..banded });
            let two_by_two = one_by_one.filter(|_| problem.world().peers() > 1).map(|one| Self { alone: 1, band: 2, ..one });
            let two_by_two = two_by_two.into_iter().flat_map(|whole| [whole.sharing(problem, MULTIPROCESSORS), whole]);
            let wider = std::iter::once(banded).chain(one_by_one).flat_map(|whole| {
                let shared = whole.sharing(problem, MULTIPROCESSORS).in_wider_bands(problem).sharing(problem, MULTIPROCESSORS);
                [shared, whole.in_wider_bands(problem)]
            });
            wider.chain(two_by_two)
        });
        let spanning = Self::all_spanning(problem).flat_map(|whole| {
            let whole = whole.in_slices(problem);
            [whole.sharing(problem, MULTIPROCESSORS), whole]
        });
        by_shard.chain(spanning)
    }

    /// With each tile that may span shards, in one slice and with nothing shared.
    pub(super) fn all_spanning(problem: &Problem) -> impl Iterator<Item = Self> {
        CANDIDATES.iter().filter(|tile| may_span(problem, tile)).map(|tile| Self::spanning(problem, tile.tile, 1))
    }

    /// The schedule of such rows of a GEMM-ReduceScatter whose tiles all span shards, where any
    /// can.
    pub(super) fn ragged_spanning(problem: &Problem) -> Option<Self> {
        Self::all_spanning(problem).min_by_key(|schedule| schedule.estimate_ns(problem))
    }

    /// Tiles that span shards for so many workers, all of whose rows are there when they begin: the
    /// fastest by estimate.
    pub(in crate::program) fn spanning_at_once(problem: &Problem, workers: u32) -> Option<Self> {
        let ways = Self::all_spanning(problem).flat_map(|whole| [whole, whole.sharing(problem, workers)]);
        ways.min_by_key(|schedule| schedule.estimate_with_ns(problem, workers.into()))
    }

    /// What whole waves of so many workers leave shared, where it gains as much as that costs.
    pub(in crate::program) fn sharing(self, problem: &Problem, workers: u32) -> Self {
        let sharing = Self { shares: workers, ..self };
        let sends = problem.op() == OpKind::GemmReduceScatter && problem.world().peers() > 0 && !self.stack;
        let uneven = if sends { UNEVEN } else { 0 };
        let gains = sharing.shared_tiles(problem).is_some_and(|shares| 100 * shares.time() <= (100 - uneven) * shares.steps());
        if gains { sharing } else { Self { shares: 1, ..self } }
    }
}

/// Whether tiles of this candidate may span shards.
fn may_span(problem: &Problem, tile: &Candidate) -> bool {
    let world = problem.world().get();
    let small = problem.m_shard() < ROWS;
    match problem.op() {
        _ if world == 1 => false,
        // They are the kernel's to push.
        OpKind::AllGatherGemm => (small || gather_place_bytes(problem) < COPY_ENGINE_BYTES) && tile.tile != LARGE.0,
        OpKind::GemmReduceScatter => {
            // Each rank has a signal for each tile, and folds take the longer the more ranks there
            // are.
            let signals = u64::from(world) * TileGrid::new(problem.m(), problem.n_local(), tile.tile).tiles();
            tile.scattered && (small || world <= MOST_FOLDED && signals <= MAX_ITEMS)
        }
    }
}

#[cfg(test)]
mod tests;
