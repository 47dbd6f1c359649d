//! Routes of random problems, compared with the transfers of the same programs over peer memory.

use super::*;
use crate::layout::RowLayout;
use crate::layout::slot_bytes;
use crate::program::{Chunk, NONE, Schedule, Sink, check};
use crate::{DType, OpKind, Problem, TileShape, WorldSize};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn programs() -> impl Strategy<Value = Vec<TileProgram>> {
    let extents = (1u32..6, 1usize..180, 1usize..5, 1usize..5, 0usize..6);
    let knobs = (
        0u32..6,
        (1u32..4, 0u32..3, 0u32..3),
        1u32..4,
        1u32..3,
        any::<bool>(),
        (prop::sample::select(&OpKind::ALL[..]), prop::sample::select(vec![0, 5, u32::MAX])),
    );
    (extents, knobs).prop_map(
        |(
            (world, m, n, k, more),
            (chunk, (group, prologue, chunk_ordered), k_slices, split_k, flattened, (op, own_lag)),
        )| {
            let world = WorldSize::new(world).expect("a small world");
            let w = world.get() as usize;
            let split = |groups| 8 * (groups * w + more % w);
            let problem = Problem::new(op, m, split(n), split(k), DType::Bf16, world)
                .expect("valid by construction");
            // Scattered tiles with signals of their own have no parcels.
            let scatters = flattened && op.reduces();
            let rows = if flattened { RowLayout::Flattened } else { RowLayout::PerShard };
            let chunk = if chunk == 0 || scatters { Chunk::Shard } else { Chunk::Tiles(chunk) };
            let tile = TileShape::new(16, 24, 16);
            let schedule = Schedule {
                chunk,
                raster_group: 2,
                group,
                prologue,
                chunk_ordered,
                k_slices,
                split_k,
                rows,
                own_lag,
                ..Schedule::of(tile)
            };
            let programs: Vec<_> = world
                .ranks()
                .map(|rank| {
                    TileProgram::build(&problem, rank, &schedule).expect("a valid schedule")
                })
                .collect();
            check::verify(&programs).expect("programs are right");
            programs
        },
    )
}

fn routes(programs: &[TileProgram]) -> Vec<Route> {
    (0..).take(programs.len()).map(|rank| Route::new(Rank::new(rank), programs)).collect()
}

/// Offsets of the vectors of 16 bytes of a block. Extents and places are multiples of these.
fn vectors(block: &Block) -> impl Iterator<Item = u64> + use<> {
    let Block { offset, rows, width, pitch } = *block;
    assert!([offset, width, pitch].iter().all(|bytes| bytes % 16 == 0), "{block:?}");
    (0..rows)
        .flat_map(move |row| (0..width).step_by(16).map(move |byte| offset + row * pitch + byte))
}

/// By vector at a reader: the source and its vector.
type Arrived = BTreeMap<u64, (u32, u64)>;

/// What copies bring to the rank of `route`.
fn staged(route: &Route) -> Arrived {
    let mut found = BTreeMap::new();
    for Incoming { source, blocks, reader, .. } in route.incoming() {
        for from in blocks.iter().flat_map(vectors) {
            let twice = found.insert(from.wrapping_add(reader.shift), (*source, from));
            assert_eq!(twice, None, "each vector arrives once");
        }
    }
    found
}

/// What transfers bring to `reader` over peer memory.
fn pushed(programs: &[TileProgram], reader: u32) -> Arrived {
    let mut found = BTreeMap::new();
    for (source, program) in (0..).zip(programs) {
        let pitch = u64::from(program.problem.k()) * 2;
        for t in program.transfers.iter().filter(|t| t.dest == reader && source != reader) {
            let offset = u64::from(t.row) * pitch + u64::from(t.col) * 2;
            let (rows, width) = (u64::from(t.rows), u64::from(t.cols) * 2);
            let place = program.gather_place_offset(t.place);
            let from = vectors(&Block { offset, rows, width, pitch });
            found.extend(from.map(|from| (place + from, (source, from))));
        }
    }
    found
}

/// What kernels that store partial tiles and results for `reader` would bring there over peer
/// memory, with the place in the outbox.
fn stored(programs: &[TileProgram], routes: &[Route], reader: Rank) -> Arrived {
    let mut found = BTreeMap::new();
    for (source, (program, route)) in (0..).zip(programs.iter().zip(routes)) {
        let (problem, slot) = (&program.problem, slot_bytes(&program.problem, program.tile));
        let pitch = u64::from(problem.n()) * 2;
        let own = problem.shard_rows(program.rank).start;
        let items = program.items.iter().filter(|item| item.raise != NONE);
        for item in items.filter(|item| program.signalled_ranks(item).any(|rank| rank == reader)) {
            let block = match item.sink {
                Sink::Send => {
                    let offset = u64::from(item.slot) * slot;
                    Block { offset, rows: 1, width: slot, pitch: slot }
                }
                Sink::Reduce => {
                    let place = u64::from(own + item.row) * pitch + u64::from(item.col) * 2;
                    let (rows, width) = (u64::from(item.rows), u64::from(item.cols) * 2);
                    Block { offset: program.results_offset() + place, rows, width, pitch }
                }
                _ => continue,
            };
            let shift = route.shifts[reader.index()];
            found.extend(vectors(&block).map(|to| (to, (source, to.wrapping_add(shift)))));
        }
    }
    found
}

proptest! {
    // Every vector is tracked.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_signal_that_is_awaited_of_a_peer_is_that_of_one_parcel(programs in programs()) {
        for (program, route) in programs.iter().zip(routes(&programs)) {
            let mut raised = BTreeSet::new();
            for incoming in route.incoming() {
                prop_assert!(raised.insert((incoming.reader.signal, incoming.source)), "{program}");
                prop_assert!(incoming.reader.signal < program.signals);
            }
            let ranks: BTreeSet<(u32, u32)> =
                program.awaits.iter().map(|a| (a.signal, a.peer)).collect();
            let own = |&(_, peer): &(u32, u32)| peer == program.rank.get();
            let awaited: BTreeSet<_> = ranks.into_iter().filter(|a| !own(a)).collect();
            // Nobody need await a chunk without rows.
            let of_no_rows = |incoming: &&Incoming| {
                incoming.blocks.iter().all(Block::is_empty)
                    && !awaited.contains(&(incoming.reader.signal, incoming.source))
            };
            for incoming in route.incoming().iter().filter(of_no_rows) {
                raised.remove(&(incoming.reader.signal, incoming.source));
            }
            prop_assert_eq!(&awaited, &raised, "{}", program);
        }
    }

    #[test]
    fn a_shard_arrives_as_if_it_were_pushed_and_leaves_once(programs in programs()) {
        prop_assume!(programs[0].problem.op() == OpKind::AllGatherGemm);
        let routes = routes(&programs);
        for (reader, route) in (0..).zip(&routes) {
            let program = &programs[reader as usize];
            prop_assert_eq!(staged(route), pushed(&programs, reader), "{}", program);
            let mut left = BTreeSet::new();
            for Parcel { origin, blocks, .. } in route.outgoing() {
                let (Origin::Shard { row, before }, [block]) = (*origin, &blocks[..]) else {
                    panic!("a block of the shard")
                };
                prop_assert_eq!(
                    block.offset,
                    row * block.pitch + before,
                    "the half is as dense as the shard"
                );
                for vector in vectors(block) {
                    prop_assert!(left.insert(vector), "{vector} leaves twice");
                    prop_assert!(vector < route.size.half_bytes);
                }
            }
        }
    }

    #[test]
    fn what_a_kernel_stores_for_peers_lies_apart_in_the_outbox_and_arrives_where_it_was_meant(
        programs in programs(),
    ) {
        prop_assume!(programs[0].problem.op().reduces() && !programs[0].rows.is_flattened());
        let routes = routes(&programs);
        for (program, route) in programs.iter().zip(&routes) {
            let arrived = staged(route);
            prop_assert_eq!(&arrived, &stored(&programs, &routes, program.rank), "{}", program);
            let mut left = BTreeSet::new();
            for Parcel { origin, blocks, readers } in route.outgoing() {
                match origin {
                    Origin::Outbox => prop_assert_eq!(readers.len(), 1),
                    Origin::Results => {
                        prop_assert_eq!(readers.len() as u32, program.problem.world().peers());
                    }
                    Origin::Shard { .. } => panic!("a shard"),
                }
                for vector in blocks.iter().flat_map(vectors) {
                    prop_assert!(left.insert(vector), "{vector} leaves twice: {program}");
                    prop_assert!(vector < route.size.half_bytes);
                }
            }
            prop_assert!(arrived.keys().all(|&vector| vector < route.size.half_bytes));
        }
    }

    #[test]
    fn rows_that_a_kernel_scatters_at_once_arrive_in_the_place_of_their_source(
        programs in programs(),
    ) {
        let op = programs[0].problem.op();
        prop_assume!(op == OpKind::GemmReduceScatter && programs[0].rows.is_flattened());
        for (program, route) in programs.iter().zip(routes(&programs)) {
            let (mut left, place) = (BTreeSet::new(), program.place_bytes());
            for Parcel { blocks, readers, .. } in route.outgoing() {
                let ([block], [reader]) = (&blocks[..], &readers[..]) else { panic!("one reader") };
                let shift = route.shifts[reader.rank as usize];
                let at_reader = u64::from(program.rank.get()) * place;
                prop_assert_eq!(block.offset, at_reader.wrapping_add(shift));
                prop_assert_eq!(reader.shift, shift.wrapping_neg());
                prop_assert!(left.insert(block.offset) && block.width == place);
            }
            prop_assert_eq!(left.len() as u32, program.problem.world().peers());
        }
    }

    #[test]
    fn rows_for_all_ranks_leave_once_and_arrive_in_the_place_of_their_source(
        programs in programs(),
    ) {
        prop_assume!(
            programs[0].problem.op() == OpKind::GemmAllReduce && programs[0].rows.is_flattened()
        );
        let bytes = programs[0].place_bytes();
        for (program, route) in programs.iter().zip(routes(&programs)) {
            let [Parcel { origin: Origin::Outbox, blocks, readers }] = route.outgoing() else {
                panic!("one parcel: {program}")
            };
            prop_assert_eq!(
                (blocks[0].offset, blocks[0].width),
                (u64::from(program.rank.get()) * bytes, bytes),
                "the kernel stores them there"
            );
            prop_assert_eq!(readers.len() as u32, program.problem.world().peers());
            for peer in readers {
                prop_assert_eq!((peer.shift, route.shifts[peer.rank as usize]), (0, 0));
            }
        }
    }

    #[test]
    fn parcels_of_a_source_are_fetched_in_the_order_in_which_they_are_ready(
        programs in programs(),
    ) {
        for route in routes(&programs) {
            let mut last = BTreeMap::new();
            for Incoming { source, index, reader, .. } in route.incoming() {
                let before = last.insert((*source, reader.step), *index);
                prop_assert!(before.is_none_or(|before| before < *index));
            }
        }
    }
}

/// The kernels, with a worker each, and the two streams of every rank, step by step.
struct Streams<'a> {
    programs: &'a [TileProgram],
    routes: &'a [Route],
    /// By rank: items, sent parcels and received ones that are done.
    done: Vec<[usize; 3]>,
    /// Items of chunks that are done, by rank and counter.
    counted: BTreeMap<(u32, u32), u32>,
    /// By rank: signals that it has raised for a rank.
    raised: BTreeSet<(u32, u32, u32)>,
    /// By rank: signals on its pad.
    heard: BTreeSet<(u32, u32)>,
}

impl<'a> Streams<'a> {
    fn new(programs: &'a [TileProgram], routes: &'a [Route]) -> Self {
        let own = |(rank, program): (u32, &'a TileProgram)| {
            let kept = program.transfers.iter().filter(move |t| t.dest == rank);
            kept.map(move |t| (rank, t.raise))
        };
        Self {
            programs,
            routes,
            done: vec![[0; 3]; programs.len()],
            counted: BTreeMap::new(),
            raised: BTreeSet::new(),
            heard: (0..).zip(programs).flat_map(own).collect(),
        }
    }

    fn item(&mut self, rank: u32) -> bool {
        let program = &self.programs[rank as usize];
        let Some(item) = program.items.get(self.done[rank as usize][0]) else { return false };
        let mut awaits = program.awaits_of(item).iter().chain(program.late_awaits_of(item));
        if !awaits.all(|entry| self.heard.contains(&(rank, entry.signal))) {
            return false;
        }
        let counted = self.counted.entry((rank, item.counter)).or_default();
        *counted += 1;
        if item.raise != NONE && (item.counter == NONE || *counted == item.raise_after) {
            for to in program.signalled_ranks(item).map(Rank::get) {
                if to == rank {
                    self.heard.insert((rank, item.raise));
                } else {
                    self.raised.insert((rank, to, item.raise));
                }
            }
        }
        true
    }

    fn send(&self, rank: u32) -> bool {
        let next = self.routes[rank as usize].outgoing().get(self.done[rank as usize][1]);
        let raised = |reader: &Reader| self.raised.contains(&(rank, reader.rank, reader.signal));
        let from_shard = |parcel: &Parcel| matches!(parcel.origin, Origin::Shard { .. });
        next.is_some_and(|parcel| from_shard(parcel) || parcel.readers.iter().all(raised))
    }

    fn receive(&mut self, rank: u32) -> bool {
        let next = self.routes[rank as usize].incoming().get(self.done[rank as usize][2]);
        let sent = |next: &&Incoming| self.done[next.source as usize][1] > next.index as usize;
        next.filter(sent).is_some_and(|next| self.heard.insert((rank, next.reader.signal)))
    }

    /// Goes on until nothing can; what is done then.
    fn run(mut self) -> Vec<[usize; 3]> {
        loop {
            let mut moved = false;
            for rank in 0..self.programs.len() {
                let of_rank = rank as u32;
                let steps = [self.item(of_rank), self.send(of_rank), self.receive(of_rank)];
                for (done, step) in self.done[rank].iter_mut().zip(steps) {
                    *done += usize::from(step);
                }
                moved |= steps.contains(&true);
            }
            if !moved {
                return self.done;
            }
        }
    }
}

proptest! {
    #[test]
    fn kernels_and_streams_of_all_ranks_come_to_their_ends(programs in programs()) {
        let routes = routes(&programs);
        let all: Vec<_> = programs
            .iter()
            .zip(&routes)
            .map(|(p, route)| [p.items.len(), route.outgoing().len(), route.incoming().len()])
            .collect();
        prop_assert_eq!(Streams::new(&programs, &routes).run(), all, "{}", programs[0]);
    }
}

#[test]
fn results_of_whole_columns_leave_as_one_block_and_others_as_few() {
    let world = WorldSize::new(2).unwrap();
    // Four row blocks of a shard, in raster groups of two.
    let problem = Problem::new(OpKind::GemmAllReduce, 2 * 64, 96, 64, DType::Bf16, world).unwrap();
    let blocks = |chunk| {
        let schedule = Schedule {
            chunk: Chunk::Tiles(chunk),
            raster_group: 2,
            own_lag: u32::MAX,
            ..Schedule::of(TileShape::new(16, 24, 16))
        };
        let programs: Vec<_> = world
            .ranks()
            .map(|rank| TileProgram::build(&problem, rank, &schedule).unwrap())
            .collect();
        let route = Route::new(Rank::new(1), &programs);
        let sent = route.outgoing().iter();
        let origins: Vec<_> = sent.clone().map(|parcel| parcel.origin).collect();
        assert!(
            origins.is_sorted_by_key(|origin| *origin == Origin::Results),
            "own tiles are last"
        );
        sent.filter(|parcel| parcel.origin == Origin::Results)
            .map(|parcel| parcel.blocks.len())
            .collect::<Vec<_>>()
    };
    assert_eq!(blocks(4), [1, 1, 1, 1]);
    assert_eq!(blocks(8), [1, 1]);
    assert_eq!(blocks(16), [1]);
    assert_eq!(blocks(3), [2, 2, 2, 2, 2, 1]);
}

#[test]
fn the_first_two_shards_are_fetched_in_turns_and_the_others_one_after_another() {
    let world = WorldSize::new(4).unwrap();
    let problem = Problem::new(OpKind::AllGatherGemm, 4 * 32, 96, 64, DType::Bf16, world).unwrap();
    let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(16, 24, 16)) };
    let programs: Vec<_> =
        world.ranks().map(|rank| TileProgram::build(&problem, rank, &schedule).unwrap()).collect();
    let order = |rank| {
        Route::new(Rank::new(rank), &programs)
            .incoming()
            .iter()
            .map(|i| (i.source, i.index))
            .collect::<Vec<_>>()
    };
    assert_eq!(order(0), [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0), (3, 1)]);
    assert_eq!(order(3), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]);
    let shard = |rank| Route::new(Rank::new(rank), &programs).outgoing().len();
    assert_eq!(shard(1), 2, "each piece once for all readers");
}
