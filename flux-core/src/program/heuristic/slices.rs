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
        let waiting = |k_chunks| Self { k_chunks, ..self }.waiting_for_slices_ns(problem, multiplied);
        let least = (1..=most).map(waiting).min().unwrap_or(0);
        let k_chunks = (1..=most).find(|&k_chunks| waiting(k_chunks) <= least + multiplied / SPARED).unwrap_or(1);
        Self { k_chunks, ..self }
    }

    /// How many nanoseconds longer a call takes whose products take `multiplied` because the first tiles of each band wait for slices of `k`, which leave one after another.
    pub(super) fn waiting_for_slices_ns(&self, problem: &Problem, multiplied: u64) -> u64 {
        let (world, arrivals) = (problem.world(), Arrivals::new(problem, self));
        let (chunks, slices) = (u64::from(arrivals.chunks()), u64::from(arrivals.slices()));
        let copied = self.is_copied(problem, chunks * slices);
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

    /// Whether copy engines push a shard that is cut into so many pieces, several of them slices of `k`.
    fn is_copied(&self, problem: &Problem, pieces: u64) -> bool {
        !self.stack && are_for_copy_engines(problem, if self.k_chunks > 1 { pieces * u64::from(problem.world().peers()) } else { 0 })
    }

    /// What of that an estimate counts. Of one peer the plans that were timed beside each other, whose rows the kernel pushes, are told apart by what first rows take alone.
    pub(super) fn begins_ns(&self, problem: &Problem, multiplied: u64) -> u64 {
        let arrivals = Arrivals::new(problem, self);
        let copied = self.is_copied(problem, u64::from(arrivals.chunks()) * u64::from(arrivals.slices()));
        if problem.world().peers() < 2 && !copied { PUSHED_NS } else { self.waiting_for_slices_ns(problem, multiplied) }
    }
}
