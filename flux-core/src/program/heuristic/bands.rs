//! Which shards are worked on side by side, and which partial tiles are then early.
//!
//! Invariant: what a band waits for has come, by estimate, when it is begun, and what is early was
//! sent a wave before.

use super::super::MAX_ITEMS;
use super::tiles::area;
use super::{MULTIPROCESSORS, OPERATIONS, Schedule, WORKERS, most_early};
use crate::layout::gather_place_bytes;
use crate::machine::Machine;
use crate::tile::TileGrid;
use crate::{OpKind, Problem};
use std::time::Duration;

/// Bytes that a link carries in a nanosecond.
pub(super) const LINK: u64 = 370;
/// Rows of a shard below which its pass over `w` is better shared.
const FEW_ROWS: u32 = 1024;
/// Rows of peers' shards that share a pass over `w` in a GEMM-ReduceScatter, whose bands wait for
/// nothing.
const WIDE_ROWS: u32 = 3072;

impl Schedule {
    /// As this schedule, whose shards come or go one after another, where they do so as they like.
    pub(super) fn in_wider_bands(self, problem: &Problem) -> Self {
        match problem.op() {
            OpKind::AllGatherGemm if self.band > 1 || self.most_would_wait(problem) => self.a_wave_at_a_time(problem),
            OpKind::AllGatherGemm => self.one_or_two_at_a_time(problem),
            OpKind::GemmReduceScatter => self.in_the_widest_bands_that_are_in_time(problem),
        }
    }

    /// Whether the own shard has tiles for half of the workers at most, so that the others would
    /// wait until a peer's has come. In slices they begin when the first is there: simulated,
    /// AllGather-GEMM of Llama-2 70B at m = 4096 and TP 8 takes 0.340 ms instead of 0.373. Where
    /// all tiles are one wave it takes between 4 % less and 8 more time than to begin with the own
    /// ones (results/tuning/rests.txt).
    fn most_would_wait(&self, problem: &Problem) -> bool {
        let (own, workers) = (TileGrid::of_shard(problem, self.tile).tiles(), u64::from(WORKERS));
        !self.stack && 2 * own <= workers && own * u64::from(problem.world().get()) > workers
    }

    /// As many thin shards as make a wave of tiles: whoever had none of the first band would wait
    /// until all of it has come, and then for a band of its own.
    fn a_wave_at_a_time(self, problem: &Problem) -> Self {
        let of_a_wave = u64::from(WORKERS).div_ceil(TileGrid::of_shard(problem, self.tile).tiles()) as u32;
        let band = self.band.max(of_a_wave).min(problem.world().get());
        let sliced = Self { band, ..self }.in_best_slices(problem);
        // Whoever has the last steps of a shared tile would await the last slice first.
        Self { shares: if sliced.k_slices > 1 { 1 } else { sliced.shares }, ..sliced }
    }

    /// After the own shard two at a time, where shards have few row blocks, each of which would
    /// read `w` once more by itself, and where the first two will have come by the wave that begins
    /// them. At TP 4 and m = 2048 they have; three at a time, of which the last may just be late,
    /// are slower (results/tuning/wide-bands.txt). Otherwise one at a time, and chunk by chunk
    /// those that will not have come by the wave that begins them: at TP 8, where the own shard is
    /// less than a wave.
    fn one_or_two_at_a_time(self, problem: &Problem) -> Self {
        let (grid, peers) = (TileGrid::of_shard(problem, self.tile), problem.world().peers());
        if self.stack {
            return self;
        }
        let chunks = grid.row_blocks().div_ceil(self.chunk_of(grid.row_blocks()));
        let chunk = Machine::H200.copying(gather_place_bytes(problem) / u64::from(chunks));
        let come = |shards: u32| {
            Duration::from_nanos(Machine::H200.copy_begins_ns).saturating_add(chunk.saturating_mul(shards.saturating_mul(chunks)))
        };
        // Of the first wave a few workers may wait, that of a shard which is a little less.
        let workers = u64::from(MULTIPROCESSORS);
        let tile_ns =
            2 * u128::from(area(self.tile)) * u128::from(problem.k_local()) / u128::from(OPERATIONS) + u128::from(Machine::H200.tile_ns);
        let shares = self.shared_tiles(problem);
        let begun = |shards: u32| {
            let tile = u64::from(shards) * grid.tiles() + workers / 16;
            match shares {
                Some(shares) if shares.has(tile) => 0,
                Some(shares) => {
                    tile_ns * u128::from(shares.time()) / u128::from(shares.steps()) + u128::from(shares.wave(tile, workers) - 1) * tile_ns
                }
                None => u128::from(tile / workers) * tile_ns,
            }
        };
        // A wait of a sixteenth of a tile is less than what the pass over `w` takes.
        if problem.m_shard() < FEW_ROWS && peers > 1 && come(2).as_nanos() <= begun(1) + tile_ns / 16 {
            return Self { alone: 1, band: 2, ..self };
        }
        let late = (1..=peers).take_while(|&shard| chunks > 1 && come(shard).as_nanos() > begun(shard)).count();
        Self { by_chunk: late as u32, ..self }
    }

    /// In the widest bands in which as many partial tiles are sent a wave before they are added;
    /// and these early, where the own tiles are more than a wave.
    fn in_the_widest_bands_that_are_in_time(self, problem: &Problem) -> Self {
        if self.stack {
            return self;
        }
        let in_time = |band| Self { band, ..self }.sent_a_wave_before(problem);
        let most = (WIDE_ROWS / problem.m_shard()).min(problem.world().peers());
        let band = (self.band..=most).rev().find(|&band| in_time(band) >= in_time(self.band)).unwrap_or(self.band);
        // Where all own tiles are in the last wave together, early partial tiles cost more than
        // they spare on one GPU as rank of 8 at m = 2048, 0.7 to 1.0 %, and at 1024, 2 to 5 %; of
        // two and four ranks it is less in one row and more in another (results/tuning/rests.txt,
        // early.txt).
        let own_tiles = TileGrid::of_shard(problem, self.tile).tiles();
        Self { band, early: if own_tiles > u64::from(MULTIPROCESSORS) { in_time(band) } else { 0 }, ..self }
    }

    /// Of the partial tiles that a GEMM-ReduceScatter adds to an own one, how many were multiplied
    /// in an earlier wave, counted from the first to be sent: they are there when the own tile is
    /// half done at the latest. An own tile whose worker has nothing to do in the last wave may
    /// wait.
    fn sent_a_wave_before(&self, problem: &Problem) -> u32 {
        let (world, tiles) = (u64::from(problem.world().get()), TileGrid::of_shard(problem, self.tile).tiles());
        // Of more no program is made, and there would be as many to look at.
        if world * tiles > MAX_ITEMS {
            return 0;
        }
        let (workers, shares) = (u64::from(MULTIPROCESSORS), self.shared_tiles(problem));
        let wave = |tile| shares.map_or(tile / workers, |shares| shares.wave(tile, workers));
        let before = |step: u64| {
            // Of the band that the step is in: its first step, and how many there are.
            let first = step - (step - 1) % u64::from(self.band);
            let steps = u64::from(self.band).min(world - first);
            let in_time = |tile: u64| {
                let (sent, own) = ((first - 1) * tiles + tile * steps + step - first, (world - 1) * tiles + tile);
                let last = own + workers >= world * tiles;
                wave(sent) < wave(own) || last && wave(own) < wave(world * tiles - 1)
            };
            (0..tiles).all(in_time)
        };
        let there = (1..world).take_while(|&step| before(step)).count() as u32;
        there.min(most_early(problem.k_local().div_ceil(self.tile.k)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::own;
    use crate::OpKind;

    #[test]
    fn partial_tiles_are_early_where_they_were_multiplied_a_wave_before() {
        let early = |world, op, m, n, k| own(world, op, m, n, k).early;
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert_eq!(early(4, rs, 8192, 12288, 49152), 3, "a shard is four waves");
        assert_eq!(early(4, rs, 4096, 12288, 49152), 3, "256 tiles of a shard are nearly two");
        assert_eq!(early(4, rs, 2048, 12288, 49152), 0, "128 are in one");
        assert_eq!(early(8, rs, 8192, 12288, 49152), 7);
        assert_eq!(early(2, rs, 8192, 12288, 49152), 1);
        assert_eq!(
            early(4, rs, 8192, 12288, 4 * 1280),
            2,
            "20 steps along k, of which two have four each behind the tenth, and two are left"
        );
        assert_eq!((early(8, rs, 256, 12288, 49152), early(4, ag, 8192, 49152, 12288)), (0, 0), "nothing is added to tiles");
    }

    #[test]
    fn shards_of_few_row_blocks_are_taken_side_by_side_once_they_have_come() {
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let bands = |world, op, m, n, k| {
            let schedule = own(world, op, m, n, k);
            (schedule.alone, schedule.band)
        };
        assert_eq!(
            (bands(4, ag, 2048, 49152, 12288), bands(4, ag, 2048, 28672, 8192)),
            ((1, 2), (1, 2)),
            "the first is there a wave and a half later"
        );
        assert_eq!(
            (bands(4, ag, 1024, 49152, 12288), bands(4, ag, 4096, 49152, 12288)),
            ((0, 2), (0, 1)),
            "2 row blocks begin in slices, 8 are enough by themselves"
        );
        assert_eq!(
            (bands(8, ag, 4096, 49152, 12288), bands(8, ag, 4096, 28672, 8192)),
            ((0, 2), (0, 2)),
            "of 8 ranks the own shard is half of a wave"
        );
        assert_eq!(bands(4, ag, 2048, 3072, 3072), (0, 1), "all is less than a wave");
        assert_eq!((bands(2, ag, 1024, 49152, 12288), bands(4, rs, 2048, 8192, 28672)), ((0, 1), (0, 3)), "one peer, and all three");
        assert_eq!(
            (bands(4, rs, 1024, 12288, 49152), bands(8, rs, 2048, 12288, 49152)),
            ((0, 2), (0, 6)),
            "the last would share a wave with the own shard"
        );
        assert_eq!(bands(4, rs, 8192, 12288, 49152), (0, 1), "2048 rows are enough");
        assert_eq!(bands(4, ag, 256, 49152, 12288), (0, 1), "tiles span shards");
        let by_chunk = |world, m, n, k| own(world, ag, m, n, k).by_chunk;
        assert_eq!(by_chunk(8, 8192, 28672, 8192), 4, "what comes after these has come by then");
        assert_eq!([by_chunk(4, 8192, 49152, 12288), by_chunk(2, 1024, 28672, 8192)], [0, 0], "the own shard is a wave and more");
        assert_eq!((bands(8, ag, 1024, 28672, 8192), bands(8, ag, 1024, 49152, 12288)), ((0, 8), (0, 4)), "shards of 16 tiles, and of 32");
    }
}
