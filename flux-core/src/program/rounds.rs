//! The order in which messages carry what a program's ranks give each other, where no rank can store into another's memory.
//!
//! Invariant: at round `i` of a program every rank sends to one rank and receives from one, what a rank sends at round `i` is what its reader receives
//! at round `i`, and the rounds are those that the program's kernel finishes its chunks in. So ranks that take the rounds in order, each when its own
//! chunk is finished, wait for nobody who waits for them.

use super::{TileProgram, sink};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::{OpKind, Rank};
use std::collections::BTreeMap;

/// One exchange of a rank: a chunk to one peer, and the same chunk of another's from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Step of the schedule: the peers' distance from this rank.
    pub step: u32,
    /// Where the bytes lie in the place of their source, and in the source.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// What this rank sends, as its reader knows it.
    pub sent: End,
    /// What this rank receives.
    pub received: End,
}

/// One message's ends beside this rank: who, and which place and signal of the reader's it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The other rank.
    pub peer: Rank,
    /// The source's place at the reader.
    pub place: u32,
    /// The signal of the reader's pad that announces the chunk.
    pub signal: u32,
}

impl TileProgram {
    /// Bytes of a place: what one rank gives to another in a call.
    pub const fn place_bytes(&self) -> u64 {
        match self.problem.op() {
            OpKind::AllGatherGemm => gather_place_bytes(&self.problem),
            OpKind::GemmReduceScatter => self.slots_per_source as u64 * slot_bytes(&self.problem, self.tile),
        }
    }

    /// The rounds of this rank; none in a world of one rank. `None` where chunks are no whole ranges of a place: rows that are announced in slices, or go
    /// to several owners.
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram};
    /// use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 1024, 1024, DType::Bf16, WorldSize::new(4).unwrap())?;
    /// let program = TileProgram::build(&p, Rank::new(0), &Schedule::of(TileShape::new(128, 128, 64)))?;
    /// let rounds = program.rounds().unwrap();
    /// assert_eq!(rounds.iter().map(|round| round.sent.peer.get()).collect::<Vec<_>>(), [3, 2, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rounds(&self) -> Option<Vec<Round>> {
        if self.problem.world().peers() == 0 {
            return Some(Vec::new());
        }
        if self.stacked {
            return None;
        }
        match self.problem.op() {
            OpKind::AllGatherGemm => self.gathering(),
            OpKind::GemmReduceScatter => self.scattering(),
        }
    }

    /// As the transfers are ordered.
    fn gathering(&self) -> Option<Vec<Round>> {
        let row_bytes = u64::from(self.problem.k_local()) * self.problem.dtype().bytes() as u64;
        let per_place = self.per_place(self.transfers.len());
        let round = |t: &super::Transfer| {
            let dest = Rank::new(t.dest);
            let source = self.rank.after(t.step, self.problem.world());
            let whole = t.col == 0 && t.cols == self.problem.k_local();
            let (offset, bytes) = (u64::from(t.row) * row_bytes, u64::from(t.rows) * row_bytes);
            let chunk = t.raise.checked_sub(t.place * per_place)?;
            whole.then_some(())?;
            self.round(t.step, (offset, bytes), (dest, source), (chunk, per_place))
        };
        self.transfers.iter().map(round).collect()
    }

    /// As the chunks' last tiles are ordered.
    fn scattering(&self) -> Option<Vec<Round>> {
        let world = self.problem.world();
        let slot = slot_bytes(&self.problem, self.tile);
        let sends = || self.items.iter().filter(|item| item.sink == sink::SEND);
        // By owner and signal: the first slot, and the tiles so far.
        let mut chunks = BTreeMap::<(u32, u32), (u32, u32)>::new();
        for item in sends() {
            chunks.entry((item.dest, item.raise)).or_insert((item.slot, 0));
        }
        let per_place = self.per_place(chunks.len());
        let mut rounds = Vec::with_capacity(chunks.len());
        for item in sends() {
            let (first, tiles) = chunks.get_mut(&(item.dest, item.raise))?;
            *tiles += 1;
            if *tiles < item.raise_after {
                continue;
            }
            let dest = Rank::new(item.dest);
            let step = (item.dest + world.get() - self.rank.get()) % world.get();
            let place = self.rank.place_at(dest)?;
            let offset = u64::from(first.checked_sub(place * self.slots_per_source)?) * slot;
            let chunk = item.raise.checked_sub(place * per_place)?;
            let source = self.rank.before(step, world);
            rounds.push(self.round(step, (offset, u64::from(*tiles) * slot), (dest, source), (chunk, per_place))?);
        }
        Some(rounds)
    }

    /// Signals of one place, of `all` that this rank raises at its peers.
    fn per_place(&self, all: usize) -> u32 {
        all as u32 / self.problem.world().peers()
    }

    fn round(&self, step: u32, (offset, bytes): (u64, u64), (dest, source): (Rank, Rank), (chunk, per_place): (u32, u32)) -> Option<Round> {
        let end = |peer, place| End { peer, place, signal: place * per_place + chunk };
        let sent = end(dest, self.rank.place_at(dest)?);
        let received = end(source, source.place_at(self.rank)?);
        Some(Round { step, offset, bytes, sent, received })
    }
}

#[cfg(test)]
mod tests {
    use crate::program::{Chunk, Schedule, TileProgram, sink};
    use crate::tile::Raster;
    use crate::{DType, OpKind, Problem, TileShape, WorldSize};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn programs() -> impl Strategy<Value = Vec<TileProgram>> {
        let op = prop_oneof![Just(OpKind::AllGatherGemm), Just(OpKind::GemmReduceScatter)];
        let cut = (1u32..=4, 1u32..=17, 1u32..=3, prop_oneof![Just(Raster::RowsFastest), (1u32..=3).prop_map(Raster::RowGroups)]);
        (op, 2u32..=16, 1usize..=9, 1usize..=5, 1usize..=3, cut).prop_map(
            |(op, world, rows, split, whole, (chunk, band, splits, raster))| {
                let world = WorldSize::new(world).expect("a world size");
                let (split, whole) = (8 * split * world.index(), 16 * whole);
                let (n, k) = if op == OpKind::AllGatherGemm { (split, whole) } else { (whole, split) };
                let problem = Problem::new(op, rows * world.index(), n, k, DType::Bf16, world).expect("a valid problem");
                let schedule = Schedule { chunk: Chunk::Tiles(chunk), band, splits, raster, ..Schedule::of(TileShape::new(2, 16, 16)) };
                world.ranks().map(|rank| TileProgram::build(&problem, rank, &schedule).expect("a valid schedule")).collect()
            },
        )
    }

    proptest! {
        /// Ranks take their rounds in order, each as soon as both of its partners are in the same round and, for GEMM-ReduceScatter, the chunk is there,
        /// which nothing but the rank's own progress brings: so none waits for ever, whoever is slow.
        #[test]
        fn ranks_never_wait_for_each_other_in_a_circle(programs in programs(), slow in prop::collection::vec(0..16_usize, 64)) {
            let rounds: Vec<_> = programs.iter().map(|program| program.rounds().unwrap()).collect();
            let world = programs.len();
            for (rank, own) in rounds.iter().enumerate() {
                prop_assert_eq!(own.len(), rounds[0].len());
                for (i, round) in own.iter().enumerate() {
                    let reader = &rounds[round.sent.peer.index()][i];
                    prop_assert_eq!(reader.received.peer.index(), rank);
                    prop_assert_eq!((reader.received.place, reader.received.signal), (round.sent.place, round.sent.signal));
                    prop_assert_eq!((reader.step, reader.offset, reader.bytes), (round.step, round.offset, round.bytes));
                }
            }
            // Each rank has posted the round that it is at; a round ends for a rank when both partners have posted it. The slow ones go last.
            let mut posted = vec![0; world];
            let mut ended = vec![0; world];
            let total = rounds[0].len();
            for turn in 0.. {
                let first = slow[turn % slow.len()];
                let ready = |rank: usize| {
                    let round = &rounds[rank][ended[rank]];
                    posted[round.sent.peer.index()] > ended[rank] && posted[round.received.peer.index()] > ended[rank]
                };
                let post = (0..world).map(|i| (first + i) % world).find(|&rank| posted[rank] == ended[rank] && posted[rank] < total);
                let end = (0..world).map(|i| (first + i) % world).find(|&rank| posted[rank] > ended[rank] && ready(rank));
                match (end, post) {
                    (Some(rank), _) => ended[rank] += 1,
                    (None, Some(rank)) => posted[rank] += 1,
                    (None, None) => break,
                }
            }
            prop_assert!(ended.iter().all(|&ended| ended == total), "{:?} of {}", ended, total);
        }

        /// What the readers await is received, each place once and whole, and every signal by the rank that the program names.
        #[test]
        fn rounds_carry_all_that_is_awaited(programs in programs()) {
            for program in &programs {
                let rounds = program.rounds().unwrap();
                let peers = program.problem.world().peers();
                let mut covered = vec![Vec::new(); peers as usize];
                for round in &rounds {
                    covered[round.received.place as usize].push((round.offset, round.bytes));
                }
                for mut place in covered {
                    place.sort_unstable();
                    let end = place.iter().try_fold(0, |end, &(offset, bytes)| (offset == end && bytes > 0).then_some(offset + bytes));
                    prop_assert_eq!(end, Some(program.place_bytes()));
                }
                let received: BTreeSet<_> = rounds.iter().map(|round| (round.received.signal, round.received.peer.get())).collect();
                let awaited: BTreeSet<_> =
                    program.awaits.iter().filter(|a| a.peer != program.rank.get()).map(|a| (a.signal, a.peer)).collect();
                prop_assert_eq!(&received, &awaited);
                prop_assert_eq!(received.len(), rounds.len());
            }
        }

        /// What a rank sends waits for no other rank, and is finished in the order of the rounds.
        #[test]
        fn chunks_are_finished_in_the_order_of_the_rounds(programs in programs()) {
            for program in &programs {
                let sends = program.items.iter().filter(|item| item.sink == sink::SEND);
                prop_assert!(sends.clone().all(|item| program.awaits_of(item).is_empty()));
                if program.problem.op() == OpKind::GemmReduceScatter {
                    let last = |dest, signal| program.items.iter().rposition(|item| item.dest == dest && item.raise == signal && item.sink == sink::SEND);
                    let rounds = program.rounds().unwrap();
                    let ends: Vec<_> = rounds.iter().map(|round| last(round.sent.peer.get(), round.sent.signal)).collect();
                    prop_assert!(ends.iter().all(Option::is_some) && ends.is_sorted());
                }
            }
        }
    }

    #[test]
    fn what_is_no_range_of_a_place_makes_no_rounds() {
        let world = WorldSize::new(2).unwrap();
        let schedule = Schedule::of(TileShape::new(128, 128, 64));
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            let problem = Problem::new(op, 64, 512, 512, DType::Bf16, world).unwrap();
            let rounds = |schedule| TileProgram::build(&problem, crate::Rank::new(0), &schedule).unwrap().rounds();
            assert!(rounds(schedule).is_some());
            assert!(rounds(Schedule { stack: true, ..schedule }).is_none());
            assert_eq!(rounds(Schedule { k_chunks: 2, ..schedule }).is_some(), op == OpKind::GemmReduceScatter);
        }
        let alone = Problem::new(OpKind::AllGatherGemm, 64, 512, 512, DType::Bf16, WorldSize::new(1).unwrap()).unwrap();
        assert_eq!(TileProgram::build(&alone, crate::Rank::new(0), &schedule).unwrap().rounds(), Some(Vec::new()));
    }
}
