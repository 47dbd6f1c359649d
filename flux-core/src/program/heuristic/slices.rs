//! In how many slices of `k` the rows of an AllGather-GEMM come, and how much longer it takes that
//! tiles wait for them.
//!
//! Workers take tiles strided, so who waits for a band's rows has waited for those of the bands
//! before, if it had tiles of these, and goes on later with what comes after: of Llama at 1280 rows
//! on four ranks 20 of 132 workers have their first tile in the second band of two shards, a tile
//! later than the others, and that is 50 us of 285 (results/tuning/slices-tp4.txt, 6.).
//!
//! Invariant: of the numbers of slices it is the least with which the tiles of all bands are done
//! nearly the earliest by estimate.

use super::super::arrivals::Arrivals;
use super::super::pushing::{COPY_ENGINE_BYTES, are_for_copy_engines};
use super::candidates::{Comes, percent};
use super::estimate::PUSHED_NS;
use super::tiles::area;
use super::{MULTIPROCESSORS, OPERATIONS, Schedule};
use crate::layout::gather_place_bytes;
use crate::machine::Machine;
use crate::tile::TileGrid;
use crate::{OpKind, Problem};
use std::ops::Range;

/// What a rank sends of one slice along k, to all who await it together, where tiles await several
/// shards: they begin when the first slice is there. About 3 us of a link; fewer slices are slower,
/// more bring nothing (results/tuning/slices-tp2.txt).
const SLICE_BYTES: u64 = 1 << 20;
/// Most slices.
const MOST_SLICES: u32 = 12;
/// Of so many nanoseconds of products fewer slices may cost one: narrow pieces take copy engines
/// longer, and the host more of each. GPT-3 at TP 4 takes 0.505 ms with seven slices and 0.510 with
/// two at 1280 rows, and 0.758 with four, 0.819 with eleven at 1920 (results/tuning/slices-tp4.txt,
/// 1.).
const SPARED: u64 = 250;
/// Percent that products take longer beside a large shard that the kernel pushes and not a copy
/// engine: 1.3 to 3 (results/tuning/push-kernel.json, push-copy-engine.json; slices-tp4.txt, 1.).
const DISTURBED: u64 = 2;

/// Tiles of shards that are worked on side by side, and when each slice of their rows is there:
/// none is awaited of own rows.
#[derive(Clone, Debug)]
struct Band {
    tiles: u64,
    slices: Vec<u64>,
}

impl Schedule {
    /// In slices of `k`, where a band has several shards: as many as let its tiles be done the
    /// earliest.
    pub(super) fn in_best_slices(self, problem: &Problem) -> Self {
        if problem.op() != OpKind::AllGatherGemm {
            return Self { k_slices: 1, ..self };
        }
        let shards = if self.stack { problem.world().get() } else { self.band };
        let sent = gather_place_bytes(problem) * u64::from(shards.saturating_sub(1));
        let most = u32::try_from(sent / SLICE_BYTES).unwrap_or(u32::MAX).clamp(1, MOST_SLICES);
        let multiplied = problem.flop_per_rank() / (u64::from(MULTIPROCESSORS) * OPERATIONS);
        let waiting: Vec<u64> = (1..=most).map(|k_slices| Self { k_slices, ..self }.waiting_for_rows_ns(problem, multiplied)).collect();
        let enough = waiting.iter().min().map_or(0, |least| least + multiplied / SPARED);
        let fewer = waiting.iter().position(|&waiting| waiting <= enough);
        Self { k_slices: fewer.map_or(1, |fewer| fewer as u32 + 1), ..self }
    }

    /// How many nanoseconds longer a call takes whose products take `multiplied` because tiles wait
    /// for rows, which leave piece by piece: those of a band that come in the wave of an earlier
    /// one, and what is shared, too.
    fn waiting_for_rows_ns(&self, problem: &Problem, multiplied: u64) -> u64 {
        let arrivals = Arrivals::new(problem, self);
        let copied = self.is_copied(problem, &arrivals);
        let come = self.rows_come(problem, &arrivals, copied);
        let at_once = come.iter().map(|band| Band { slices: Vec::new(), ..*band }).collect::<Vec<_>>();
        let waited = self.bands_done_ns(problem, &come).saturating_sub(self.bands_done_ns(problem, &at_once));
        let disturbed = if !copied && gather_place_bytes(problem) >= COPY_ENGINE_BYTES { multiplied / 100 * DISTURBED } else { 0 };
        waited + disturbed
    }

    /// The bands, with when each slice of their rows is there; chunks where these are worked on as
    /// they come.
    fn rows_come(&self, problem: &Problem, arrivals: &Arrivals, copied: bool) -> Vec<Band> {
        let (world, machine) = (problem.world(), Machine::H200);
        let (m_shard, slices) = (u64::from(problem.m_shard()), u64::from(arrivals.slices()));
        let row_bytes = gather_place_bytes(problem) / m_shard / slices;
        let rows_of =
            |chunk: u32| m_shard.saturating_sub(u64::from(chunk) * u64::from(arrivals.chunk_rows())).min(arrivals.chunk_rows().into());
        // Of a slice of a chunk that goes to so many ranks: tiles that span shards await the own
        // rows in the gather buffer, too.
        let leaves = |chunk: u32, ranks: u64| {
            let extents = (rows_of(chunk), row_bytes);
            let bytes = extents.0 * row_bytes;
            let piece = if copied {
                machine.copying(bytes).saturating_mul(ranks as u32)
            } else {
                machine.carrying(ranks * bytes).saturating_add(machine.pushing(extents, ranks + u64::from(self.stack)))
            };
            piece.as_nanos() as u64
        };
        // From when workers begin.
        let mut left = if copied { machine.copy_begins_ns } else { machine.push_begins_ns }.saturating_sub(machine.begin_ns);
        let mut come = |chunks: Range<u32>, ranks: u64| {
            left += chunks.map(|chunk| leaves(chunk, ranks)).sum::<u64>();
            left + machine.signal_ns
        };
        if self.stack {
            let tiles = TileGrid::new(problem.m(), problem.n_local(), self.tile).tiles();
            return vec![Band { tiles, slices: (0..slices).map(|_| come(0..arrivals.chunks(), world.peers().into())).collect() }];
        }
        let grid = TileGrid::of_shard(problem, self.tile);
        let mut bands = Vec::new();
        for band in self.bands(world) {
            let (tiles, ranks) = (band.len() as u64 * grid.tiles(), band.clone().filter(|&step| step > 0).count() as u64);
            if ranks == 0 {
                bands.push(Band { tiles, slices: Vec::new() });
            } else if band.len() > 1 {
                bands.push(Band { tiles, slices: (0..slices).map(|_| come(0..arrivals.chunks(), ranks)).collect() });
            } else {
                let of_chunk = |chunk: u32| {
                    let tiles = rows_of(chunk).div_ceil(self.tile.m.into()) * u64::from(grid.col_blocks());
                    Band { tiles, slices: (0..slices).map(|_| come(chunk..chunk + 1, 1)).collect() }
                };
                let chunks: Vec<Band> = (0..arrivals.chunks()).map(of_chunk).collect();
                if band.start <= self.by_chunk {
                    bands.extend(chunks);
                } else {
                    // Of each chunk there is a tile among the first.
                    bands.extend(chunks.into_iter().next_back().map(|last| Band { tiles, ..last }));
                }
            }
        }
        bands
    }

    /// When the tiles of these bands are done, whose workers take them strided: of a band a
    /// worker's first awaits each slice as it comes to it, and what is shared, first or last, all
    /// slices of its shards.
    fn bands_done_ns(&self, problem: &Problem, bands: &[Band]) -> u64 {
        let (workers, shares) = (u64::from(MULTIPROCESSORS), self.shared_tiles(problem));
        let rows = if self.stack { problem.m() } else { problem.m_shard() };
        let tile_ns = 2 * area(self.tile) * u64::from(problem.k_local()) * percent(self.tile, rows, Comes::ToPeers) / (100 * OPERATIONS);
        let tiles: u64 = bands.iter().map(|band| band.tiles).sum();
        let shared = shares.map_or(tiles..tiles, |shares| shares.before()..shares.before() + shares.count());
        let whole = if shared.start == 0 { shared.end..tiles } else { 0..shared.start };
        // Those of each band.
        let of_bands = bands.iter().scan(0, |end, band| {
            let first = *end;
            *end += band.tiles;
            Some((first..*end, band))
        });
        let of_bands: Vec<(Range<u64>, &Band)> = of_bands.collect();
        let of_shared = of_bands.iter().filter(|(tiles, _)| tiles.start < shared.end && shared.start < tiles.end);
        let all_come = of_shared.filter_map(|(_, band)| band.slices.last()).copied().max().unwrap_or(0);
        let sharing_ns = shares.map_or(0, |shares| tile_ns * shares.time() / shares.steps());
        let begun = if shares.is_some() && shared.start == 0 { all_come + sharing_ns } else { 0 };
        let in_whole = |tile: u64| tile.clamp(whole.start, whole.end) - whole.start;
        // Workers between the same borders of bands have as many tiles of each.
        let of_worker = |worker: u64| {
            let before = |tile: u64| (in_whole(tile) + workers - 1 - worker) / workers;
            of_bands.iter().fold(begun, |begun, (tiles, band)| match before(tiles.end) - before(tiles.start) {
                0 => begun,
                tiles => {
                    let slices = band.slices.len() as u64;
                    let left = |(slice, &come): (u64, &u64)| come + tile_ns * (slices - slice) / slices;
                    let first = (0..).zip(&band.slices).map(left).fold(begun.saturating_add(tile_ns), u64::max);
                    first.saturating_add(tile_ns.saturating_mul(tiles - 1))
                }
            })
        };
        let firsts = of_bands.iter().flat_map(|(tiles, _)| [tiles.start, tiles.end]).map(|tile| in_whole(tile) % workers);
        let done = firsts.map(of_worker).max().unwrap_or(begun);
        if shared.start > 0 && shares.is_some() { done.max(all_come).saturating_add(sharing_ns) } else { done }
    }

    /// Whether copy engines push a shard that is cut so.
    fn is_copied(&self, problem: &Problem, arrivals: &Arrivals) -> bool {
        let in_slices = if arrivals.slices() > 1 { arrivals.signals(problem.world().peers()) } else { 0 };
        !self.stack && are_for_copy_engines(problem, in_slices)
    }

    /// What of that an estimate counts. Of one peer the plans in slices that were timed beside each
    /// other, whose rows the kernel pushes, are told apart by what first rows take alone.
    pub(super) fn begins_ns(&self, problem: &Problem, multiplied: u64) -> u64 {
        let pushed_to_one = self.k_slices > 1 && problem.world().peers() == 1 && !self.is_copied(problem, &Arrivals::new(problem, self));
        if pushed_to_one { PUSHED_NS } else { self.waiting_for_rows_ns(problem, multiplied) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{own, simulated};
    use super::*;
    use crate::{DType, WorldSize};

    const AG: OpKind = OpKind::AllGatherGemm;
    const GPT3: (usize, usize) = (49152, 12288);
    const LLAMA: (usize, usize) = (28672, 8192);

    fn problem(world: u32, m: usize, (n, k): (usize, usize)) -> Problem {
        Problem::new(AG, m, n, k, DType::Bf16, WorldSize::new(world).expect("ranks")).expect("a problem")
    }

    /// What ran fastest of the numbers of slices that were tried, or within 2 % of it
    /// (results/tuning/slices-tp4.txt, 1. and 4.).
    #[test]
    fn rows_come_in_few_slices() {
        let slices = |world, m, (n, k): (usize, usize)| own(world, AG, m, n, k).k_slices;
        for (world, m, model, tried) in [(4, 1280, GPT3, 2..=7), (4, 1536, GPT3, 4..=9), (4, 1280, LLAMA, 4..=6)] {
            assert!(tried.contains(&slices(world, m, model)), "{world} ranks, {m} rows of {model:?}: {}", slices(world, m, model));
        }
        for m in [600, 800, 896, 960] {
            assert!((4..=6).contains(&slices(2, m, GPT3)), "{m}: {}", slices(2, m, GPT3));
        }
        assert_eq!([800, 896, 960].map(|m| slices(2, m, LLAMA)), [1; 3], "shard by shard");
    }

    /// What four GPUs took with other bands and slices of the same tiles, and with other tiles:
    /// four H100, of GPT-3 at 1280 to 1920 rows and Llama at 1536 four H200
    /// (results/tuning/slices-tp4.txt, 6. and 1.). With or without shards chunk by chunk, as which
    /// Llama's first at 1920 rows was not timed.
    #[test]
    fn four_ranks_choose_what_was_timed_to_be_fast() {
        for (m, model, timed) in [
            (896, GPT3, "256x192 b2 k4 0.407 | 240x128 b3 k7 0.401 | 128x256 b2 k4 0.411 | 136x256 b2 k4 0.434"),
            (900, GPT3, "256x192 b2 k4 0.408 | 240x128 b3 k7 0.401 | 128x256 b2 k4 0.413 | 136x256 b2 k4 0.436"),
            (
                1280,
                GPT3,
                "160x256 b2 k7 0.505 | 160x256 b2 k5 0.508 | 160x256 b2 k4 0.507 | 160x256 b2 k3 0.508 | 160x256 b1 k1 0.556 | 160x256 a1 b2 k1 0.556",
            ),
            (
                1536,
                GPT3,
                "192x256 b2 k9 0.598 | 192x256 b2 k5 0.598 | 192x256 b2 k4 0.599 | 192x256 b2 k3 0.602 | 192x256 b1 k1 0.643 | 192x256 a1 b2 k1 0.656",
            ),
            (1920, GPT3, "240x128 b2 k11 0.819 | 240x128 b2 k4 0.758 | 240x128 b2 k3 0.758 | 240x128 b1 k1 0.769 | 240x128 a1 b2 k1 0.756"),
            (
                1280,
                LLAMA,
                "160x256 b3 k5 0.268 | 160x256 b3 k4 0.235 | 160x256 b3 k3 0.247 | 160x256 b1 k1 0.254 | 160x256 S k9 0.255 | 160x256 b2 k4 0.285 | 160x256 b4 k4 0.234",
            ),
            (
                1320,
                LLAMA,
                "168x256 b3 k5 0.274 | 168x256 b3 k4 0.241 | 168x256 b3 k3 0.256 | 168x256 b1 k1 0.265 | 168x256 S k9 0.261 | 168x256 b2 k4 0.296 | 168x256 b4 k4 0.245",
            ),
            (1536, LLAMA, "128x256 b2 k4 0.257 | 128x256 b2 k3 0.259 | 128x256 b2 k2 0.260 | 128x256 b1 k1 0.250 | 128x256 a1 b2 k1 0.247"),
            (
                1920,
                LLAMA,
                "240x128 b2 k5 0.374 | 240x128 b2 k4 0.343 | 240x128 b2 k3 0.322 | 240x128 b1 k1 0.311 | 240x128 S k9 0.380 | 240x128 b4 k4 0.425",
            ),
            (2080, LLAMA, "176x256 b1 k1 0.338 | 176x256 b2 k4 0.351 | 176x256 b4 k4 0.378 | 176x256 b1 k3 0.421 | 176x256 S k9 0.429"),
        ] {
            let Schedule { tile, alone, band, k_slices, stack, .. } = own(4, AG, m, model.0, model.1);
            let bands =
                if stack { "S".to_owned() } else { format!("{}b{band}", if alone > 0 { format!("a{alone} ") } else { String::new() }) };
            let ours = format!("{}x{} {bands} k{k_slices}", tile.m, tile.n);
            let plans = timed.split(" | ").map(|plan| plan.rsplit_once(' ').expect("a plan and its time"));
            let plans: Vec<(&str, f64)> = plans.map(|(plan, took)| (plan, took.parse().expect("milliseconds"))).collect();
            let fastest = plans.iter().map(|plan| plan.1).fold(f64::INFINITY, f64::min);
            let took = plans.iter().find(|plan| plan.0 == ours).map(|plan| plan.1);
            assert!(took.is_some_and(|took| took <= 1.03 * fastest), "{m} rows of {model:?}: {ours}, {took:?} of {fastest} ms");
        }
    }

    /// The estimate of the plans in which AllGather-GEMM of Llama was tried on four H100 is near
    /// what they took, and not only in their order (results/tuning/slices-tp4.txt, 6.).
    #[test]
    fn what_tiles_wait_for_is_in_the_estimate() {
        let with = |schedule: Schedule, band, k_slices| Schedule { alone: 0, by_chunk: 0, band, k_slices, ..schedule };
        for (m, tried) in [
            (1280, &[(3, 5, 0.268), (3, 4, 0.235), (3, 3, 0.247), (1, 1, 0.254), (2, 4, 0.285), (4, 4, 0.234)][..]),
            (1320, &[(3, 5, 0.274), (3, 4, 0.241), (3, 3, 0.256), (1, 1, 0.265), (2, 4, 0.296), (4, 4, 0.245)]),
            (1920, &[(2, 5, 0.374), (2, 4, 0.343), (2, 3, 0.322), (1, 1, 0.311), (4, 4, 0.425)]),
        ] {
            let (problem, own) = (problem(4, m, LLAMA), own(4, AG, m, LLAMA.0, LLAMA.1));
            for &(band, k_slices, took) in tried {
                let estimate = with(own, band, k_slices).estimate_ns(&problem) as f64 / 1e6;
                assert!(
                    (estimate / took - 1.0).abs() < 0.09,
                    "{m} rows, band {band}, {k_slices} slices: {estimate:.3} ms by estimate, {took} measured"
                );
            }
        }
    }

    /// By a simulator that counts pieces one by one. By a percent they are where all others are
    /// wider than what is pushed at a time, as those of eight ranks.
    #[test]
    fn as_many_slices_as_there_may_be_are_no_faster() {
        for (world, m, model) in [(4, 1280, LLAMA), (4, 1920, GPT3), (4, 1040, LLAMA), (8, 1024, GPT3)] {
            let (problem, few) = (problem(world, m, model), own(world, AG, m, model.0, model.1));
            let [few, many] = [few, Schedule { k_slices: MOST_SLICES, ..few }].map(|schedule| simulated(&problem, &schedule));
            assert!(few.as_nanos() * 98 <= many.as_nanos() * 100, "{world} ranks, {m} rows: {few:?}, and {many:?} in many");
        }
    }
}
