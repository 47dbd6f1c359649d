//! Rounds of random programs, and whether ranks that take them in groups ever wait in a circle.

use flux_core::layout::RowLayout;
use flux_core::machine::Machine;
use flux_core::plan::{CommMode, Links, Plan, Target};
use flux_core::program::{
    self, Channels, Chunk, End, Round, Schedule, Sink, TileProgram, WorkItem, groups,
};
use flux_core::{DType, Nodes, OpKind, Problem, Rank, TileShape, WorldSize};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Whether `dest` is in another node than the program's rank.
fn crosses(program: &TileProgram, dest: u32) -> bool {
    !program.nodes.together(program.rank, Rank::new(dest))
}

fn programs() -> BoxedStrategy<Vec<TileProgram>> {
    let op = prop::sample::select(&OpKind::ALL[..]);
    let cut = (1u32..=4, 1u32..=17, 1u32..=3, prop_oneof![Just(u32::MAX), 1u32..=3]);
    let grouped = prop_oneof![
        (2u32..=16).prop_map(|world| (world, world)),
        (2u32..=4, 2u32..=4).prop_map(|(count, of)| (count, count * of))
    ];
    (op, grouped, 1usize..=9, (1usize..=5, 0usize..16), 1usize..=3, cut, any::<bool>())
        .prop_map(
            |(
                op,
                (nodes, world),
                rows,
                (split, more),
                whole,
                (chunk, group, split_k, raster_group),
                flattened,
            )| {
                let world = WorldSize::new(world).expect("a world size");
                let nodes = Nodes::new(world, nodes).expect("equal nodes");
                let op = if op == OpKind::GemmAllReduce && nodes.are_mixed() {
                    OpKind::GemmReduceScatter
                } else {
                    op
                };
                let (split, whole) =
                    (8 * (split * world.index() + more % world.index()), 16 * whole);
                let (n, k) =
                    if op == OpKind::AllGatherGemm { (split, whole) } else { (whole, split) };
                let problem = Problem::new(op, rows * world.index(), n, k, DType::Bf16, world)
                    .expect("a valid problem");
                // Mixed nodes have no flattened rows, and messages of a GEMM-AllReduce no others.
                let flattened = (flattened || op == OpKind::GemmAllReduce) && !nodes.are_mixed();
                let layout = if flattened { RowLayout::Flattened } else { RowLayout::PerShard };
                let chunk =
                    if flattened && op.reduces() { Chunk::Shard } else { Chunk::Tiles(chunk) };
                let schedule = Schedule {
                    chunk,
                    raster_group,
                    group,
                    split_k,
                    rows: layout,
                    ..Schedule::of(TileShape::new(2, 16, 16))
                };
                world
                    .ranks()
                    .map(|rank| {
                        TileProgram::build_across(&problem, rank, &schedule, nodes)
                            .expect("a valid schedule")
                    })
                    .collect()
            },
        )
        .boxed()
}

/// The rounds in the order of sending to `peers` peers at once.
fn ordered(program: &TileProgram, peers: u32) -> Vec<Round> {
    let rounds = program.rounds().unwrap();
    if program.problem.op() == OpKind::AllGatherGemm {
        program::in_batches_of(&rounds, peers)
    } else {
        rounds
    }
}

proptest! {
    /// A rank sends in a group what its reader receives in the group of the same number, in the
    /// same order. Ranks take their groups in order, each when its partners are in the same group
    /// and its chunks are finished. So none waits for ever, whichever is slow.
    #[test]
    fn ranks_never_wait_for_each_other_in_a_circle(
        programs in programs(),
        peers in 1..=16_u32,
        slow in prop::collection::vec(0..16_usize, 64),
    ) {
        let rounds: Vec<_> = programs.iter().map(|program| ordered(program, peers)).collect();
        let world = programs.len();
        for (rank, own) in rounds.iter().enumerate() {
            prop_assert_eq!(own.len(), rounds[0].len());
            for (i, round) in own.iter().enumerate() {
                let reader = &rounds[round.sent.peer.index()][i];
                prop_assert_eq!(reader.received.peer.index(), rank);
                prop_assert_eq!(
                    (reader.received.place, reader.received.signal),
                    (round.sent.place, round.sent.signal)
                );
                prop_assert_eq!(
                    (reader.step, reader.offset, reader.bytes),
                    (round.step, round.offset, round.bytes)
                );
            }
        }
        let groups: Vec<Vec<_>> =
            rounds.iter().map(|rounds| groups(rounds, peers).collect()).collect();
        let total = groups[0].len();
        for own in &groups {
            prop_assert!(
                own.iter().map(|group| group.len()).eq(groups[0].iter().map(|group| group.len()))
            );
            for group in own {
                let to: BTreeSet<_> = group.iter().map(|round| round.sent.peer.get()).collect();
                let from: BTreeSet<_> =
                    group.iter().map(|round| round.received.peer.get()).collect();
                prop_assert_eq!(
                    (to.len(), from.len()),
                    (group.len(), group.len()),
                    "one message to a peer, and one from it"
                );
                prop_assert!(group.len() <= peers as usize);
            }
        }
        // Each rank has posted its current group; a group ends for a rank when all partners have
        // posted it. Slow ranks go last.
        let mut posted = vec![0; world];
        let mut ended = vec![0; world];
        for turn in 0.. {
            let first = slow[turn % slow.len()];
            let ready = |rank: usize| {
                let group = groups[rank][ended[rank]];
                group
                    .iter()
                    .flat_map(|round| [round.sent, round.received])
                    .all(|end| posted[end.peer.index()] > ended[rank])
            };
            let post = (0..world)
                .map(|i| (first + i) % world)
                .find(|&rank| posted[rank] == ended[rank] && posted[rank] < total);
            let end = (0..world)
                .map(|i| (first + i) % world)
                .find(|&rank| posted[rank] > ended[rank] && ready(rank));
            match (end, post) {
                (Some(rank), _) => ended[rank] += 1,
                (None, Some(rank)) => posted[rank] += 1,
                (None, None) => break,
            }
        }
        prop_assert!(ended.iter().all(|&ended| ended == total), "{:?} of {}", ended, total);
    }

    /// Each awaited place is received once and whole, and every signal from the rank that the
    /// program names.
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
                let end = place.iter().try_fold(0, |end, &(offset, bytes)| {
                    (offset == end && bytes > 0).then_some(offset + bytes)
                });
                prop_assert_eq!(end, Some(program.place_bytes()));
            }
            let received: BTreeSet<_> = rounds
                .iter()
                .map(|round| (round.received.signal, round.received.peer.get()))
                .collect();
            let awaited: BTreeSet<_> = program
                .awaits
                .iter()
                .filter(|a| crosses(program, a.peer))
                .map(|a| (a.signal, a.peer))
                .collect();
            prop_assert_eq!(&received, &awaited);
            prop_assert_eq!(received.len(), rounds.len());
        }
    }

    /// Sent chunks wait for nothing from other nodes, and finish in the order of the rounds.
    #[test]
    fn chunks_are_finished_in_the_order_of_the_rounds(programs in programs()) {
        for program in &programs {
            let sends = |item: &WorkItem| matches!(item.sink, Sink::Send | Sink::Scatter);
            let mut sent = program.items.iter().filter(|item| sends(item));
            prop_assert!(sent.all(|item| program.awaits_of(item).is_empty()
                && program.late_awaits_of(item).iter().all(|a| !crosses(program, a.peer))));
            if program.problem.op().reduces() {
                let last = |dest, signal| {
                    program.items.iter().rposition(|item| {
                        sends(item)
                            && item.raise == signal
                            && program.signalled_ranks(item).any(|heard| heard == dest)
                    })
                };
                let rounds = program.rounds().unwrap();
                let ends: Vec<_> =
                    rounds.iter().map(|round| last(round.sent.peer, round.sent.signal)).collect();
                prop_assert!(ends.iter().all(Option::is_some) && ends.is_sorted());
            }
        }
    }
}

/// Walks programs with one worker a rank, one exchange at a time on each rail, and movers that
/// forward in order: all must end, whichever is slow.
fn all_end(programs: &[TileProgram], peers: u32, slow: &[usize]) -> Result<(), String> {
    let world = programs.len();
    let rounds: Vec<_> = programs.iter().map(|program| ordered(program, peers)).collect();
    let groups: Vec<Vec<_>> = rounds.iter().map(|rounds| groups(rounds, peers).collect()).collect();
    // Raised signals by owner and signal; flags of chunks ready to send by rank, destination and
    // signal.
    let (mut raised, mut flags) =
        (BTreeSet::<(u32, u32)>::new(), BTreeSet::<(u32, u32, u32)>::new());
    let mut left = BTreeMap::<(u32, u32), u32>::new();
    for program in programs {
        raised.extend(
            program
                .transfers
                .iter()
                .filter(|t| !crosses(program, t.dest))
                .map(|t| (t.dest, t.raise)),
        );
        flags.extend(
            program
                .transfers
                .iter()
                .filter(|t| crosses(program, t.dest))
                .map(|t| (program.rank.get(), t.dest, t.raise)),
        );
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
                    let whole = next.counter == program::NONE || *count == next.raise_after;
                    for dest in program.signalled_ranks(next).map(Rank::get).filter(|_| whole) {
                        if crosses(program, dest) {
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
                // A group is posted when all its chunks are ready.
                let posted = |peer: usize| {
                    let whole =
                        |sent: End| flags.contains(&(peer as u32, sent.peer.get(), sent.signal));
                    group[peer] > number
                        || group[peer] == number
                            && groups[peer][number].iter().all(|round| whole(round.sent))
                };
                if posted(rank)
                    && next.iter().all(|round| {
                        posted(round.sent.peer.index()) && posted(round.received.peer.index())
                    })
                {
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
        (item[rank], group[rank], forward[rank])
            == (program.items.len(), groups[rank].len(), program.forwards.len())
    });
    if ended {
        Ok(())
    } else {
        Err(format!("items {item:?}, groups {group:?}, forwards {forward:?}"))
    }
}

proptest! {
    #[test]
    fn kernels_rails_and_movers_never_wait_in_a_circle(
        programs in programs(),
        peers in 1..=16_u32,
        slow in prop::collection::vec(0..16_usize, 8),
    ) {
        if let Err(stuck) = all_end(&programs, peers, &slow) {
            prop_assert!(false, "{}", stuck);
        }
    }
}

/// The plans of the model send to as many peers at once as they say.
#[test]
fn a_chunk_goes_to_as_many_peers_at_once_as_is_said() {
    for (op, world) in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter]
        .into_iter()
        .flat_map(|op| (2..=8).map(move |world| (op, world)))
    {
        let world = WorldSize::new(world).unwrap();
        for m in [64, 1024, 8192].map(|m: usize| m.next_multiple_of(world.index())) {
            let (n, k) =
                if op == OpKind::AllGatherGemm { (840 * 16, 2048) } else { (2048, 840 * 16) };
            let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
            let links = Links::Messages(Channels { least_bytes: 4 << 20, ..Channels::FREE });
            let target = Target { links, ..Target::peer_memory(Machine::H100, &problem) };
            for plan in Plan::ranked(&problem, &target).into_iter().take(40) {
                let CommMode::Overlapped { peers } = plan.comm else { continue };
                let program =
                    TileProgram::build(&problem, Rank::new(1), &plan.schedule(&problem, &target))
                        .unwrap();
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
        let rounds =
            |schedule| TileProgram::build(&problem, Rank::new(0), &schedule).unwrap().rounds();
        assert!(rounds(schedule).is_some());
        assert!(rounds(Schedule { rows: RowLayout::Flattened, ..schedule }).is_some());
        assert_eq!(
            rounds(Schedule { rows: RowLayout::Flattened, chunk: Chunk::Tiles(1), ..schedule })
                .is_some(),
            op == OpKind::AllGatherGemm
        );
        assert_eq!(
            rounds(Schedule { k_slices: 2, ..schedule }).is_some(),
            op == OpKind::GemmReduceScatter
        );
    }
    let alone =
        Problem::new(OpKind::AllGatherGemm, 64, 512, 512, DType::Bf16, WorldSize::new(1).unwrap())
            .unwrap();
    assert_eq!(
        TileProgram::build(&alone, Rank::new(0), &schedule).unwrap().rounds(),
        Some(Vec::new())
    );
}
