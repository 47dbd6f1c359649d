//! The rules of flattened rows, broken on purpose.

use crate::mutations::{assert_violates, pick, pick_item};
use crate::strategies::{Call, Knobs, build, knob_calls};
use flux_core::OpKind::{AllGatherGemm, GemmAllReduce, GemmReduceScatter};
use flux_core::layout::RowLayout;
use flux_core::program::check::{Output, Record, Violation, verify, verify_rank};
use flux_core::program::{NONE, RowSource, Schedule, Sink, TileProgram, WorkItem};
use flux_core::{DType, Nodes, Problem, Rank, TileShape, WorldSize};
use proptest::prelude::*;
use proptest::sample::Index;

fn flattened() -> impl Strategy<Value = Knobs> {
    let rows = prop::sample::select(vec![RowLayout::Flattened, RowLayout::FlattenedTwoExchanges]);
    (1..=2_u32, 1..=2_u32, rows).prop_map(|(k_slices, split_k, rows)| Knobs {
        k_slices,
        split_k,
        rows,
        ..Knobs::PLAIN
    })
}

fn gathering() -> impl Strategy<Value = Call> {
    knob_calls(AllGatherGemm, 2..=6, 1..=3, flattened())
}

fn scattering() -> impl Strategy<Value = Call> {
    let of = |op| knob_calls(op, 2..=6, 1..=3, flattened());
    prop_oneof![of(GemmReduceScatter), of(GemmAllReduce)]
}

/// Two exchanges, of rows per shard too.
fn two_exchanges() -> impl Strategy<Value = Knobs> {
    let rows = prop::sample::select(vec![RowLayout::PerShard, RowLayout::FlattenedTwoExchanges]);
    rows.prop_map(|rows| Knobs { rows, ..Knobs::PLAIN })
}

fn is_reduction(item: &WorkItem) -> bool {
    item.sink == Sink::ReduceRows
}

fn is_scattered(item: &WorkItem) -> bool {
    item.sink == Sink::Scatter
}

/// Signals of a source's scattered tiles on a pad: one each, or one of all.
fn signals(p: &TileProgram) -> u32 {
    let tiles = p.items.iter().filter(|item| is_scattered(item));
    if p.counters > 0 { 1 } else { tiles.count() as u32 }
}

proptest! {
    #[test]
    fn agreement(call in prop_oneof![gathering(), scattering()], rank: Index, kind in 0..2) {
        let mut call = call;
        let p = pick(&mut call, rank);
        if kind == 0 {
            p.rows = RowLayout::PerShard;
        } else {
            p.split_k_slots += 1;
        }
        assert_violates!(call, Violation::Disagreement { .. });
    }

    #[test]
    fn one_rank(call in knob_calls(AllGatherGemm, 1..=1, 1..=3, Just(Knobs::PLAIN))) {
        let mut call = call;
        call.0[0].rows = RowLayout::Flattened;
        assert_violates!(call, Violation::Header { what: "row mapping", .. });
    }

    #[test]
    fn two_exchanges_of_other_ops(
        call in prop_oneof![gathering(), knob_calls(GemmReduceScatter, 2..=6, 1..=3, flattened())],
    ) {
        let mut call = call;
        call.0.iter_mut().for_each(|p| p.rows = RowLayout::FlattenedTwoExchanges);
        assert_violates!(call, Violation::Header { what: "row mapping", .. });
    }

    #[test]
    fn ranks_that_share_nodes(
        call in prop_oneof![gathering(), scattering()],
        of_another_world: bool,
    ) {
        let mut call = call;
        let world = call.0[0].problem.world();
        let nodes = if of_another_world {
            Nodes::new(WorldSize::new(world.get() + 1).unwrap(), 1)
        } else {
            Nodes::new(world, 2).filter(|nodes| nodes.are_mixed())
        };
        let Some(nodes) = nodes else { return Ok(()) };
        call.0.iter_mut().for_each(|p| p.nodes = nodes);
        assert_violates!(call, Violation::Header { what: "nodes", .. });
    }

    #[test]
    fn bounds(call in scattering(), rank: Index, item: Index, kind in 0..5) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let (m, reduced) = (p.problem.m(), p.problem.y_rows(p.rank).len() as u32);
        let index = pick_item(&p.items, item, |item| {
            if kind < 2 { is_scattered(item) } else { is_reduction(item) }
        });
        let item = &mut p.items[index];
        let expected = match kind {
            0 => {
                item.row = m;
                "rows"
            }
            1 => {
                item.a_outer = 1;
                "a_outer"
            }
            2 => {
                item.row = reduced;
                "rows"
            }
            3 => {
                item.rows = reduced + 1;
                "rows"
            }
            _ => {
                item.k_steps = 1;
                "k_steps"
            }
        };
        assert_violates!(call, Violation::OutOfBounds { field, .. } if field == expected);
    }

    #[test]
    fn form_of_ag_gemm(call in gathering(), rank: Index, item: Index, kind in 0..4) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world().get();
        let index = pick_item(&p.items, item, |item| item.sink == Sink::Store);
        match kind {
            0 => p.items[index].a_source = RowSource::Caller,
            1 => p.items[index].sink = Sink::Scatter,
            2 => p.items[index].dest = (p.rank.get() + 1) % world,
            _ => p.transfers[0].place = (p.rank.get() + 1) % world,
        }
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn form_of_sums(call in scattering(), rank: Index, item: Index, kind in 0..6) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world().get();
        let index = pick_item(&p.items, item, |item| {
            if kind < 4 { is_scattered(item) } else { is_reduction(item) }
        });
        let item = &mut p.items[index];
        match kind {
            0 => item.sink = Sink::Store,
            1 => item.raise = NONE,
            2 => item.dest = (item.dest + 1) % world,
            3 => item.a_source = RowSource::Gather,
            4 => item.partials -= 1,
            _ => item.raise = if item.raise == NONE { 0 } else { NONE },
        }
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn cover(call in scattering(), rank: Index, item: Index, kind in 0..4) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, |item| {
            if kind < 2 { is_scattered(item) } else { is_reduction(item) }
        });
        let copy = p.items[index];
        if kind % 2 == 0 {
            p.items.remove(index);
        } else {
            p.items.insert(index, copy);
        }
        let wanted = if kind < 2 { Output::AllShards } else { Output::Reduced };
        match kind % 2 {
            0 => assert_violates!(call, Violation::NotCovered { output, .. } if output == wanted),
            _ => assert_violates!(call, Violation::CoveredTwice { output, .. } if output == wanted),
        }
    }

    #[test]
    fn signals_of_scattered_tiles(call in scattering(), rank: Index, item: Index, kind in 0..2) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, is_scattered);
        if kind == 0 {
            // All tiles of the chunk raise another source's signal.
            let (of_source, raise) = (signals(p), p.items[index].raise);
            let others = (raise + of_source) % (of_source * p.problem.world().get());
            p.items
                .iter_mut()
                .filter(|item| is_scattered(item) && item.raise == raise)
                .for_each(|item| item.raise = others);
            assert_violates!(call, Violation::RaisedTwice { .. });
        } else {
            let (rank, world) = (p.rank, p.problem.world());
            let entry = p
                .awaits
                .iter()
                .position(|entry| {
                    entry.signal / signals(p) == rank.get()
                        && entry.signal < signals(p) * world.get()
                })
                .unwrap();
            p.awaits[entry].peer = rank.after(1, world).get();
            assert_violates!(call, Violation::WrongPeer { raiser, .. } if raiser == rank);
        }
    }

    #[test]
    fn counters_of_scattered_tiles(call in scattering(), rank: Index, item: Index, kind in 0..3) {
        let mut call = call;
        let p = pick(&mut call, rank);
        prop_assume!(p.counters > 0);
        let index = pick_item(&p.items, item, is_scattered);
        match kind {
            0 => {
                // An uncounted item announces the chunk too early.
                (p.items[index].counter, p.items[index].raise_after) = (NONE, 1);
                assert_violates!(
                    call,
                    Violation::Miscounted { .. } | Violation::RaisedTwice { .. }
                );
            }
            1 => {
                p.items
                    .iter_mut()
                    .filter(|item| is_scattered(item))
                    .for_each(|item| item.raise_after -= 1);
                assert_violates!(call, Violation::Miscounted { items, raise_after, .. }
                    if raise_after + 1 == items);
            }
            _ => {
                p.items[index].counter = 1;
                assert_violates!(call, Violation::OutOfBounds { field: "counter", .. });
            }
        }
    }

    #[test]
    fn reductions_of_rows_that_are_not_awaited(
        call in scattering(),
        rank: Index,
        item: Index,
        last: bool,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let world = p.problem.world().get();
        let reductions: Vec<usize> =
            (0..p.items.len()).filter(|&index| is_reduction(&p.items[index])).collect();
        prop_assume!(reductions.len() > 1);
        let one = item.index(reductions.len());
        let (index, other) = (reductions[one], reductions[(one + 1) % reductions.len()]);
        let [this, that] = [p.items[index], p.items[other]]
            .map(|reduction| (reduction.late_first, reduction.late_count));
        if this == that {
            // The other reduction still awaits the entry that this one loses.
            p.items[index].late_first += u32::from(!last);
            p.items[index].late_count -= 1;
        } else {
            // They await each other's tile of this source.
            let entry = |(first, count): (u32, u32)| {
                (if last { first + count - 1 } else { first }) as usize
            };
            prop_assume!(p.awaits[entry(this)] != p.awaits[entry(that)]);
            p.awaits.swap(entry(this), entry(that));
        }
        let source = Rank::new(if last { world - 1 } else { 0 });
        assert_violates!(call, Violation::Unguarded { what: "scattered row", peer, .. }
            if peer == source);
    }

    #[test]
    fn reductions_before_tiles(call in scattering(), rank: Index) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let first = p.items.iter().position(is_reduction).unwrap();
        let computed = p.computed().len();
        p.items[..computed].rotate_left(first);
        assert_violates!(call, Violation::Form { what: "reductions come after all tiles", .. });
    }

    #[test]
    fn copies_of_own_rows(
        call in knob_calls(GemmAllReduce, 2..=6, 1..=3, two_exchanges()),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let own = p.problem.shard_rows(p.rank);
        let index = pick_item(&p.items, item, |item| item.sink == Sink::Copy);
        (p.items[index].row, p.items[index].rows) = (own.start, 1);
        let violation = verify_rank(p);
        prop_assert!(
            matches!(
                violation,
                Err(Violation::Form {
                    what: "a copy is of rows that peers have finished",
                    ..
                })
            ),
            "{violation:?}"
        );
    }

    #[test]
    fn destinations_of_transfers(
        call in knob_calls(AllGatherGemm, 3..=6, 1..=3, flattened()),
        rank: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        // The own place is filled at the step at which others fill theirs here.
        for transfer in &mut p.transfers {
            transfer.step = match transfer.step {
                0 => 1,
                1 => 0,
                step => step,
            };
        }
        let sender = p.rank;
        assert_violates!(call, Violation::SameDestination { step: 0..=1, first, second, .. }
            if first == sender || second == sender);
    }
}

/// No rank waits in a circle: each first reduction reads rows of the first tile.
#[test]
fn a_reduction_between_tiles() {
    let problem =
        Problem::new(GemmReduceScatter, 8, 32, 16, DType::Bf16, WorldSize::new(2).unwrap())
            .unwrap();
    let mut call = build(
        &problem,
        &Schedule { rows: RowLayout::Flattened, ..Schedule::of(TileShape::new(16, 16, 8)) },
    );
    for p in &mut call.0 {
        assert_eq!(p.items.iter().position(is_reduction), Some(2));
        p.items.swap(1, 2);
    }
    let rank = Rank::new(0);
    assert_eq!(
        verify(&call.0),
        Err(Violation::Form {
            rank,
            record: Record::Item(2),
            what: "reductions come after all tiles"
        })
    );
}
