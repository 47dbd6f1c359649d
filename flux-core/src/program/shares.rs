//! Who multiplies which steps where the steps of all tiles are dealt out in equal shares (stream-K).
//!
//! Invariant: with as many workers as there are shares, which take items strided, each worker has the items of one share, in the order of its steps;
//! and whatever their number, all lenders of a program precede all its leads.

use super::Schedule;
use super::along_k::AlongK;
use crate::Problem;
use std::ops::Range;

/// The steps of all tiles, laid end to end in the order of tiles, in contiguous shares whose lengths differ by at most one.
///
/// No share is longer than a tile's `k`, so that it is of two tiles at most: the last steps of one, then the first of the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares {
    /// Steps of a tile.
    per_tile: u64,
    /// Steps of a share.
    length: u64,
    /// Shares that have one step more, which are the first.
    longer: u64,
    count: u64,
}

/// Where an item stands in the program: first what is worked on first, in the order in which later items find the workers that they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Turn {
    /// The first item, a lender, of the share of this number.
    LendsThenLeads(u64),
    /// A lender that is the whole share.
    Lends(u64),
    /// A lead that is the whole share.
    Leads(u64),
    /// The second item of a share, a lead, whose first is the lender of the same place.
    LeadsThen(u64),
}

impl Shares {
    /// Those of the `tiles` of one program, if they are shared out so: tiles of one matrix, no more than shares. There are no more shares than steps.
    pub(super) fn of(problem: &Problem, schedule: &Schedule, tiles: u64) -> Option<Self> {
        let one_matrix = schedule.stack || problem.world().peers() == 0;
        if schedule.shares <= 1 || !one_matrix || tiles > u64::from(schedule.shares) {
            return None;
        }
        let per_tile = u64::from(AlongK::new(problem, schedule).steps());
        let steps = tiles * per_tile;
        let count = u64::from(schedule.shares).min(steps);
        Some(Self { per_tile, length: steps / count, longer: steps % count, count })
    }

    /// How many there are.
    pub(super) const fn count(self) -> u64 {
        self.count
    }

    /// The first step of a share, counted through all tiles.
    fn start(self, share: u64) -> u64 {
        share * self.length + share.min(self.longer)
    }

    /// The share that this step is in.
    const fn at(self, step: u64) -> u64 {
        let in_longer = self.longer * (self.length + 1);
        if step < in_longer { step / (self.length + 1) } else { self.longer + (step - in_longer) / self.length }
    }

    /// The parts of a tile in the order of `k`, the lead's first.
    pub(super) fn parts(self, tile: u32) -> impl Iterator<Item = (Turn, Range<u32>)> {
        let first = u64::from(tile) * self.per_tile;
        let end = first + self.per_tile;
        (self.at(first)..=self.at(end - 1)).map(move |share| {
            let steps = self.start(share).max(first)..self.start(share + 1).min(end);
            let several = steps.end - steps.start < self.start(share + 1) - self.start(share);
            let turn = match (steps.start > first, several) {
                (true, true) => Turn::LendsThenLeads(share),
                (true, false) => Turn::Lends(share),
                (false, false) => Turn::Leads(share),
                (false, true) => Turn::LeadsThen(share),
            };
            (turn, (steps.start - first) as u32..(steps.end - first) as u32)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{TileProgram, check, sink};
    use crate::{DType, OpKind, Rank, TileShape, WorldSize};
    use proptest::prelude::*;

    const TILE: TileShape = TileShape::new(16, 16, 8);

    /// A program of so many tiles of so many steps each, of the first of two ranks or of the only one.
    fn program(op: OpKind, ranks: u32, tiles: u32, steps: u32, shares: u32) -> TileProgram {
        let world = WorldSize::new(ranks).expect("a world size");
        let (tiles, steps) = (16 * tiles as usize, 8 * steps as usize);
        let (n, k) = if op == OpKind::AllGatherGemm { (tiles * world.index(), steps) } else { (tiles, steps * world.index()) };
        let problem = Problem::new(op, 16, n, k, DType::Bf16, world).expect("a valid problem");
        let schedule = Schedule { stack: ranks > 1, shares, ..Schedule::of(TILE) };
        let build = |rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
        let programs: Vec<_> = world.ranks().map(build).collect();
        check::verify(&programs).expect("programs are right");
        programs.into_iter().next().expect("one of each rank")
    }

    proptest! {
        #[test]
        fn every_worker_has_one_range_of_steps_and_none_has_two_more_than_another(
            gather: bool, ranks in 1..=2_u32, tiles in 1..=12_u32, steps in 1..=24_u32, more in 0..=30_u32,
        ) {
            let op = if gather { OpKind::AllGatherGemm } else { OpKind::GemmReduceScatter };
            let shares = (tiles + more).max(2);
            let p = program(op, ranks, tiles, steps, shares);
            let workers = shares.min(tiles * steps) as usize;
            let items: Vec<_> = p.items.iter().filter(|item| item.sink != sink::FOLD).collect();
            let leads = items.iter().position(|item| item.sink != sink::LEND).unwrap_or(items.len());
            prop_assert!(items[leads..].iter().all(|item| item.sink != sink::LEND), "lenders come first");

            // by worker: its steps, counted through all tiles
            let range = |item: &&crate::program::WorkItem| {
                let first = item.col / TILE.n * steps + item.k_first;
                first..first + item.k_steps
            };
            let mut ranges = Vec::new();
            for worker in 0..workers {
                let own: Vec<_> = items.iter().skip(worker).step_by(workers).map(range).collect();
                match &own[..] {
                    [one] => ranges.push(one.clone()),
                    [one, next] if one.end == next.start && one.end % steps == 0 => ranges.push(one.start..next.end),
                    _ => prop_assert!(false, "worker {} has {:?}", worker, own),
                }
            }
            ranges.sort_by_key(|range| range.start);
            let covered = ranges.iter().try_fold(0, |at, range| (range.start == at).then_some(range.end));
            prop_assert_eq!(covered, Some(tiles * steps), "{:?}", ranges);
            let lengths = || ranges.iter().map(|range| range.end - range.start);
            prop_assert!(lengths().max() <= lengths().min().map(|least| least + 1), "{:?}", ranges);
        }
    }

    #[test]
    fn three_tiles_of_four_steps_in_five_shares() {
        let p = program(OpKind::AllGatherGemm, 2, 3, 4, 5);
        let items: Vec<_> = p.items.iter().map(|item| (item.col / TILE.n, item.k_first, item.k_steps, item.sink == sink::LEND)).collect();
        // shares of 3, 3, 2, 2 and 2 steps: the second is of two tiles
        let lenders = [(0, 3, 1, true), (1, 2, 2, true), (2, 2, 2, true)];
        assert_eq!((&items[..3], &items[3..]), (&lenders[..], &[(0, 0, 3, false), (2, 0, 2, false), (1, 0, 2, false)][..]));
        assert_eq!((p.part_slots, p.awaits_of(&p.items[0]).len()), (3, 2), "part slots are those of lenders");
    }

    #[test]
    fn more_tiles_than_shares_and_tiles_of_single_shards_are_not_shared() {
        let plain = |ranks| program(OpKind::GemmReduceScatter, ranks, 6, 4, 1);
        assert_eq!(program(OpKind::GemmReduceScatter, 2, 6, 4, 5), plain(2));
        assert_ne!(program(OpKind::GemmReduceScatter, 2, 6, 4, 7), plain(2));
        let problem = plain(2).problem;
        let of = |shares| TileProgram::build(&problem, Rank::new(1), &Schedule { shares, ..Schedule::of(TILE) });
        assert_eq!(of(32), of(1));
    }
}
