//! Who multiplies which steps of the tiles that would leave a wave unfinished: the first tiles are
//! shared, so that those behind them are whole waves. Where rows come in slices of `k`, or are of
//! several shards side by side, the last tiles are: whoever has the last steps of a tile, or those
//! of another shard, would await what comes last first.
//!
//! Groups of `b` workers have `a` tiles each, whose steps, laid end to end, they take in equal
//! ranges (stream-K, Osama et al., arXiv 2301.03598, in each group): so all are done after `a / b`
//! of a tile. Workers with the same place in their groups are at the same step along `k` at the
//! same time, of neighbouring tiles, and find in L2 what another has read; were the steps of all
//! tiles laid end to end, each worker would be at another step, and read all of its operands from
//! memory.
//!
//! Invariant: all partial items of a program precede all its fix-up items. With as many workers as the schedule
//! says, which take items strided, none has as much as a tile more than whole waves give it.

use super::Schedule;
use super::along_k::AlongK;
use crate::tile::TileGrid;
use crate::{OpKind, Problem};
use std::ops::Range;

/// Most workers of a group.
const MOST: u64 = 8;
/// What a part costs its tile, in steps: its way through memory, and the addition.
const PART: u64 = 4;

/// The first or the last tiles of a program, in groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamK {
    /// The first of them.
    first: u64,
    /// Tiles that are shared.
    shared: u64,
    groups: u64,
    /// Tiles of a group, of which some have one less.
    tiles: u64,
    /// Workers of a group.
    workers: u64,
    /// Steps of a tile.
    steps: u64,
}

/// Where an item stands in the program: first what is worked on first, in the order in which later
/// items find the workers that they belong to.
///
/// Of a range of two tiles it is the length of the partial item, the place in the group, and the group.
/// Where there are fewer ranges than workers, the second items come to workers some places before
/// those of the first: as partial items get longer and fix-up items shorter from place to place, none has more
/// than its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// The first item, a partial item, of a range that is of two tiles.
    PartialThenFixUp(u64, u64, u64),
    /// A partial item that is the whole range, of this place and group.
    Partial(u64, u64),
    /// A fix-up item that is the whole range.
    FixUp(u64, u64),
    /// The second item of a range, a fix-up item, whose first is the partial item of the same numbers.
    FixUpThen(u64, u64, u64),
}

impl Schedule {
    /// How a rank shares the tiles of a partial last wave of its tiles, where all ranks reach each other
    /// alike.
    pub(crate) fn stream_k_tiles(&self, problem: &Problem) -> Option<StreamK> {
        let (along_k, peers) = (AlongK::new(problem, self), problem.world().peers());
        let (gathers, spans) = (problem.op() == OpKind::AllGatherGemm, self.flattened && peers > 0);
        let of_shard = TileGrid::of_shard(problem, self.tile).tiles();
        let tiles = if spans { TileGrid::new(problem.m(), problem.n_local(), self.tile).tiles() } else { u64::from(peers + 1) * of_shard };
        // Own tiles of a GEMM-ReduceScatter come last, and in a world of 1 there are no others.
        let whole = if gathers || spans || peers == 0 { 0 } else { of_shard };
        let stream_k = StreamK::of(self, along_k, tiles, whole)?;
        // The first tiles of several shards side by side, and the first slices of others, await
        // what comes last.
        let side_by_side = || spans || self.groups(problem.world()).next().is_some_and(|first| first.len() > 1);
        let come_late = gathers && peers > 0 && (along_k.slices(self.k_slices).len() > 1 || side_by_side());
        Some(StreamK { first: if come_late { tiles - stream_k.shared } else { 0 }, ..stream_k })
    }
}

impl StreamK {
    /// Those of a program of so many tiles, the last `whole` of which stay whole; `None` where the
    /// schedule has none, where nothing is left of whole waves, and where it is so much of a wave
    /// that sharing would gain nothing.
    fn of(schedule: &Schedule, along_k: AlongK, tiles: u64, whole: u64) -> Option<Self> {
        let (shared, steps) = (schedule.partial_wave(tiles), u64::from(along_k.steps()));
        if shared == 0 || shared + whole > tiles {
            return None;
        }
        let ways = (2..=MOST).flat_map(|workers| (1..workers).map(move |tiles| (tiles, workers)));
        let ways = ways.map(|(tiles, workers)| Self { first: 0, shared, groups: shared.div_ceil(tiles), tiles, workers, steps });
        let possible = ways.filter(|way| way.groups * way.workers <= u64::from(schedule.stream_k));
        possible.min_by_key(Self::time).filter(|best| best.time() < steps)
    }

    /// Steps of a tile.
    pub(crate) const fn steps(&self) -> u64 {
        self.steps
    }

    /// The wave that a tile of the program is in: what is shared is one by itself.
    pub(crate) const fn wave(&self, tile: u64, workers: u64) -> u64 {
        if self.has(tile) {
            self.first / workers
        } else if tile < self.first {
            tile / workers
        } else {
            1 + (tile - self.shared) / workers
        }
    }

    /// Tiles of the program before those that are shared.
    pub(super) const fn before(&self) -> u64 {
        self.first
    }

    /// Steps until all are done.
    pub(crate) const fn time(&self) -> u64 {
        (self.tiles * self.steps).div_ceil(self.workers) + self.workers.div_ceil(self.tiles) * PART
    }

    /// Whether this tile of the program, counted from 0, is shared.
    pub(super) const fn has(&self, tile: u64) -> bool {
        self.first <= tile && tile < self.first + self.shared
    }

    /// The first step of a range, counted through all tiles of the group.
    const fn start(&self, place: u64) -> u64 {
        place * self.tiles * self.steps / self.workers
    }

    /// The range that this step is in.
    const fn at(&self, step: u64) -> u64 {
        ((step + 1) * self.workers).div_ceil(self.tiles * self.steps) - 1
    }

    /// The parts of one of these tiles in the order of `k`, the fix-up item's first.
    pub(super) fn parts(self, tile: u64) -> impl Iterator<Item = (Turn, Range<u32>)> {
        let tile = tile - self.first;
        let (group, first) = (tile % self.groups, tile / self.groups * self.steps);
        let (end, is_last) = (first + self.steps, tile + self.groups >= self.shared);
        (self.at(first)..=self.at(end - 1)).map(move |place| {
            let range = self.start(place)..self.start(place + 1);
            let steps = range.start.max(first)..range.end.min(end);
            let turn = if steps.start > first {
                let two = range.end > end && !is_last;
                if two { Turn::PartialThenFixUp(end - range.start, place, group) } else { Turn::Partial(place, group) }
            } else if range.start < first {
                Turn::FixUpThen(first - range.start, place, group)
            } else {
                Turn::FixUp(place, group)
            };
            (turn, (steps.start - first) as u32..(steps.end - first) as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::program::{Schedule, TileProgram, check, sink};
    use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
    use proptest::prelude::*;

    const TILE: TileShape = TileShape::new(16, 16, 8);

    /// A program of so many tiles in each of two shards, of so many steps each, of the first of two
    /// ranks.
    fn program(op: OpKind, tiles: u32, steps: u32, stream_k: u32) -> TileProgram {
        let world = WorldSize::new(2).expect("a world size");
        let (tiles, steps) = (16 * tiles as usize, 8 * steps as usize);
        let (n, k) = if op == OpKind::AllGatherGemm { (tiles * 2, steps) } else { (tiles, steps * 2) };
        let problem = Problem::new(op, 32, n, k, DType::Bf16, world).expect("a valid problem");
        let schedule = Schedule { stream_k, ..Schedule::of(TILE) };
        let build = |rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
        let programs: Vec<_> = world.ranks().map(build).collect();
        check::verify(&programs).expect("programs are right");
        programs.into_iter().next().expect("one of each rank")
    }

    proptest! {
        #[test]
        fn no_worker_has_as_much_as_a_wave_more(gather: bool, tiles in 1..=20_u32, steps in 1..=40_u32, stream_k in 2..=24_u32) {
            let op = if gather { OpKind::AllGatherGemm } else { OpKind::GemmReduceScatter };
            let p = program(op, tiles, steps, stream_k);
            let (whole, rest) = (2 * tiles / stream_k, 2 * tiles % stream_k);
            if p.split_k_slots == 0 {
                prop_assert_eq!(p.items.len() as u32, 2 * tiles);
                let gains = rest > 0 && 2 * rest <= stream_k && steps > 18;
                prop_assert!(!gains || !gather && rest > tiles, "half of a wave, and own tiles would not be shared");
                return Ok(());
            }
            let fix_ups = p.items.iter().position(|item| item.sink != sink::PARTIAL).unwrap_or(p.items.len());
            prop_assert!(p.items[fix_ups..].iter().all(|item| item.sink != sink::PARTIAL), "lenders come first");
            let most = (0..stream_k as usize).map(|worker| p.items.iter().skip(worker).step_by(stream_k as usize).map(|item| item.k_steps).sum::<u32>()).max();
            prop_assert!(most < Some((whole + 1) * steps), "{:?} steps", most);
        }
    }

    #[test]
    fn two_groups_of_three_workers_share_two_tiles_each_before_a_wave() {
        let p = program(OpKind::AllGatherGemm, 5, 30, 6);
        let items: Vec<_> = p
            .items
            .iter()
            .map(|item| (item.out_outer * 5 + item.col / TILE.n, item.k_first, item.k_steps, item.sink == sink::PARTIAL))
            .collect();
        // Tiles 0 and 2 are of the first group, 1 and 3 of the second.
        let partials_of = [(0, 20, 10, true), (1, 20, 10, true), (2, 10, 20, true), (3, 10, 20, true)];
        let fix_ups = [(0, 0, 20, false), (1, 0, 20, false), (2, 0, 10, false), (3, 0, 10, false)];
        assert_eq!((&items[..4], &items[4..8]), (&partials_of[..], &fix_ups[..]), "the longer ranges first");
        assert_eq!(items[8..], [4, 5, 6, 7, 8, 9].map(|tile| (tile, 0, 30, false)), "a whole wave");
        assert_eq!(p.split_k_slots, 4, "one for each partial item");
    }

    #[test]
    fn tiles_that_are_split_are_not_shared() {
        let problem = program(OpKind::AllGatherGemm, 4, 30, 1).problem;
        let of = |schedule| TileProgram::build(&problem, Rank::new(1), &schedule);
        let plain = Schedule { split_k: 2, ..Schedule::of(TILE) };
        assert_eq!(of(Schedule { stream_k: 5, ..plain }), of(plain));
    }

    /// Those of all shards together are counted, and their reductions come after them.
    #[test]
    fn tiles_that_span_shards_are_shared() {
        let world = WorldSize::new(3).expect("a world size");
        for (op, n, k) in [(OpKind::AllGatherGemm, 96, 240), (OpKind::GemmReduceScatter, 32, 720)] {
            let problem = Problem::new(op, 27, n, k, DType::Bf16, world).expect("a valid problem");
            let schedule = Schedule { stream_k: 3, flattened: true, ..Schedule::of(TILE) };
            let build = |rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
            let programs: Vec<_> = world.ranks().map(build).collect();
            check::verify(&programs).expect("programs are right");
            // Four tiles, of which three workers share one: its fix-up item adds two partials, or
            // three workers have a third of it each.
            let of = |sink| programs[0].items.iter().filter(move |item| item.sink == sink).count();
            let tiles = if op == OpKind::AllGatherGemm { sink::STORE } else { sink::SCATTER };
            assert_eq!((of(tiles), of(sink::PARTIAL), programs[0].split_k_slots), (4, 2, 2), "{op}");
            assert!(schedule.stream_k_tiles(&problem).is_some(), "{op}");
        }
    }
}
