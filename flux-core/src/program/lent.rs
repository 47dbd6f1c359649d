//! What the multiprocessors do that messages need for a part of the call alone.
//!
//! A kernel beside messages leaves them the multiprocessors that the largest group of them takes,
//! for as long as it runs. Messages are done before it is: the rows of an AllGather-GEMM have all
//! come while most of its tiles are still to be multiplied, and a GEMM-ReduceScatter has nothing to
//! send before its first chunk is finished, and its own shard to add up when all has been sent. So
//! the first tiles, and the last ones, are launches of their own, on the stream of the messages:
//! one ahead of the first and one behind the last.
//!
//! Invariant: what is lent before the first message awaits nothing of a peer. What is lent after
//! the last is awaited by nobody, neither by a message nor by a worker. So no message waits for
//! what comes behind it. And whatever it awaits of a peer a worker awaits as well: a peer that is
//! missing, or messages that are ended, are found on the device by the deadline, while what is lent
//! is still queued behind the messages, and a call of which a worker has given up is not closed.

use super::TileProgram;
use super::record::{WorkItem, sink};
use crate::OpKind;

/// Items of a program that are launched beside those of the workers, on the multiprocessors that
/// messages have meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lent {
    /// Of the first ones, before the first message (GEMM-ReduceScatter).
    pub first: u32,
    /// Of the last ones, after the last message has come.
    pub last: u32,
}

impl Lent {
    /// None.
    pub const NONE: Self = Self { first: 0, last: 0 };

    /// This, but no more than a program can lend: of the first items those of a GEMM-ReduceScatter
    /// that await no peer, of the last those that no message awaits, behind the first that awaits
    /// the signal that is awaited last; one is left to the workers.
    ///
    /// ```
    /// use flux_core::program::{Lent, Schedule, TileProgram};
    /// use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
    /// let p = Problem::new(OpKind::GemmReduceScatter, 4 * 256, 1024, 4096, DType::Bf16, WorldSize::new(4).unwrap())?;
    /// let program = TileProgram::build(&p, Rank::new(0), &Schedule::of(TileShape::new(128, 128, 64)))?;
    /// // The tiles of three peers, which are sent, and the own ones.
    /// assert_eq!(Lent { first: u32::MAX, last: u32::MAX }.within(&program), Lent { first: 48, last: 15 });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn within(self, program: &TileProgram) -> Self {
        let items = &program.items;
        let count = |items: usize| u32::try_from(items).unwrap_or(u32::MAX);
        let awaits = |item: &WorkItem| matches!(item.sink, sink::REDUCE | sink::REDUCE_ROWS) || item.partials > 0;
        let first = match program.problem.op() {
            OpKind::AllGatherGemm => 0,
            OpKind::GemmReduceScatter => count(items.iter().take_while(|item| !awaits(item)).count()),
        };
        let is_sent = |item: &WorkItem| matches!(item.sink, sink::SEND | sink::SCATTER);
        let last = count(items.iter().rev().take_while(|item| !is_sent(item)).count());
        let all = items.len().saturating_sub(1);
        let first = self.first.min(first).min(count(all));
        let behind = count(all.saturating_sub(awaited_last(program)));
        Self { first, last: self.last.min(last).min(behind).min(count(all) - first) }
    }
}

/// The number of the first item that awaits the signal of a peer which is the last to be awaited; 0
/// where none is.
fn awaited_last(program: &TileProgram) -> usize {
    let mut seen = vec![false; program.signals as usize];
    let mut last = 0;
    for (number, item) in program.items.iter().enumerate() {
        for entry in program.awaits_of(item).iter().chain(program.late_awaits_of(item)).filter(|entry| entry.peer != program.rank.get()) {
            if let Some(seen) = seen.get_mut(entry.signal as usize).filter(|seen| !**seen) {
                (*seen, last) = (true, number);
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Chunk, Schedule, source};
    use crate::{DType, Problem, Rank, TileShape, WorldSize};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const ALL: Lent = Lent { first: u32::MAX, last: u32::MAX };

    proptest! {
        /// So neither a launch ahead of messages nor a message ahead of a launch waits for what is
        /// behind it.
        #[test]
        fn the_first_await_nobody_and_no_message_awaits_the_last(
            op in prop_oneof![Just(OpKind::AllGatherGemm), Just(OpKind::GemmReduceScatter)], world in 2..=5_u32, rows in 1..=40_usize, (first, last) in (any::<u32>(), any::<u32>()),
            stack: bool, (splits, shares) in prop_oneof![Just((1, 1)), Just((2, 1)), (Just(1), 2..=9_u32)], chunk in 1..=4_u32,
        ) {
            let world = WorldSize::new(world).unwrap();
            let of_each = |extent: usize| extent * world.index();
            let problem = Problem::new(op, of_each(rows), of_each(40), of_each(64), DType::Bf16, world).unwrap();
            let chunk = if stack { Chunk::Shard } else { Chunk::Tiles(chunk) };
            let schedule = Schedule { chunk, splits, shares, stack, ..Schedule::of(TileShape::new(8, 16, 16)) };
            let program = TileProgram::build(&problem, Rank::new(world.peers()), &schedule).unwrap();
            let count = program.items.len();
            for asked in [ALL, Lent { first, last }, Lent { first: first % 16, last: last % 16 }] {
                let lent = asked.within(&program);
                let (first, last) = (lent.first as usize, lent.last as usize);
                prop_assert!(first + last < count && lent.first <= asked.first && lent.last <= asked.last);
                prop_assert!(program.items[..first].iter().all(|item| item.partials == 0 && item.sink != sink::REDUCE && item.sink != sink::REDUCE_ROWS && item.a_source == source::CALLER));
                prop_assert!(op == OpKind::GemmReduceScatter || first == 0);
                // A lender comes before its lead, so of a tile that is sent none is among the last
                // either.
                prop_assert!(program.items[count - last..].iter().all(|item| item.sink != sink::SEND && item.sink != sink::SCATTER));
                let of_peers = |item: &WorkItem| {
                    let all = program.awaits_of(item).iter().chain(program.late_awaits_of(item));
                    all.filter(|entry| entry.peer != program.rank.get()).map(|entry| entry.signal).collect::<BTreeSet<_>>()
                };
                let by_workers: BTreeSet<_> = program.items[first..count - last].iter().flat_map(of_peers).collect();
                prop_assert!(program.items[count - last..].iter().all(|item| of_peers(item).is_subset(&by_workers)), "a missing peer is found by a worker");
            }
            prop_assert!(op == OpKind::AllGatherGemm || ALL.within(&program).first > 0);
        }
    }
}
