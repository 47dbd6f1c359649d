//! Programs of ranks in several nodes.

use crate::mutations::{assert_violates, pick, pick_item};
use crate::properties::assert_hears_from_all_that_it_writes_to;
use crate::strategies::{Call, chunks};
use flux_core::OpKind::{AllGatherGemm, GemmReduceScatter};
use flux_core::layout::RowLayout;
use flux_core::program::check::{Violation, verify};
use flux_core::program::{Schedule, ScheduleError, Sink, TileProgram};
use flux_core::{DType, Nodes, OpKind, Problem, Rank, TileShape, WorldSize};
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Calls of `op` on `counts` nodes of `per_node` ranks each, with shards of several tiles.
fn across(
    op: OpKind,
    counts: RangeInclusive<u32>,
    per_node: RangeInclusive<u32>,
) -> BoxedStrategy<Call> {
    let raster_group =
        (1..=6_u32).prop_flat_map(|group| prop::sample::select(vec![1, group, u32::MAX]));
    let cut = (chunks(), raster_group, (1..=5_u32, 0..=3_u32, 0..=3_u32), 1..=3_u32, 1..=3_u32);
    (counts, per_node, 1..=40_usize, (1..=5_usize, 1..=4_usize, 0..16_usize), cut)
        .prop_map(
            move |(
                count,
                per_node,
                rows,
                (n8, k8, more),
                (chunk, raster_group, (group, prologue, chunk_ordered), k_slices, split_k),
            )| {
                let world = WorldSize::new(count * per_node).unwrap();
                let split = |groups| 8 * (groups * world.index() + more % world.index());
                let (n, k) =
                    if op == AllGatherGemm { (split(n8), 8 * k8) } else { (8 * n8, split(k8)) };
                let problem =
                    Problem::new(op, rows * world.index(), n, k, DType::Bf16, world).unwrap();
                let schedule = Schedule {
                    chunk,
                    raster_group,
                    group,
                    prologue,
                    chunk_ordered,
                    k_slices,
                    split_k,
                    ..Schedule::of(TileShape::new(16, 16, 8))
                };
                build(&problem, &schedule, count)
            },
        )
        .boxed()
}

fn build(problem: &Problem, schedule: &Schedule, count: u32) -> Call {
    let nodes = Nodes::new(problem.world(), count).unwrap();
    Call(
        problem
            .world()
            .ranks()
            .map(|rank| TileProgram::build_across(problem, rank, schedule, nodes).unwrap())
            .collect(),
    )
}

fn any_across() -> BoxedStrategy<Call> {
    prop_oneof![across(AllGatherGemm, 1..=4, 1..=4), across(GemmReduceScatter, 1..=4, 1..=4)]
        .boxed()
}

/// Amount that crosses nodes in a call: elements of x, or partial tiles.
fn crossing(call: &Call, nodes: Nodes) -> u64 {
    let crosses = |from: Rank, to: u32| !nodes.together(from, Rank::new(to));
    let of = |p: &TileProgram| {
        let moved = p.transfers.iter().chain(p.forwards.iter().map(|forward| &forward.to));
        let rows: u64 = moved
            .filter(|t| crosses(p.rank, t.dest))
            .map(|t| u64::from(t.rows) * u64::from(t.cols))
            .sum();
        rows + p
            .items
            .iter()
            .filter(|item| item.sink == Sink::Send && crosses(p.rank, item.dest))
            .count() as u64
    };
    call.0.iter().map(of).sum()
}

proptest! {
    #[test]
    fn every_rule_holds_across_nodes(call in any_across()) {
        if let Err(violation) = verify(&call.0) {
            prop_assert!(false, "{violation}");
        }
    }

    #[test]
    fn a_rank_hears_from_all_that_it_writes_to_across_nodes(call in any_across()) {
        assert_hears_from_all_that_it_writes_to(&call);
    }

    #[test]
    fn what_crosses_nodes_does_so_once_for_all_ranks_of_a_node(
        call in any_across(),
        knob in 1..=3_u32,
    ) {
        let (problem, nodes) = (call.0[0].problem, call.0[0].nodes);
        let schedule = Schedule { group: knob, ..Schedule::of(call.0[0].tile) };
        let count = |count| crossing(&build(&problem, &schedule, count), nodes);
        prop_assert_eq!(
            count(nodes.count()) * u64::from(nodes.per_node()),
            count(problem.world().get())
        );
    }

    #[test]
    fn nodes_that_make_no_difference_make_none(call in any_across()) {
        let problem = call.0[0].problem;
        let schedule = Schedule::of(call.0[0].tile);
        let of = |count| build(&problem, &schedule, count).0;
        for (apart, together) in of(problem.world().get()).into_iter().zip(of(1)) {
            prop_assert_eq!(TileProgram { nodes: apart.nodes, ..together }, apart);
        }
    }

    #[test]
    fn forwards_of_other_rows(
        call in across(AllGatherGemm, 2..=3, 2..=3),
        rank: Index,
        which: Index,
        kind in 0..5,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let which = which.index(p.forwards.len());
        let (world, signals) = (p.problem.world(), p.signals);
        let node_peer = p.nodes.node_peers(p.rank).next().unwrap();
        let forward = &mut p.forwards[which];
        match kind {
            0 => {
                forward.awaits.signal = (forward.awaits.signal + 1) % signals;
                assert_violates!(call, Violation::UnguardedForward { .. });
            }
            1 => {
                // A place that intra-node peers fill.
                forward.from = node_peer.place_at(p.rank).unwrap();
                assert_violates!(call, Violation::Form { .. });
            }
            2 => {
                forward.to.dest = p.nodes.rail(p.rank).next().unwrap().get();
                assert_violates!(call, Violation::Form { .. });
            }
            3 => {
                forward.from = world.peers();
                assert_violates!(call, Violation::OutOfBounds { field: "from", .. });
            }
            _ => {
                p.forwards.remove(which);
                assert_violates!(call, Violation::NeverRaised { .. });
            }
        }
    }

    #[test]
    fn rows_that_leave_their_rail(
        call in across(AllGatherGemm, 2..=3, 2..=3),
        rank: Index,
        which: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let crossing: Vec<usize> = (0..p.transfers.len())
            .filter(|&i| !p.nodes.together(p.rank, Rank::new(p.transfers[i].dest)))
            .collect();
        let transfer = &mut p.transfers[*which.get(&crossing)];
        let dest = p.nodes.node_peers(Rank::new(transfer.dest)).next().unwrap();
        (transfer.dest, transfer.place) = (dest.get(), p.rank.place_at(dest).unwrap());
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn sums_that_are_not_a_nodes(
        call in across(GemmReduceScatter, 2..=3, 2..=3),
        rank: Index,
        which: Index,
        kind in 0..5,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let tiles = p.slots_per_source;
        let index = pick_item(&p.items, which, |item| item.sink == Sink::Send && item.partials > 0);
        let item = &mut p.items[index];
        let owner = Rank::new(item.a_outer);
        match kind {
            0 => {
                item.partials -= 1;
                assert_violates!(call, Violation::Form { .. });
            }
            1 => {
                item.dest = p.nodes.node_peers(owner).next().unwrap().get();
                assert_violates!(call, Violation::Form { .. });
            }
            2 => {
                item.partial_slot = p.problem.world().peers() * tiles;
                assert_violates!(call, Violation::OutOfBounds { field: "partial_slot", .. });
            }
            3 => {
                // Slots for the own shard.
                item.partial_slot %= tiles;
                assert_violates!(call, Violation::WrongPartial { .. });
            }
            _ => {
                item.late_count = 0;
                // If another item awaits the same chunk, the missing await is found later.
                assert_violates!(
                    call,
                    Violation::Unguarded { .. } | Violation::NeverAwaited { .. }
                );
            }
        }
    }

    /// A partial tile bypasses the relay.
    #[test]
    fn partial_tiles_that_skip_the_relay(
        call in across(GemmReduceScatter, 2..=3, 2..=3),
        rank: Index,
        which: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let (rank, nodes) = (p.rank, p.nodes);
        let index = pick_item(&p.items, which, |item| {
            item.sink == Sink::Send && !nodes.together(rank, Rank::new(item.a_outer))
        });
        p.items[index].dest =
            nodes.node_peers(Rank::new(p.items[index].dest)).next().unwrap().get();
        assert_violates!(call, Violation::Form { .. });
    }

    /// Sums are begun in the order of the rails, so no link waits for a later node's.
    #[test]
    fn nodes_are_worked_for_one_after_another(call in across(GemmReduceScatter, 2..=4, 1..=4)) {
        for p in &call.0 {
            let mut steps = BTreeMap::new();
            for (index, item) in
                p.items.iter().enumerate().filter(|(_, item)| item.sink != Sink::Partial)
            {
                steps.entry(p.nodes.node_of(Rank::new(item.a_outer))).or_insert((index, index)).1 =
                    index;
            }
            let distance = |node: u32| {
                (node + p.nodes.count() - p.nodes.node_of(p.rank) - 1) % p.nodes.count()
            };
            let mut order: Vec<_> = steps
                .into_iter()
                .map(|(node, (first, last))| (distance(node), first, last))
                .collect();
            order.sort_unstable();
            prop_assert!(
                p.nodes.per_node() == 1 || order.windows(2).all(|pair| pair[0].2 < pair[1].1),
                "{:?}",
                order
            );
        }
    }
}

#[test]
fn nodes_of_another_world_and_flattened_rows_are_refused() {
    let world = WorldSize::new(4).unwrap();
    let problem = Problem::new(AllGatherGemm, 64, 64, 64, DType::Bf16, world).unwrap();
    let schedule = Schedule::of(TileShape::new(16, 16, 16));
    let other = Nodes::new(WorldSize::new(8).unwrap(), 2).unwrap();
    let build = |schedule: &Schedule, nodes| {
        TileProgram::build_across(&problem, Rank::new(0), schedule, nodes)
    };
    assert_eq!(
        build(&schedule, other),
        Err(ScheduleError::OtherWorld { nodes: WorldSize::new(8).unwrap(), world })
    );
    let flattened = Schedule { rows: RowLayout::Flattened, ..schedule };
    let nodes = Nodes::new(world, 2).unwrap();
    assert_eq!(build(&flattened, nodes), Err(ScheduleError::FlattenedNodes { nodes }));
    assert!(build(&flattened, Nodes::apart(world)).is_ok());
}

/// Across nodes all partial tiles are added after the multiplication, whatever the schedule says.
#[test]
fn no_partial_tile_is_added_in_the_mainloop_across_nodes() {
    let problem =
        Problem::new(GemmReduceScatter, 64, 64, 4 * 1024, DType::Bf16, WorldSize::new(4).unwrap())
            .unwrap();
    let schedule = Schedule { in_mainloop: 2, ..Schedule::of(TileShape::new(16, 16, 8)) };
    let in_mainloop = |count| {
        build(&problem, &schedule, count).0.iter().map(|p| p.in_mainloop).collect::<Vec<_>>()
    };
    assert_eq!(
        [in_mainloop(2), in_mainloop(4), in_mainloop(1)],
        [vec![0; 4], vec![2; 4], vec![2; 4]]
    );
}
