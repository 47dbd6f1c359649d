//! Which shards are worked on side by side, and which partial tiles are then early.
//!
//! Invariant: what a band waits for has come, by estimate, when it is begun, and what is early was sent a wave before.

use super::{MULTIPROCESSORS, OPERATIONS, ROW_GROUP, Schedule, WORKERS, area, most_early, slices};
use crate::layout::gather_place_bytes;
use crate::machine::Machine;
use crate::tile::TileGrid;
use crate::{OpKind, Problem};
use std::time::Duration;

/// Bytes that a link carries in a nanosecond.
pub(super) const LINK: u64 = 370;
/// Rows of peers' shards that share a pass over `w` in a GEMM-ReduceScatter, whose bands wait for nothing.
const WIDE_ROWS: u32 = 3072;
/// Tiles of the own shard from which on partial tiles are added while they are multiplied. With fewer, at TP 8 and m = 1024, early ones cost 2 to 5 % (results/tuning/early.txt),
/// perhaps because most workers have no own tile in the last wave, and the others get on faster when these have ended.
const OWN_TILES: u64 = 64;

impl Schedule {
    /// As this schedule, whose shards come or go one after another, where they do so as they like.
    pub(super) fn in_wider_bands(self, problem: &Problem) -> Self {
        match problem.op() {
            OpKind::AllGatherGemm if self.band > 1 => self.a_wave_at_a_time(problem),
            OpKind::AllGatherGemm => self.one_or_two_at_a_time(problem),
            OpKind::GemmReduceScatter => self.as_many_at_a_time_as_may_be_early(problem),
        }
    }

    /// As many thin shards as make a wave of tiles: whoever had none of the first band would wait until all of it has come, and then for a band of its own.
    fn a_wave_at_a_time(self, problem: &Problem) -> Self {
        let of_a_wave = u64::from(WORKERS).div_ceil(TileGrid::of_shard(problem, self.tile).tiles()) as u32;
        let band = self.band.max(of_a_wave).min(problem.world().get());
        Self { band, k_chunks: slices(problem, band), ..self }
    }

    /// After the own shard two at a time, where shards have few row blocks, each of which would read `w` once more by itself, and where the first two will have come by the wave
    /// that begins them. At TP 4 and m = 2048 they have; three at a time, of which the last may just be late, are slower (results/tuning/wide-bands.txt). Otherwise one at a time,
    /// and chunk by chunk those that will not have come by the wave that begins them: at TP 8, where the own shard is less than a wave.
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
        let shares = self.shared_first(problem);
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
        if grid.row_blocks() < ROW_GROUP && peers > 1 && come(2).as_nanos() <= begun(1) + tile_ns / 16 {
            return Self { alone: 1, band: 2, ..self };
        }
        let late = (1..=peers).take_while(|&shard| chunks > 1 && come(shard).as_nanos() > begun(shard)).count();
        Self { by_chunk: late as u32, ..self }
    }

    /// In the widest bands in which as many partial tiles are early.
    fn as_many_at_a_time_as_may_be_early(self, problem: &Problem) -> Self {
        if self.early == 0 {
            return self;
        }
        let in_bands_of = |band| Self { early: Self { band, ..self }.sent_a_wave_before(problem), band, ..self };
        let most = (WIDE_ROWS / problem.m_shard()).min(problem.world().peers());
        (self.band..=most).rev().map(in_bands_of).find(|wide| wide.early >= self.early).unwrap_or(self)
    }

    /// Of the partial tiles that a GEMM-ReduceScatter adds to an own one, how many were multiplied in an earlier wave, counted from the first to be sent: they are there
    /// when the own tile is half done at the latest. An own tile whose worker has nothing to do in the last wave may wait.
    pub(super) fn sent_a_wave_before(&self, problem: &Problem) -> u32 {
        let (world, tiles) = (u64::from(problem.world().get()), TileGrid::of_shard(problem, self.tile).tiles());
        if problem.op() == OpKind::AllGatherGemm || tiles < OWN_TILES {
            return 0;
        }
        let (workers, shares) = (u64::from(MULTIPROCESSORS), self.shared_first(problem));
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
        assert_eq!(early(4, rs, 2048, 12288, 49152), 3, "192 tiles of a shard are one and a half");
        assert_eq!(early(4, rs, 1024, 12288, 49152), 2, "the last shard is in the own one's wave");
        assert_eq!(early(4, rs, 1024, 8192, 28672), 2, "two shards fill the first of two waves");
        assert_eq!(early(4, rs, 512, 8192, 28672), 0, "one wave");
        assert_eq!(early(8, rs, 2048, 12288, 49152), 6);
        assert_eq!(early(8, rs, 1024, 12288, 49152), 0, "48 own tiles");
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
            ((0, 1), (0, 1)),
            "of 8 ranks the own shard is less than a wave"
        );
        assert_eq!((bands(2, ag, 1024, 49152, 12288), bands(4, rs, 2048, 8192, 28672)), ((0, 1), (0, 3)), "one peer, and all three");
        assert_eq!(
            (bands(4, rs, 1024, 12288, 49152), bands(8, rs, 2048, 12288, 49152)),
            ((0, 2), (0, 6)),
            "the last would share a wave with the own shard"
        );
        assert_eq!(bands(4, rs, 8192, 12288, 49152), (0, 1), "2048 rows are enough");
        assert_eq!(bands(4, ag, 256, 49152, 12288), (0, 1), "tiles span shards");
        let by_chunk = |world, m, n, k| own(world, ag, m, n, k).by_chunk;
        assert_eq!([by_chunk(8, 4096, 49152, 12288), by_chunk(8, 8192, 28672, 8192)], [2, 4], "what comes after these has come by then");
        assert_eq!([by_chunk(4, 8192, 49152, 12288), by_chunk(2, 1024, 28672, 8192)], [0, 0], "the own shard is a wave and more");
        assert_eq!((bands(8, ag, 1024, 28672, 8192), bands(8, ag, 1024, 49152, 12288)), ((0, 8), (0, 4)), "shards of 16 tiles, and of 32");
    }
}
