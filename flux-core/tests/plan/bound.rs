//! One plan for many `m`: what is reserved for the largest covers all.

use flux_core::machine::Machine;
use flux_core::plan::{Chunk, KSplit, Links, Plan, RowMapping, Target};
use flux_core::program::{Channels, TileProgram};
use flux_core::{DType, Nodes, OpKind, Problem, Rank, TileShape, WorldSize};
use proptest::prelude::*;
use proptest::sample::Index;

fn plans() -> impl Strategy<Value = Plan> {
    let tile = (1_u32..5, 1_u32..5).prop_map(|(m, n)| TileShape::new(8 * m, 8 * n, 8));
    let named = prop_oneof![
        Just(TileShape::new(128, 256, 64)),
        Just(TileShape::new(64, 128, 64)),
        Just(TileShape::new(256, 128, 64))
    ];
    let rows = prop_oneof![
        Just(RowMapping::Flattened),
        Just(RowMapping::FlattenedTwoExchanges),
        (1_u32..5).prop_map(|group| RowMapping::PerShard { group })
    ];
    let k = prop_oneof![
        Just(KSplit::Whole),
        Just(KSplit::StreamK),
        (2_u32..5).prop_map(KSplit::SplitK)
    ];
    let chunk = prop_oneof![Just(Chunk::Shard), (1_u32..7).prop_map(Chunk::Tiles)];
    (prop_oneof![tile, named], rows, k, chunk, 1_u32..5).prop_map(
        |(tile, rows, k, chunk, k_slices)| Plan { rows, k, chunk, k_slices, ..Plan::of(tile) },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_bound_of_the_largest_m_holds_for_every_smaller_one(
        op in prop::sample::select(&OpKind::ALL[..]),
        plan in plans(),
        world in 1_u32..=6,
        most in 1_usize..360,
        n in 1_usize..40,
        k in 1_usize..40,
        more in 0_usize..6,
        workers in 1_u32..40,
        links in 0..3,
        paired: bool,
        fewer in prop::collection::vec(any::<Index>(), 6),
        rank: Index,
    ) {
        let (ranks, size) = (world as usize, WorldSize::new(world).unwrap());
        let split = |groups| 8 * (groups * ranks + more % ranks);
        let problem =
            |m: usize| Problem::new(op, m, split(n), split(k), DType::Bf16, size).unwrap();
        let largest = problem(most);
        let machine = Machine { multiprocessors: workers, ..Machine::H100 };
        let channels = Channels {
            all: 16,
            each: 4,
            part_bytes: 4 << 20,
            least_bytes: 4 << 20,
            network: false,
        };
        let peers = Target::peer_memory(machine, &largest);
        let mixed = Nodes::new(size, 2).filter(|_| {
            paired && links == 0 && !plan.is_flattened() && op != OpKind::GemmAllReduce
        });
        let target = match links {
            0 => Target { nodes: mixed.unwrap_or(peers.nodes), ..peers },
            1 => Target { links: Links::HostStaged, ..peers },
            _ => Target { links: Links::Messages(channels), ..peers },
        };
        let rank = Rank::new(rank.index(ranks) as u32);
        let build = |problem: &Problem| {
            let schedule = plan.canonical(problem, &target).schedule(problem, &target);
            TileProgram::build_across(problem, rank, &schedule, target.nodes).unwrap()
        };
        let bound = plan.bound(&build(&largest), &target);
        for fewer in fewer {
            let program = build(&problem(1 + fewer.index(most)));
            let (size, items) = (program.workspace(), program.items.len());
            prop_assert_eq!(
                size.max(bound.workspace),
                bound.workspace,
                "{} by {}",
                program.problem,
                plan
            );
            prop_assert!(
                items <= bound.items,
                "{items} items of {} by {plan}, bound {}",
                program.problem,
                bound.items
            );
        }
    }
}
