//! Which shards are worked on side by side, and which partial tiles are then early.
//!
//! Invariant: what a band waits for has come, by estimate, when it is begun, and what is early was sent a wave before.

use super::{MULTIPROCESSORS, OPERATIONS, ROW_GROUP, Schedule, most_early};
use crate::tile::TileGrid;
use crate::{OpKind, Problem};

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
            OpKind::AllGatherGemm => self.two_at_a_time(problem),
            OpKind::GemmReduceScatter => self.as_many_at_a_time_as_may_be_early(problem),
        }
    }

    /// Shards of few row blocks, each of which would read `w` once more, two at a time from when they will have come: what is to be done until then takes 8/5 of the time that
    /// their rows take on the link. At TP 4 and m = 2048 that is after the own one; three at a time, of which the last may just be late, are slower
    /// (results/tuning/wide-bands.txt).
    fn two_at_a_time(self, problem: &Problem) -> Self {
        let (world, row_blocks) = (problem.world().get(), TileGrid::of_shard(problem, self.tile).row_blocks());
        if self.stack || self.band > 1 || row_blocks >= ROW_GROUP {
            return self;
        }
        // Of one shard, by its rows and k: two bytes on the link, and two operations for each column.
        let (comes, takes) = (OPERATIONS * u64::from(MULTIPROCESSORS) / LINK, u64::from(problem.n_local()));
        let have_come = |&alone: &u32| 8 * u64::from(alone + 1) * comes <= 5 * u64::from(alone) * takes;
        (1..world.saturating_sub(1)).find(have_come).map_or(self, |alone| Self { alone, band: 2, ..self })
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
        let workers = u64::from(MULTIPROCESSORS);
        let before = |step: u64| {
            // Of the band that the step is in: its first step, and how many there are.
            let first = step - (step - 1) % u64::from(self.band);
            let steps = u64::from(self.band).min(world - first);
            let in_time = |tile: u64| {
                let (sent, own) = ((first - 1) * tiles + tile * steps + step - first, (world - 1) * tiles + tile);
                let last = own + workers >= world * tiles;
                sent / workers < own / workers || last && own / workers < (world * tiles - 1) / workers
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
            ((2, 2), (0, 1)),
            "of 8 ranks each has less to do meanwhile"
        );
        assert_eq!((bands(2, ag, 1024, 49152, 12288), bands(4, rs, 2048, 8192, 28672)), ((0, 1), (0, 3)), "one peer, and all three");
        assert_eq!(
            (bands(4, rs, 1024, 12288, 49152), bands(8, rs, 2048, 12288, 49152)),
            ((0, 2), (0, 6)),
            "the last would share a wave with the own shard"
        );
        assert_eq!(bands(4, rs, 8192, 12288, 49152), (0, 1), "2048 rows are enough");
        assert_eq!(bands(4, ag, 256, 49152, 12288), (0, 1), "tiles span shards");
    }
}
