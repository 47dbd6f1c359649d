//! What is in effect of a schedule.

use crate::schedules::{self, chunks};
use flux_core::OpKind::{AllGatherGemm, GemmReduceScatter};
use flux_core::program::{Chunk, Lent, Schedule, TileProgram};
use flux_core::tile::Raster;
use flux_core::{DType, Nodes, OpKind, Problem, TileShape, WorldSize};
use proptest::prelude::*;

const TILE: TileShape = TileShape::new(16, 16, 8);

/// From `least` on, and as often far beyond all that there is.
fn numbers(least: u32) -> impl Strategy<Value = u32> {
    prop_oneof![4 => least..=6, 1 => Just(u32::MAX)]
}

/// One tile, which is all that means something for every problem.
fn schedules() -> impl Strategy<Value = Schedule> {
    let chunks = prop_oneof![4 => chunks(), 1 => Just(Chunk::Tiles(u32::MAX))];
    schedules::schedules(Just(TILE), chunks, numbers)
}

fn problem(op: OpKind, world: WorldSize, m_shard: usize, n8: usize, k8: usize) -> Problem {
    let (n, k) = if op == AllGatherGemm { (8 * n8 * world.index(), 8 * k8) } else { (8 * n8, 8 * k8 * world.index()) };
    Problem::new(op, m_shard * world.index(), n, k, DType::Bf16, world).unwrap()
}

fn problems() -> impl Strategy<Value = (Problem, Nodes)> {
    let op = prop::sample::select(vec![AllGatherGemm, GemmReduceScatter]);
    let ranks = prop_oneof![2 => (Just(1), 1..=6_u32), 1 => (1..=3_u32, 1..=3_u32)];
    (op, ranks, 1..=70_usize, 1..=5_usize, 1..=24_usize).prop_map(|(op, (count, per_node), m_shard, n8, k8)| {
        let world = WorldSize::new(count * per_node).unwrap();
        (problem(op, world, m_shard, n8, k8), Nodes::new(world, count).unwrap())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn programs_are_those_of_what_is_in_effect((problem, nodes) in problems(), schedule in schedules()) {
        let ran = schedule.in_effect(&problem, nodes);
        prop_assert_eq!(ran.in_effect(&problem, nodes), ran, "twice");
        for rank in problem.world().ranks() {
            // What is refused for what it says is not refused for less, so there is nothing to
            // compare.
            let Ok(program) = TileProgram::build_across(&problem, rank, &schedule, nodes) else { continue };
            prop_assert_eq!(TileProgram::build_across(&problem, rank, &ran, nodes), Ok(program), "{}", ran);
        }
    }
}

/// Each knob alone, with what it comes to.
fn assert_comes_to(problem: &Problem, asked_and_ran: &[(Schedule, Schedule)]) {
    for &(asked, ran) in asked_and_ran {
        assert_eq!(asked.in_effect(problem, Nodes::apart(problem.world())), ran, "{problem}, {asked}");
    }
}

#[test]
fn what_there_is_no_more_of_is_told_as_much_as_there_is() {
    let plain = Schedule::of(TILE);
    // 3 row blocks by 2 column blocks of a shard, 20 steps along k.
    let of = |op| problem(op, WorldSize::new(4).unwrap(), 48, 4, 20);
    let both = [
        (Schedule { splits: u32::MAX, ..plain }, Schedule { splits: 20, ..plain }),
        (Schedule { chunk: Chunk::Tiles(6), ..plain }, plain),
        (Schedule { raster: Raster::RowGroups(9), ..plain }, Schedule { raster: Raster::RowGroups(3), ..plain }),
    ];
    assert_comes_to(&of(AllGatherGemm), &both);
    assert_comes_to(&of(GemmReduceScatter), &both);
    assert_comes_to(
        &of(AllGatherGemm),
        &[
            (Schedule { early: 3, ..plain }, plain),
            (Schedule { k_slices: 9, ..plain }, Schedule { k_slices: 7, ..plain }),
            (Schedule { band: 9, ..plain }, Schedule { band: 4, ..plain }),
            (Schedule { band: 9, alone: 1, ..plain }, Schedule { band: 3, alone: 1, ..plain }),
            (Schedule { alone: 2, ..plain }, plain),
            (Schedule { band: 2, alone: 3, ..plain }, plain),
            (Schedule { by_chunk: 9, ..plain }, Schedule { by_chunk: 3, ..plain }),
            (Schedule { by_chunk: 2, band: 4, ..plain }, Schedule { band: 4, ..plain }),
            (Schedule { by_chunk: 3, band: 3, alone: 1, ..plain }, Schedule { by_chunk: 1, band: 3, alone: 1, ..plain }),
            (Schedule { by_chunk: 3, band: 3, alone: 1, k_slices: 2, ..plain }, Schedule { band: 3, alone: 1, k_slices: 2, ..plain }),
            (Schedule { lent: Lent { first: 2, last: 3 }, ..plain }, Schedule { lent: Lent { first: 0, last: 3 }, ..plain }),
            (Schedule { shares: 24, ..plain }, plain),
        ],
    );
    assert_comes_to(
        &of(GemmReduceScatter),
        &[
            (Schedule { alone: 2, by_chunk: 2, k_slices: 2, ..plain }, plain),
            (Schedule { band: 9, ..plain }, Schedule { band: 3, ..plain }),
            (Schedule { early: 9, ..plain }, Schedule { early: 2, ..plain }),
            (Schedule { early: 9, splits: 2, ..plain }, Schedule { splits: 2, ..plain }),
            (Schedule { lent: Lent { first: 2, last: 3 }, ..plain }, Schedule { lent: Lent { first: 2, last: 3 }, ..plain }),
            (Schedule { stack: true, chunk: Chunk::Tiles(3), ..plain }, Schedule { stack: true, chunk: Chunk::Tiles(1), ..plain }),
        ],
    );
    let alone = problem(GemmReduceScatter, WorldSize::new(1).unwrap(), 48, 4, 20);
    let lent = Lent { first: 1, last: 1 };
    assert_comes_to(&alone, &[(Schedule { stack: true, band: 2, chunk: Chunk::Tiles(1), early: 1, lent, ..plain }, plain)]);
}

#[test]
fn what_cannot_be_built_stays_as_it_is() {
    let world = WorldSize::new(2).unwrap();
    let problem = problem(AllGatherGemm, world, 48, 4, 20);
    let zero = Schedule { splits: 0, early: 9, ..Schedule::of(TILE) };
    assert_eq!(zero.in_effect(&problem, Nodes::apart(world)), zero);
    let fine = Schedule { early: 9, ..Schedule::of(TILE) };
    assert_eq!(fine.in_effect(&problem, Nodes::of_all(WorldSize::new(4).unwrap())), fine, "of another world");
}
