//! In how many slices of `k` the rows of an AllGather-GEMM come, and how much longer it takes that tiles wait for them.
//!
//! Invariant: of the numbers of slices it is the least with which the first waves of the bands are done nearly the earliest by estimate.

use super::super::arrivals::Arrivals;
use super::super::pushing::{COPY_ENGINE_BYTES, are_for_copy_engines};
use super::estimate::PUSHED_NS;
use super::tiles::area;
use super::{MULTIPROCESSORS, OPERATIONS, Schedule};
use crate::layout::gather_place_bytes;
use crate::machine::Machine;
use crate::{OpKind, Problem};

/// What a rank sends of one slice along k, to all who await it together, where tiles await several shards: they begin when the first slice is there. About 3 us of a
/// link; fewer slices are slower, more bring nothing (results/tuning/slices-tp2.txt).
const SLICE_BYTES: u64 = 1 << 20;
/// Most slices.
const MOST_SLICES: u32 = 12;
/// Of so many nanoseconds of products fewer slices may cost one: narrow pieces take copy engines longer, and the host more of each. GPT-3 at TP 4 takes 0.505 ms with seven slices and 0.510 with
/// two at 1280 rows, and 0.758 with four, 0.819 with eleven at 1920 (results/tuning/slices-tp4.txt, 1.).
const SPARED: u64 = 250;
/// Percent that products take longer beside a large shard that the kernel pushes and not a copy engine: 1.3 to 3 (results/tuning/push-kernel.json, push-copy-engine.json; slices-tp4.txt, 1.).
const DISTURBED: u64 = 2;

impl Schedule {
    /// In slices of `k`, where a band has several shards: as many as let its tiles be done the earliest.
    pub(super) fn in_best_slices(self, problem: &Problem) -> Self {
        if problem.op() != OpKind::AllGatherGemm {
            return Self { k_chunks: 1, ..self };
        }
        let shards = if self.stack { problem.world().get() } else { self.band };
        let sent = gather_place_bytes(problem) * u64::from(shards.saturating_sub(1));
        let most = u32::try_from(sent / SLICE_BYTES).unwrap_or(u32::MAX).clamp(1, MOST_SLICES);
        let multiplied = problem.flop_per_rank() / (u64::from(MULTIPROCESSORS) * OPERATIONS);
        let waiting: Vec<u64> = (1..=most).map(|k_chunks| Self { k_chunks, ..self }.waiting_for_slices_ns(problem, multiplied)).collect();
        let enough = waiting.iter().min().map_or(0, |least| least + multiplied / SPARED);
        let fewer = waiting.iter().position(|&waiting| waiting <= enough);
        Self { k_chunks: fewer.map_or(1, |fewer| fewer as u32 + 1), ..self }
    }

    /// How many nanoseconds longer a call takes whose products take `multiplied` because the first tiles of each band wait for slices of `k`, which leave one after another.
    pub(super) fn waiting_for_slices_ns(&self, problem: &Problem, multiplied: u64) -> u64 {
        let (world, arrivals) = (problem.world(), Arrivals::new(problem, self));
        let (chunks, slices) = (u64::from(arrivals.chunks()), u64::from(arrivals.slices()));
        let copied = self.is_copied(problem, &arrivals);
        let bytes = gather_place_bytes(problem) / (chunks * slices);
        // Of a piece of a shard that goes to so many ranks.
        let leaves = |ranks: u64| {
            let carried = Machine::H200.carrying(ranks * bytes).as_nanos() as u64;
            carried + if copied { ranks * Machine::H200.copy_ns } else { Machine::H200.pushing_ns(ranks) }
        };
        let tile_ns = 2 * area(self.tile) * u64::from(problem.k_local()) / OPERATIONS;
        let banded = if self.stack { Self { alone: 0, band: world.get(), ..*self } } else { *self };
        let mut left = if copied { Machine::H200.copy_begins_ns } else { Machine::H200.push_begins_ns };
        let mut done = 0;
        for band in banded.bands(world) {
            let work = u64::try_from(u128::from(multiplied) * band.len() as u128 / u128::from(world.get())).unwrap_or(multiplied);
            let wave = tile_ns.min(work);
            let ranks = band.clone().filter(|&step| step > 0).count() as u64;
            let mut first = done + wave;
            for slice in 0..slices {
                left += chunks * leaves(ranks);
                if ranks > 0 {
                    first = first.max(left + Machine::H200.signal_ns + wave * (slices - slice) / slices);
                }
            }
            done = first + (work - wave);
        }
        let disturbed = if !copied && gather_place_bytes(problem) >= COPY_ENGINE_BYTES { multiplied / 100 * DISTURBED } else { 0 };
        done.saturating_sub(multiplied) + disturbed
    }

    /// Whether copy engines push a shard that is cut so.
    fn is_copied(&self, problem: &Problem, arrivals: &Arrivals) -> bool {
        let in_slices = if arrivals.slices() > 1 { arrivals.signals(problem.world().peers()) } else { 0 };
        !self.stack && are_for_copy_engines(problem, in_slices)
    }

    /// What of that an estimate counts. Of one peer the plans that were timed beside each other, whose rows the kernel pushes, are told apart by what first rows take alone.
    pub(super) fn begins_ns(&self, problem: &Problem, multiplied: u64) -> u64 {
        let pushed_to_one = problem.world().peers() == 1 && !self.is_copied(problem, &Arrivals::new(problem, self));
        if pushed_to_one { PUSHED_NS } else { self.waiting_for_slices_ns(problem, multiplied) }
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

    /// What ran fastest of the numbers of slices that were tried, or within 2 % of it (results/tuning/slices-tp4.txt, 1. and 4.).
    #[test]
    fn rows_come_in_few_slices() {
        let slices = |world, m, (n, k): (usize, usize)| own(world, AG, m, n, k).k_chunks;
        for (world, m, model, tried) in [(4, 1280, GPT3, 2..=7), (4, 1536, GPT3, 4..=9), (4, 1920, GPT3, 3..=6), (4, 1280, LLAMA, 4..=6)] {
            assert!(tried.contains(&slices(world, m, model)), "{world} ranks, {m} rows of {model:?}: {}", slices(world, m, model));
        }
        for m in [600, 800, 896, 960] {
            assert!((4..=6).contains(&slices(2, m, GPT3)), "{m}: {}", slices(2, m, GPT3));
        }
        assert_eq!([800, 896, 960].map(|m| slices(2, m, LLAMA)), [1; 3], "shard by shard");
    }

    /// By a simulator that counts pieces one by one.
    #[test]
    fn as_many_slices_as_there_may_be_are_no_faster() {
        for (world, m, model) in [(4, 1280, LLAMA), (4, 1920, GPT3), (4, 1040, LLAMA), (8, 1024, GPT3)] {
            let (problem, few) = (problem(world, m, model), own(world, AG, m, model.0, model.1));
            let [few, many] = [few, Schedule { k_chunks: MOST_SLICES, ..few }].map(|schedule| simulated(&problem, &schedule));
            assert!(few.as_nanos() * 99 <= many.as_nanos() * 100, "{world} ranks, {m} rows: {few:?}, and {many:?} in many");
        }
    }
}
