//! Stream-K: which workers multiply which steps of the tiles of a partial last wave.
//!
//! The shared tiles are the first of the program, so that full waves follow. They are the last
//! where first tiles would await late rows: with slices of `k`, or several shards side by side.
//!
//! Each group of `b` workers shares `a` tiles: their steps, laid end to end, are cut into `b` equal
//! ranges (stream-K, Osama et al., arXiv 2301.03598, within each group). Members with the same
//! number run through the same steps of neighbouring tiles at the same time, and share operands in
//! L2.
//!
//! Invariant: all partial items of a program precede all its fix-up items. With `stream_k_workers`
//! workers, none has a whole tile more than the full waves give it.

use super::k_extent::KExtent;
use crate::program::Schedule;
use crate::tile::TileGrid;
use crate::{Problem, Rank, SumsTo};
use std::ops::Range;

/// Most workers of a group.
const MOST_WORKERS: u64 = 8;
/// Cost of a part in steps: its store, its load and the addition.
const PART_STEPS: u64 = 4;

/// The shared tiles of a program, in groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamK {
    /// The first shared tile.
    first: u64,
    /// Number of shared tiles.
    shared: u64,
    groups: u64,
    /// Tiles of a group; the last groups may have one less.
    tiles: u64,
    /// Workers of a group.
    workers: u64,
    /// Steps of a tile.
    steps: u64,
}

/// Sort key of a shared tile's items.
///
/// `member` is the worker's number in its group, `steps` the length of the range's partial item.
/// With fewer ranges than workers, a worker's second item belongs to another range than its first.
/// From member to member partial items get longer and fix-up items shorter, so the sum stays below
/// one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Position {
    /// The partial item of a range over two tiles.
    PartialBeforeFixUp { steps: u64, member: u64, group: u64 },
    /// A partial item that is the whole range.
    Partial { member: u64, group: u64 },
    /// A fix-up item that is the whole range.
    FixUp { member: u64, group: u64 },
    /// The fix-up item of a range over two tiles.
    FixUpAfterPartial { steps: u64, member: u64, group: u64 },
}

impl Schedule {
    /// Tiles of `rank`.
    pub(super) fn tiles(&self, problem: &Problem, rank: Rank) -> u64 {
        let peers = problem.world().peers();
        match (self.rows.is_flattened() && peers > 0, problem.op().sums_to()) {
            (true, _) => TileGrid::of_all_rows(problem, rank, self.tile).tiles(),
            (false, SumsTo::Nothing) => TileGrid::gathered_tiles(problem, rank, self.tile),
            (false, _) => u64::from(peers + 1) * TileGrid::of_shard(problem, self.tile).tiles(),
        }
    }

    /// The tiles of `rank` that stream-K shares, where all ranks reach each other alike.
    ///
    /// None of an op that sums over the ranks if one rank has fewer steps: all ranks send their
    /// tiles in one order.
    pub(crate) fn stream_k_tiles(&self, problem: &Problem, rank: Rank) -> Option<StreamK> {
        let (k_extent, peers) = (KExtent::least(problem, self), problem.world().peers());
        if KExtent::new(problem, Rank::new(0), self).steps() != k_extent.steps() {
            return None;
        }
        let (gathers, flattened) = (problem.op().gathers(), self.rows.is_flattened() && peers > 0);
        let of_shard = TileGrid::of_shard(problem, self.tile).tiles();
        let tiles = self.tiles(problem, rank);
        // Own tiles of a GEMM-ReduceScatter come last and stay whole, except in a world of 1.
        let whole = if gathers || flattened || peers == 0 { 0 } else { of_shard };
        let stream_k = StreamK::of(self, k_extent, tiles, whole)?;
        let side_by_side = || {
            flattened || self.groups(problem.world()).next().is_some_and(|first| first.len() > 1)
        };
        let awaits_late_rows =
            gathers && peers > 0 && (k_extent.slices(self.k_slices).len() > 1 || side_by_side());
        Some(StreamK {
            first: if awaits_late_rows { tiles - stream_k.shared } else { 0 },
            ..stream_k
        })
    }
}

impl StreamK {
    /// The fastest grouping for a program of `tiles` tiles, the last `whole` of which stay whole.
    /// `None` without a partial wave, or where sharing gains nothing.
    fn of(schedule: &Schedule, k_extent: KExtent, tiles: u64, whole: u64) -> Option<Self> {
        let (shared, steps) = (schedule.partial_wave(tiles), u64::from(k_extent.steps()));
        if shared == 0 || shared + whole > tiles {
            return None;
        }
        let sizes =
            (2..=MOST_WORKERS).flat_map(|workers| (1..workers).map(move |tiles| (tiles, workers)));
        let groupings = sizes.map(|(tiles, workers)| Self {
            first: 0,
            shared,
            groups: shared.div_ceil(tiles),
            tiles,
            workers,
            steps,
        });
        let possible = groupings.filter(|grouping| {
            grouping.groups * grouping.workers <= u64::from(schedule.stream_k_workers)
        });
        possible.min_by_key(Self::time).filter(|best| best.time() < steps)
    }

    /// Steps of a tile.
    pub(crate) const fn steps(&self) -> u64 {
        self.steps
    }

    /// The wave of a tile of the program; the shared tiles are a wave of their own.
    pub(crate) const fn wave(&self, tile: u64, workers: u64) -> u64 {
        if self.contains(tile) {
            self.first / workers
        } else if tile < self.first {
            tile / workers
        } else {
            1 + (tile - self.shared) / workers
        }
    }

    /// Partial items of all shared tiles.
    pub(super) fn partial_items(&self) -> u64 {
        (self.first..self.first + self.shared).map(|tile| self.parts(tile).count() as u64 - 1).sum()
    }

    /// The first shared tile.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }

    /// Steps until all shared tiles are done.
    pub(crate) const fn time(&self) -> u64 {
        (self.tiles * self.steps).div_ceil(self.workers)
            + self.workers.div_ceil(self.tiles) * PART_STEPS
    }

    /// Whether this tile of the program, counted from 0, is shared.
    pub(super) const fn contains(&self, tile: u64) -> bool {
        self.first <= tile && tile < self.first + self.shared
    }

    /// The first step of a member's range, counted through all tiles of the group.
    const fn start(&self, member: u64) -> u64 {
        member * self.tiles * self.steps / self.workers
    }

    /// The member whose range has this step.
    const fn member_at(&self, step: u64) -> u64 {
        ((step + 1) * self.workers).div_ceil(self.tiles * self.steps) - 1
    }

    /// The parts of a shared tile in the order of `k`, the fix-up item's first.
    pub(super) fn parts(self, tile: u64) -> impl Iterator<Item = (Position, Range<u32>)> {
        let tile = tile - self.first;
        let (group, first) = (tile % self.groups, tile / self.groups * self.steps);
        let (end, is_last) = (first + self.steps, tile + self.groups >= self.shared);
        (self.member_at(first)..=self.member_at(end - 1)).map(move |member| {
            let range = self.start(member)..self.start(member + 1);
            let steps = range.start.max(first)..range.end.min(end);
            let position = if steps.start > first {
                if range.end > end && !is_last {
                    Position::PartialBeforeFixUp { steps: end - range.start, member, group }
                } else {
                    Position::Partial { member, group }
                }
            } else if range.start < first {
                Position::FixUpAfterPartial { steps: first - range.start, member, group }
            } else {
                Position::FixUp { member, group }
            };
            (position, (steps.start - first) as u32..(steps.end - first) as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::layout::RowLayout;
    use crate::program::{Schedule, Sink, TileProgram, check};
    use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
    use proptest::prelude::*;

    const TILE: TileShape = TileShape::new(16, 16, 8);

    /// The program of rank 0 of 2, with `tiles` tiles of `steps` steps in each shard.
    fn program(op: OpKind, tiles: u32, steps: u32, workers: u32) -> TileProgram {
        let world = WorldSize::new(2).expect("a world size");
        let (tiles, steps) = (16 * tiles as usize, 8 * steps as usize);
        let (n, k) =
            if op == OpKind::AllGatherGemm { (tiles * 2, steps) } else { (tiles, steps * 2) };
        let problem = Problem::new(op, 32, n, k, DType::Bf16, world).expect("a valid problem");
        let schedule = Schedule { stream_k_workers: workers, ..Schedule::of(TILE) };
        let build = |rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
        let programs: Vec<_> = world.ranks().map(build).collect();
        check::verify(&programs).expect("programs are right");
        programs.into_iter().next().expect("one of each rank")
    }

    proptest! {
        #[test]
        fn no_worker_has_as_much_as_a_wave_more(
            gather: bool,
            tiles in 1..=20_u32,
            steps in 1..=40_u32,
            workers in 2..=24_u32,
        ) {
            let op = if gather { OpKind::AllGatherGemm } else { OpKind::GemmReduceScatter };
            let p = program(op, tiles, steps, workers);
            let (whole, rest) = (2 * tiles / workers, 2 * tiles % workers);
            if p.split_k_slots == 0 {
                prop_assert_eq!(p.items.len() as u32, 2 * tiles);
                let gains = rest > 0 && 2 * rest <= workers && steps > 18;
                prop_assert!(
                    !gains || !gather && rest > tiles,
                    "half of a wave is worth sharing, unless own tiles would be shared"
                );
                return Ok(());
            }
            let fix_ups =
                p.items.iter().position(|item| item.sink != Sink::Partial).unwrap_or(p.items.len());
            prop_assert!(
                p.items[fix_ups..].iter().all(|item| item.sink != Sink::Partial),
                "partial items come first"
            );
            let most = (0..workers as usize)
                .map(|worker| {
                    p.items
                        .iter()
                        .skip(worker)
                        .step_by(workers as usize)
                        .map(|item| item.k_steps)
                        .sum::<u32>()
                })
                .max();
            prop_assert!(most < Some((whole + 1) * steps), "{:?} steps", most);
        }
    }

    #[test]
    fn two_groups_of_three_workers_share_two_tiles_each_before_a_wave() {
        let p = program(OpKind::AllGatherGemm, 5, 30, 6);
        let items: Vec<_> = p
            .items
            .iter()
            .map(|item| {
                (
                    item.out_outer * 5 + item.col / TILE.n,
                    item.k_first,
                    item.k_steps,
                    item.sink == Sink::Partial,
                )
            })
            .collect();
        // Tiles 0 and 2 are of the first group, 1 and 3 of the second.
        let partials = [(0, 20, 10, true), (1, 20, 10, true), (2, 10, 20, true), (3, 10, 20, true)];
        let fix_ups = [(0, 0, 20, false), (1, 0, 20, false), (2, 0, 10, false), (3, 0, 10, false)];
        assert_eq!(
            (&items[..4], &items[4..8]),
            (&partials[..], &fix_ups[..]),
            "the longer ranges first"
        );
        assert_eq!(items[8..], [4, 5, 6, 7, 8, 9].map(|tile| (tile, 0, 30, false)), "a full wave");
        assert_eq!(p.split_k_slots, 4, "one for each partial item");
    }

    #[test]
    fn split_tiles_are_not_shared() {
        let problem = program(OpKind::AllGatherGemm, 4, 30, 1).problem;
        let of = |schedule| TileProgram::build(&problem, Rank::new(1), &schedule);
        let plain = Schedule { split_k: 2, ..Schedule::of(TILE) };
        assert_eq!(of(Schedule { stream_k_workers: 5, ..plain }), of(plain));
    }

    #[test]
    fn ranks_share_tiles_by_their_own_columns_but_none_with_unequal_steps() {
        let shares = |op, n, k, workers| {
            let world = WorldSize::new(3).expect("a world size");
            let problem = Problem::new(op, 27, n, k, DType::Bf16, world).expect("a valid problem");
            let schedule = Schedule { stream_k_workers: workers, ..Schedule::of(TILE) };
            [0, 1, 2].map(|rank| schedule.stream_k_tiles(&problem, Rank::new(rank)).is_some())
        };
        // Three shards of 4, 3 and 3 tiles.
        assert_eq!(shares(OpKind::AllGatherGemm, 3 * 48 + 8, 480, 12), [false, true, true]);
        assert_eq!(
            shares(OpKind::GemmReduceScatter, 32, 720, 4),
            [true; 3],
            "30 steps on every rank"
        );
        assert_eq!(
            shares(OpKind::GemmReduceScatter, 32, 720 + 8, 4),
            [false; 3],
            "31 steps on the first rank"
        );
    }

    /// The tiles of all shards together are counted; reductions come after them.
    #[test]
    fn flattened_tiles_are_shared() {
        let world = WorldSize::new(3).expect("a world size");
        for (op, n, k) in [(OpKind::AllGatherGemm, 96, 240), (OpKind::GemmReduceScatter, 32, 720)] {
            let problem = Problem::new(op, 27, n, k, DType::Bf16, world).expect("a valid problem");
            let schedule =
                Schedule { stream_k_workers: 3, rows: RowLayout::Flattened, ..Schedule::of(TILE) };
            let build =
                |rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
            let programs: Vec<_> = world.ranks().map(build).collect();
            check::verify(&programs).expect("programs are right");
            // Of four tiles three workers share one; its fix-up item adds two parts.
            let of = |sink| programs[0].items.iter().filter(move |item| item.sink == sink).count();
            let tiles = if op == OpKind::AllGatherGemm { Sink::Store } else { Sink::Scatter };
            assert_eq!(
                (of(tiles), of(Sink::Partial), programs[0].split_k_slots),
                (4, 2, 2),
                "{op}"
            );
            assert!(schedule.stream_k_tiles(&problem, Rank::new(0)).is_some(), "{op}");
        }
    }
}
