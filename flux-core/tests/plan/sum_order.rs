//! Plans of batch-invariant ops, and the order of sums in their programs, for every `m`.

use flux_core::machine::Machine;
use flux_core::plan::{
    CommMode, Links, Plan, PlanKey, PlanOrigin, PlanRow, PlanTable, SumOrder, TableKind, Target,
    bucket_ends, choose,
};
use flux_core::program::{Channels, Sink, TileProgram};
use flux_core::tile::Generation;
use flux_core::{DType, Nodes, OpKind, Problem, WorldSize};
use proptest::prelude::*;

const MOST: u32 = 4096;

fn targets(problem: &Problem, generation: Generation) -> [Target; 3] {
    let peers = Target {
        batch_invariant: true,
        ..Target::peer_memory(Machine::H100.running(generation), problem)
    };
    let channels =
        Channels { all: 16, each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20, network: false };
    [
        peers,
        Target { links: Links::HostStaged, ..peers },
        Target { links: Links::Messages(channels), ..peers },
    ]
}

fn key(problem: &Problem, target: &Target, batch_invariant: bool) -> PlanKey {
    let key =
        PlanKey::new(problem, "NVIDIA H100 80GB HBM3", target.machine.generation, "any", "nvlink");
    PlanKey { batch_invariant, ..key }
}

/// Fails where a program adds up an element in any order but that of `k` on each rank, then that of
/// the ranks.
fn assert_fixed(program: &TileProgram) {
    let (problem, peers) = (&program.problem, program.problem.world().peers());
    let steps = problem.k_local(program.rank).div_ceil(program.tile.k);
    assert_eq!((program.split_k_slots, program.in_mainloop), (0, 0), "{problem}");
    for item in program.computed() {
        if item.sink == Sink::ReduceRows {
            let sources: Vec<u32> = program.late_awaits_of(item).iter().map(|a| a.peer).collect();
            assert_eq!(
                item.partials,
                peers + 1,
                "{problem}: every rank's sum, the own one among them"
            );
            assert!(sources.is_sorted(), "{problem}: {sources:?}");
            continue;
        }
        assert_eq!(
            (item.k_first, item.k_steps, item.parts, item.partials),
            (0, steps, 0, 0),
            "{problem}"
        );
        let adds_ranks = problem.op().reduces() && peers > 0;
        assert_eq!(item.sink, if adds_ranks { Sink::Scatter } else { Sink::Store }, "{problem}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The plans of all buckets have one order, as have their programs for any `m` of the bucket.
    #[test]
    fn every_bucket_of_a_batch_invariant_op_has_one_order(
        op in prop::sample::select(&OpKind::ALL[..]),
        generation in prop::sample::select(&Generation::ALL[..]),
        world in 1_u32..=8,
        n in 1_usize..120,
        k in 1_usize..120,
        more in 0_usize..8,
        shares in prop::collection::vec(0_u32..1000, 64),
    ) {
        let world = WorldSize::new(world).unwrap();
        // The first ranks may have a group of 8 more.
        let split = |groups| 8 * (groups * world.index() + more % world.index());
        let largest =
            Problem::new(op, MOST as usize, split(n), split(k), DType::Bf16, world).unwrap();
        for target in targets(&largest, generation) {
            let key = key(&largest, &target, true);
            let mut first = 1;
            for (last, share) in bucket_ends(MOST, &key, &[]).into_iter().zip(shares.iter().cycle())
            {
                let problem = largest.with_m(last).unwrap();
                let (plan, _) = choose(&problem, &target, &key, &[]).expect("a plan");
                for m in [first, first + (last - first) * share / 1000, last] {
                    let problem = largest.with_m(m).unwrap();
                    prop_assert_eq!(
                        plan.sum_order(&problem, &target),
                        SumOrder::Fixed,
                        "{}: {}",
                        problem,
                        plan
                    );
                    let canonical = plan.canonical(&problem, &target);
                    // A sequential AllGather-GEMM multiplies as one rank does.
                    if canonical.comm == CommMode::Sequential {
                        prop_assert_eq!(op, OpKind::AllGatherGemm);
                        continue;
                    }
                    for rank in world.ranks() {
                        assert_fixed(
                            &TileProgram::build(
                                &problem,
                                rank,
                                &canonical.schedule(&problem, &target),
                            )
                            .unwrap(),
                        );
                    }
                }
                first = last + 1;
            }
        }
    }

    /// What is fixed for one `m` is so for every other, in whatever form the plan was named.
    #[test]
    fn the_order_of_sums_does_not_depend_on_m(
        op in prop::sample::select(&OpKind::ALL[..]),
        world in 1_u32..=8,
        ms in [1..=MOST, 1..=MOST],
        tile in prop::sample::select(vec!["128x128x64", "64x256x64", "136x256x64"]),
        rows in prop::sample::select(vec!["per-shard:1", "per-shard:9", "flattened", "flattened:2"]),
        k in prop::sample::select(vec!["whole", "stream-k", "split-k:2"]),
        comm in prop::sample::select(vec!["fused:kernel", "fused:copy-engine", "overlapped:2", "sequential"]),
    ) {
        let plan: Plan = format!("tile={tile} rows={rows} k={k} comm={comm}").parse().unwrap();
        let world = WorldSize::new(world).unwrap();
        let problem = |m| {
            Problem::new(op, m as usize, 256 * world.index(), 64 * world.index(), DType::F16, world)
                .unwrap()
        };
        for target in targets(&problem(1), Generation::Hopper) {
            let [a, b] = ms.map(|m| plan.sum_order(&problem(m), &target));
            prop_assert_eq!(a, b, "{}", plan);
        }
    }
}

fn llama(op: OpKind) -> Problem {
    Problem::new(op, 2048, 8192, 28672, DType::F16, WorldSize::new(4).unwrap()).unwrap()
}

#[test]
fn what_breaks_the_order_is_named() {
    let order = |op, links: usize, text: &str| {
        let problem = llama(op);
        text.parse::<Plan>()
            .unwrap()
            .sum_order(&problem, &targets(&problem, Generation::Hopper)[links])
    };
    let [ag, rs, ar] = OpKind::ALL;
    assert_eq!(order(ag, 0, "tile=256x192x64 rows=per-shard:4 k-slices=4"), SumOrder::Fixed);
    assert_eq!(order(ag, 0, "tile=256x192x64 k=stream-k"), SumOrder::PartsOfK);
    assert_eq!(order(ag, 2, "tile=128x128x64 comm=sequential"), SumOrder::Fixed);
    assert_eq!(order(rs, 2, "tile=128x128x64 rows=flattened comm=sequential"), SumOrder::Library);
    assert_eq!(order(rs, 2, "tile=128x128x64 rows=flattened comm=overlapped:3"), SumOrder::Fixed);
    assert_eq!(order(rs, 0, "tile=128x128x64"), SumOrder::ByOwner);
    // The library's collective stands in for it.
    assert_eq!(order(ar, 2, "tile=128x128x64 rows=flattened"), SumOrder::Library);
    assert_eq!(order(ar, 2, "tile=128x128x64 rows=flattened comm=overlapped:3"), SumOrder::Fixed);
}

/// Other nodes' sums are rounded at relays, so no plan has the order.
#[test]
fn sums_across_nodes_have_no_plan() {
    let problem = llama(OpKind::GemmReduceScatter);
    let [peers, ..] = targets(&problem, Generation::Hopper);
    let target = Target { nodes: Nodes::new(problem.world(), 2).unwrap(), ..peers };
    assert_eq!(Plan::candidates(&problem, &target), []);
    assert!(!Plan::candidates(&problem, &Target { batch_invariant: false, ..target }).is_empty());
}

#[test]
fn rows_that_break_the_order_serve_other_ops_and_rows_for_it_serve_no_others() {
    let problem = llama(OpKind::GemmReduceScatter);
    let [target, ..] = targets(&problem, Generation::Hopper);
    let any = Target { batch_invariant: false, ..target };
    let [of_any, of_invariant] = [false, true].map(|invariant| key(&problem, &target, invariant));
    let row = |key: &PlanKey, text: &str| PlanRow {
        key: key.clone(),
        m: problem.m(),
        plan: text.parse().unwrap(),
        us: 1.0,
    };
    let plans = [
        "tile=128x256x64 rows=per-shard:1 k=whole chunk=1",
        "tile=256x128x64 rows=flattened k=whole chunk=1",
    ];
    let [by_owner, fixed] = plans.map(|text| text.parse::<Plan>().unwrap());
    let user = TableKind::User;
    let chosen = |target: &Target, key: &PlanKey, table: &PlanTable| {
        choose(&problem, target, key, &[(user, table)]).unwrap()
    };

    let mut table = PlanTable::default();
    table.set(row(&of_any, plans[0]));
    assert_eq!(chosen(&any, &of_any, &table), (by_owner, PlanOrigin::Table(user)));
    assert_eq!(chosen(&target, &of_invariant, &table).1, PlanOrigin::Model);
    table.set(row(&of_invariant, plans[1]));
    let table = PlanTable::parse(&table.to_string()).unwrap();
    assert_eq!(table.rows().len(), 2);
    assert_eq!(chosen(&any, &of_any, &table), (by_owner, PlanOrigin::Table(user)));
    assert_eq!(chosen(&target, &of_invariant, &table), (fixed, PlanOrigin::Table(user)));
    // A row of any op whose plan has the order.
    let mut table = PlanTable::default();
    table.set(row(&of_any, plans[1]));
    assert_eq!(chosen(&target, &of_invariant, &table), (fixed, PlanOrigin::Table(user)));
}
