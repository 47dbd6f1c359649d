//! Routes of random problems, compared with the transfers of the same programs over peer memory.

use super::*;
use crate::layout::RowLayout;
use crate::layout::slot_bytes;
use crate::program::{Chunk, Schedule, Sink, check};
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
        prop::sample::select(&OpKind::ALL[..]),
    );
    (extents, knobs).prop_map(
        |(
            (world, m, n, k, more),
            (chunk, (group, prologue, chunk_ordered), k_slices, split_k, flattened, op),
        )| {
            let world = WorldSize::new(world).expect("a small world");
            let w = world.get() as usize;
            let split = |groups| 8 * (groups * w + more % w);
            let problem = Problem::new(op, m, split(n), split(k), DType::Bf16, world)
                .expect("valid by construction");
            // Only kernels make two exchanges.
            let flattened = flattened || op == OpKind::GemmAllReduce;
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

/// Byte offsets of a block of rows.
fn bytes(offset: u64, rows: u64, width: u64, pitch: u64) -> impl Iterator<Item = u64> {
    (0..rows).flat_map(move |row| (0..width).map(move |byte| offset + row * pitch + byte))
}

/// Bytes that transfers bring to `reader`: by destination byte, the source and its byte.
fn direct(programs: &[TileProgram], reader: u32) -> BTreeMap<u64, (u32, u64)> {
    let mut found = BTreeMap::new();
    for (source, program) in (0..).zip(programs) {
        let row_bytes = u64::from(program.problem.k()) * 2;
        for t in program.transfers.iter().filter(|t| t.dest == reader && source != reader) {
            let from = u64::from(t.row) * row_bytes + u64::from(t.col) * 2;
            let (rows, width) = (u64::from(t.rows), u64::from(t.cols) * 2);
            let to = program.gather_place_offset(t.place) + from;
            found.extend(
                bytes(to, rows, width, row_bytes)
                    .zip(bytes(from, rows, width, row_bytes).map(|from| (source, from))),
            );
        }
    }
    found
}

proptest! {
    // Every byte is tracked.
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
                incoming.block.rows == 0
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
            let mut staged = BTreeMap::new();
            for Incoming { source, index, block, reader } in route.incoming() {
                let sent = &routes[*source as usize].outgoing()[*index as usize];
                let from_shard = matches!(sent.origin, Origin::Shard { .. });
                prop_assert!(from_shard);
                let from = bytes(block.offset, block.rows, block.width, block.pitch)
                    .map(|from| (*source, from));
                staged
                    .extend(bytes(reader.offset, block.rows, block.width, reader.pitch).zip(from));
            }
            prop_assert_eq!(&staged, &direct(&programs, reader), "{}", programs[reader as usize]);
            let mut left = BTreeSet::new();
            for Parcel { origin, block, .. } in route.outgoing() {
                let Origin::Shard { row, before } = *origin else { panic!("a shard") };
                prop_assert_eq!(
                    block.offset,
                    row * block.pitch + before,
                    "the half is as dense as the shard"
                );
                for byte in bytes(block.offset, block.rows, block.width, block.pitch) {
                    prop_assert!(left.insert(byte), "{byte} leaves twice");
                    prop_assert!(byte < route.size.half_bytes);
                }
            }
        }
    }

    #[test]
    fn what_a_kernel_sends_lies_apart_in_the_outbox_and_arrives_where_it_was_meant(
        programs in programs(),
    ) {
        prop_assume!(programs[0].problem.op() == OpKind::GemmReduceScatter);
        let mut arrived = BTreeSet::new();
        for (program, route) in programs.iter().zip(routes(&programs)) {
            let mut left = BTreeSet::new();
            for Parcel { origin, block, readers } in route.outgoing() {
                prop_assert_eq!(*origin, Origin::Outbox);
                let [reader] = readers[..] else { panic!("one reader") };
                prop_assert_eq!(
                    block.offset,
                    reader.offset.wrapping_add(route.shifts[reader.rank as usize]),
                    "the kernel writes there"
                );
                for (byte, to) in bytes(block.offset, block.rows, block.width, block.pitch)
                    .zip(bytes(reader.offset, block.rows, block.width, reader.pitch))
                {
                    prop_assert!(left.insert(byte) && byte < route.size.half_bytes, "{}", program);
                    prop_assert!(
                        arrived.insert((reader.rank, to)) && to < route.size.half_bytes,
                        "{}",
                        program
                    );
                }
            }
            // A slot for each tile that is sent, or a place at each peer.
            let slot = slot_bytes(&program.problem, program.tile);
            let slots: u64 = program
                .items
                .iter()
                .map(|item| if item.sink == Sink::Send { slot } else { 0 })
                .sum();
            let peers = u64::from(program.problem.world().peers());
            let sent =
                if program.rows.is_flattened() { peers * program.place_bytes() } else { slots };
            prop_assert_eq!(left.len() as u64, sent, "{}", program);
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
            let [Parcel { origin: Origin::Outbox, block, readers }] = route.outgoing() else {
                panic!("one parcel: {program}")
            };
            prop_assert_eq!(
                (block.offset, block.width),
                (u64::from(program.rank.get()) * bytes, bytes),
                "the kernel stores them there"
            );
            prop_assert_eq!(readers.len() as u32, program.problem.world().peers());
            for peer in readers {
                prop_assert_eq!((peer.offset, route.shifts[peer.rank as usize]), (block.offset, 0));
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
