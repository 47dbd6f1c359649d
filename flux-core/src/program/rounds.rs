//! The order in which messages carry what the ranks of a rail give each other, where no rank can
//! store into memory of another node.
//!
//! Invariant: at round `i` of a program every rank sends to one rank and receives from one, what a
//! rank sends at round `i` is what its reader receives at round `i`, and the rounds are in the
//! order that the program's kernel finishes its chunks in; rows, which are all there from the
//! start, chunk by chunk, each to all readers. So ranks that take the rounds in order, each when
//! its own chunk is finished, wait for nobody who waits for them, nor do they where they take them
//! [group](super::groups) by group.

use super::{Places, TileProgram, sink};
use crate::layout::{gather_place_bytes, scatter_place_bytes, slot_bytes};
use crate::{OpKind, Rank};
use std::collections::BTreeMap;

/// One exchange of a rank: a chunk to one peer, and the same chunk of another's from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Step of the schedule: the peers' distance from this rank, in ranks.
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
            OpKind::GemmReduceScatter if self.flattened => scatter_place_bytes(&self.problem),
            OpKind::GemmReduceScatter => self.slots_per_source as u64 * slot_bytes(&self.problem, self.tile),
        }
    }

    /// The rounds of this rank, along its rail; none where all ranks are of one node. `None` where
    /// chunks are no whole ranges of a place: rows that are announced in slices, or tiles that go
    /// to several owners and have a signal each.
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
        if self.nodes.others() == 0 {
            return Some(Vec::new());
        }
        match self.problem.op() {
            OpKind::AllGatherGemm => self.gathering(),
            OpKind::GemmReduceScatter if self.flattened => self.scattering_rows(),
            OpKind::GemmReduceScatter => self.scattering(),
        }
    }

    /// Whether what goes to `dest` goes to another node.
    fn crosses(&self, dest: u32) -> bool {
        !self.nodes.together(self.rank, Rank::new(dest))
    }

    /// The first chunk to all, then the next, each as the transfers are ordered: what goes to
    /// several readers can go at once.
    fn gathering(&self) -> Option<Vec<Round>> {
        let row_bytes = u64::from(self.problem.k_local()) * self.problem.dtype().bytes() as u64;
        let sent = || self.transfers.iter().filter(|t| self.crosses(t.dest));
        let per_place = self.per_place(sent().count());
        let round = |t: &super::Transfer| {
            let whole = t.col == 0 && t.cols == self.problem.k_local();
            let chunk = t.raise.checked_sub(t.place * per_place)?;
            whole.then_some(())?;
            let end = |peer, place| End { peer, place, signal: place * per_place + chunk };
            let source = self.nodes.after(self.rank, t.step);
            let from = if self.flattened { source.get() } else { source.place_at(self.rank)? };
            let (sent, received) = (end(Rank::new(t.dest), t.place), end(source, from));
            Some(Round { step: t.step, offset: u64::from(t.row) * row_bytes, bytes: u64::from(t.rows) * row_bytes, sent, received })
        };
        let mut rounds = sent().map(round).collect::<Option<Vec<_>>>()?;
        rounds.sort_by_key(|round| round.offset);
        Some(rounds)
    }

    /// As the chunks' last tiles are ordered.
    fn scattering(&self) -> Option<Vec<Round>> {
        let (nodes, places) = (self.nodes, Places::new(self.nodes));
        let slot = slot_bytes(&self.problem, self.tile);
        let sends = || self.items.iter().filter(|item| item.sink == sink::SEND && self.crosses(item.dest));
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
            let distance = (nodes.node_of(dest) + nodes.count() - nodes.node_of(self.rank)) % nodes.count();
            let source = nodes.before(self.rank, distance * nodes.per_node());
            let (place, from) = (places.destination(self.rank, dest)?.1, places.destination(source, self.rank)?.1);
            let offset = u64::from(first.checked_sub(place * self.slots_per_source)?) * slot;
            let chunk = item.raise.checked_sub(place * per_place)?;
            let end = |peer, place| End { peer, place, signal: place * per_place + chunk };
            let step = distance * nodes.per_node();
            rounds.push(Round { step, offset, bytes: u64::from(*tiles) * slot, sent: end(dest, place), received: end(source, from) });
        }
        Some(rounds)
    }

    /// All that a rank has for an owner, which one signal announces.
    fn scattering_rows(&self) -> Option<Vec<Round>> {
        let mut tiles = self.items.iter().filter(|item| item.sink == sink::SCATTER);
        let signal = tiles.next()?.raise;
        tiles.all(|item| item.raise == signal).then(|| {
            let (nodes, bytes) = (self.nodes, self.place_bytes());
            let end = |peer: Rank, source: Rank| End { peer, place: source.get(), signal: source.get() };
            let round = |step| {
                let (dest, source) = (nodes.after(self.rank, step), nodes.before(self.rank, step));
                Round { step, offset: 0, bytes, sent: end(dest, self.rank), received: end(source, source) }
            };
            (1..self.problem.world().get()).map(round).collect()
        })
    }

    /// Signals of one place, of `all` that this rank raises along its rail.
    const fn per_place(&self, all: usize) -> u32 {
        all as u32 / self.nodes.others()
    }
}

#[cfg(test)]
mod tests {
    use crate::machine::Machine;
    use crate::plan::{CommMode, Links, Plan, Target};
    use crate::program::{Channels, Chunk, End, Round, Schedule, TileProgram, WorkItem, groups, sink};
    use crate::tile::Raster;
    use crate::{DType, Nodes, OpKind, Problem, TileShape, WorldSize};
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn programs() -> impl Strategy<Value = Vec<TileProgram>> {
        let op = prop_oneof![Just(OpKind::AllGatherGemm), Just(OpKind::GemmReduceScatter)];
        let cut = (1u32..=4, 1u32..=17, 1u32..=3, prop_oneof![Just(Raster::RowsFastest), (1u32..=3).prop_map(Raster::RowGroups)]);
        let grouped =
            prop_oneof![(2u32..=16).prop_map(|world| (world, world)), (2u32..=4, 2u32..=4).prop_map(|(count, of)| (count, count * of))];
        (op, grouped, 1usize..=9, 1usize..=5, 1usize..=3, cut, any::<bool>()).prop_map(
            |(op, (nodes, world), rows, split, whole, (chunk, group, split_k, raster), flattened)| {
                let world = WorldSize::new(world).expect("a world size");
                let nodes = Nodes::new(world, nodes).expect("equal nodes");
                let (split, whole) = (8 * split * world.index(), 16 * whole);
                let (n, k) = if op == OpKind::AllGatherGemm { (split, whole) } else { (whole, split) };
                let problem = Problem::new(op, rows * world.index(), n, k, DType::Bf16, world).expect("a valid problem");
                // Tiles that span shards do so in worlds of one node, or of as many as ranks.
                let flattened = flattened && !nodes.are_mixed();
                let chunk = if flattened && op == OpKind::GemmReduceScatter { Chunk::Shard } else { Chunk::Tiles(chunk) };
                let schedule = Schedule { chunk, raster, group, split_k, flattened, ..Schedule::of(TileShape::new(2, 16, 16)) };
                world.ranks().map(|rank| TileProgram::build_across(&problem, rank, &schedule, nodes).expect("a valid schedule")).collect()
            },
        )
    }

    /// In the order in which they are gone through where so many peers are sent to at once.
    fn ordered(program: &TileProgram, peers: u32) -> Vec<Round> {
        let rounds = program.rounds().unwrap();
        if program.problem.op() == OpKind::AllGatherGemm { crate::program::in_batches_of(rounds, peers) } else { rounds }
    }

    proptest! {
        /// What a rank sends in a group is what its reader receives in the group of the same
        /// number, at the same turn of those between the two. Ranks take their groups in order,
        /// each as soon as all of its partners are in the same one and, for GEMM-ReduceScatter, the
        /// chunks are there, which nothing but the rank's own progress brings: so none waits for
        /// ever, whoever is slow.
        #[test]
        fn ranks_never_wait_for_each_other_in_a_circle(programs in programs(), peers in 1..=16_u32, slow in prop::collection::vec(0..16_usize, 64)) {
            let rounds: Vec<_> = programs.iter().map(|program| ordered(program, peers)).collect();
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
            let groups: Vec<Vec<_>> = rounds.iter().map(|rounds| groups(rounds, peers).collect()).collect();
            let total = groups[0].len();
            for own in &groups {
                prop_assert!(own.iter().map(|group| group.len()).eq(groups[0].iter().map(|group| group.len())));
                for group in own {
                    let to: BTreeSet<_> = group.iter().map(|round| round.sent.peer.get()).collect();
                    let from: BTreeSet<_> = group.iter().map(|round| round.received.peer.get()).collect();
                    prop_assert_eq!((to.len(), from.len()), (group.len(), group.len()), "one message to a peer, and one from it");
                    prop_assert!(group.len() <= peers as usize);
                }
            }
            // Each rank has posted the group that it is at; a group ends for a rank when all
            // partners have posted it. The slow ones go last.
            let mut posted = vec![0; world];
            let mut ended = vec![0; world];
            for turn in 0.. {
                let first = slow[turn % slow.len()];
                let ready = |rank: usize| {
                    let group = groups[rank][ended[rank]];
                    group.iter().flat_map(|round| [round.sent, round.received]).all(|end| posted[end.peer.index()] > ended[rank])
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

        /// What the readers await is received, each place once and whole, and every signal by the
        /// rank that the program names.
        #[test]
        fn rounds_carry_all_that_is_awaited(programs in programs()) {
            for program in &programs {
                let rounds = program.rounds().unwrap();
                let mut covered = BTreeMap::<u32, Vec<_>>::new();
                for round in &rounds {
                    covered.entry(round.received.place).or_default().push((round.offset, round.bytes));
                }
                prop_assert_eq!(covered.len(), program.nodes.others() as usize);
                for (_, mut place) in covered {
                    place.sort_unstable();
                    let end = place.iter().try_fold(0, |end, &(offset, bytes)| (offset == end && bytes > 0).then_some(offset + bytes));
                    prop_assert_eq!(end, Some(program.place_bytes()));
                }
                let received: BTreeSet<_> = rounds.iter().map(|round| (round.received.signal, round.received.peer.get())).collect();
                let awaited: BTreeSet<_> =
                    program.awaits.iter().filter(|a| program.crosses(a.peer)).map(|a| (a.signal, a.peer)).collect();
                prop_assert_eq!(&received, &awaited);
                prop_assert_eq!(received.len(), rounds.len());
            }
        }

        /// What a rank sends waits for nothing that crosses nodes, and is finished in the order of
        /// the rounds.
        #[test]
        fn chunks_are_finished_in_the_order_of_the_rounds(programs in programs()) {
            for program in &programs {
                let sends = |item: &WorkItem| matches!(item.sink, sink::SEND | sink::SCATTER);
                let mut sent = program.items.iter().filter(|item| sends(item));
                prop_assert!(sent.all(|item| program.awaits_of(item).is_empty() && program.late_awaits_of(item).iter().all(|a| !program.crosses(a.peer))));
                if program.problem.op() == OpKind::GemmReduceScatter {
                    let last = |dest, signal| {
                        program.items.iter().rposition(|item| sends(item) && item.raise == signal && program.signalled_ranks(item).any(|heard| heard == dest))
                    };
                    let rounds = program.rounds().unwrap();
                    let ends: Vec<_> = rounds.iter().map(|round| last(round.sent.peer, round.sent.signal)).collect();
                    prop_assert!(ends.iter().all(Option::is_some) && ends.is_sorted());
                }
            }
        }
    }

    /// One worker a rank, one exchange at a time on each rail, and movers that pass on in order
    /// what has come: all of them end, whoever is slow.
    fn all_end(programs: &[TileProgram], peers: u32, slow: &[usize]) -> Result<(), String> {
        let world = programs.len();
        let rounds: Vec<_> = programs.iter().map(|program| ordered(program, peers)).collect();
        let groups: Vec<Vec<_>> = rounds.iter().map(|rounds| groups(rounds, peers).collect()).collect();
        // By owner and signal, of signals, and by rank, dest and signal of the flags that say what
        // can be sent.
        let (mut raised, mut flags) = (BTreeSet::<(u32, u32)>::new(), BTreeSet::<(u32, u32, u32)>::new());
        let mut left = BTreeMap::<(u32, u32), u32>::new();
        for program in programs {
            raised.extend(program.transfers.iter().filter(|t| !program.crosses(t.dest)).map(|t| (t.dest, t.raise)));
            flags.extend(program.transfers.iter().filter(|t| program.crosses(t.dest)).map(|t| (program.rank.get(), t.dest, t.raise)));
        }
        let (mut item, mut group, mut forward) = (vec![0; world], vec![0; world], vec![0; world]);
        for turn in 0.. {
            let mut moved = false;
            for rank in (0..world).map(|i| (i + slow[turn % slow.len()]) % world) {
                let (program, me) = (&programs[rank], rank as u32);
                let up = |raised: &BTreeSet<_>, signal| raised.contains(&(me, signal));
                if let Some(next) = program.items.get(item[rank]) {
                    let mut awaits = program.awaits_of(next).iter().chain(program.late_awaits_of(next));
                    if awaits.all(|a| up(&raised, a.signal)) {
                        (moved, item[rank]) = (true, item[rank] + 1);
                        let count = left.entry((me, next.counter)).or_insert(0);
                        *count += 1;
                        let whole = next.counter == crate::program::NONE || *count == next.raise_after;
                        for dest in program.signalled_ranks(next).map(crate::Rank::get).filter(|_| whole) {
                            if program.crosses(dest) {
                                flags.insert((me, dest, next.raise));
                            } else {
                                raised.insert((dest, next.raise));
                            }
                        }
                        continue;
                    }
                }
                if let Some(next) = groups[rank].get(group[rank]) {
                    let number = group[rank];
                    // A group is posted when what it sends is there, all of it.
                    let posted = |peer: usize| {
                        let whole = |sent: End| flags.contains(&(peer as u32, sent.peer.get(), sent.signal));
                        group[peer] > number || group[peer] == number && groups[peer][number].iter().all(|round| whole(round.sent))
                    };
                    if posted(rank) && next.iter().all(|round| posted(round.sent.peer.index()) && posted(round.received.peer.index())) {
                        (moved, group[rank]) = (true, number + 1);
                        raised.extend(next.iter().map(|round| (me, round.received.signal)));
                        continue;
                    }
                }
                if let Some(next) = program.forwards.get(forward[rank])
                    && up(&raised, next.awaits.signal)
                {
                    (moved, forward[rank]) = (true, forward[rank] + 1);
                    raised.insert((next.to.dest, next.to.raise));
                }
            }
            if !moved {
                break;
            }
        }
        let ended = programs.iter().enumerate().all(|(rank, program)| {
            (item[rank], group[rank], forward[rank]) == (program.items.len(), groups[rank].len(), program.forwards.len())
        });
        if ended { Ok(()) } else { Err(format!("items {item:?}, groups {group:?}, forwards {forward:?}")) }
    }

    proptest! {
        #[test]
        fn kernels_rails_and_movers_never_wait_in_a_circle(programs in programs(), peers in 1..=16_u32, slow in prop::collection::vec(0..16_usize, 8)) {
            if let Err(stuck) = all_end(&programs, peers, &slow) {
                prop_assert!(false, "{}", stuck);
            }
        }
    }

    /// In the plans that ops have by themselves.
    #[test]
    fn a_chunk_goes_to_as_many_peers_at_once_as_is_said() {
        for (op, world) in
            [OpKind::AllGatherGemm, OpKind::GemmReduceScatter].into_iter().flat_map(|op| (2..=8).map(move |world| (op, world)))
        {
            let world = WorldSize::new(world).unwrap();
            for m in [64, 1024, 8192].map(|m: usize| m.next_multiple_of(world.index())) {
                let (n, k) = if op == OpKind::AllGatherGemm { (840 * 16, 2048) } else { (2048, 840 * 16) };
                let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
                let links = Links::Messages(Channels { least_bytes: 4 << 20, ..Channels::FREE });
                let target = Target { links, ..Target::peer_memory(Machine::H100, &problem) };
                for plan in Plan::ranked(&problem, &target).into_iter().take(40) {
                    let CommMode::Overlapped { peers } = plan.comm else { continue };
                    let program = TileProgram::build(&problem, crate::Rank::new(1), &plan.schedule(&problem, &target)).unwrap();
                    let largest = groups(&ordered(&program, peers), peers).map(<[Round]>::len).max();
                    assert_eq!(largest, Some(peers as usize), "{problem:?}: {plan}");
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
            assert!(rounds(Schedule { flattened: true, ..schedule }).is_some());
            assert_eq!(rounds(Schedule { flattened: true, chunk: Chunk::Tiles(1), ..schedule }).is_some(), op == OpKind::AllGatherGemm);
            assert_eq!(rounds(Schedule { k_slices: 2, ..schedule }).is_some(), op == OpKind::GemmReduceScatter);
        }
        let prologue = Problem::new(OpKind::AllGatherGemm, 64, 512, 512, DType::Bf16, WorldSize::new(1).unwrap()).unwrap();
        assert_eq!(TileProgram::build(&prologue, crate::Rank::new(0), &schedule).unwrap().rounds(), Some(Vec::new()));
    }
}
