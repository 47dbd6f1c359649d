//! Properties of every built program.

use crate::strategies::{Call, any_calls, build, calls, chunks, plain_calls};
use flux_core::machine::Machine;
use flux_core::plan::{Plan, Target};
use flux_core::program::{Chunk, NONE, Schedule, Sink, TileProgram, WorkItem, check};
use flux_core::{
    DType, Numerics, OpKind, Partials, Problem, Rank, Scales, TileShape, WorldSize, layout,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The shard whose rows an item computes.
fn shard_of(program: &TileProgram, item: &WorkItem) -> u32 {
    match program.problem.op() {
        OpKind::AllGatherGemm => item.out_outer,
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => item.dest,
    }
}

/// In every call a rank awaits a signal from each rank that it writes to in any call. So no rank
/// has to announce that a half is free (`flux_core::signal`).
pub(crate) fn assert_hears_from_all_that_it_writes_to(call: &Call) {
    for program in &call.0 {
        let (rank, nodes) = (program.rank, program.nodes);
        let reaches =
            |peer: Rank| nodes.together(peer, rank) || nodes.local_of(peer) == nodes.local_of(rank);
        let reached: BTreeSet<u32> = program
            .problem
            .world()
            .ranks()
            .filter(|&peer| peer != rank && reaches(peer))
            .map(Rank::get)
            .collect();
        let moved = program
            .transfers
            .iter()
            .chain(program.forwards.iter().map(|forward| &forward.to))
            .map(|transfer| transfer.dest);
        let sent =
            program.items.iter().filter(|item| item.sink == Sink::Send).map(|item| item.dest);
        let scattered =
            program.items.iter().flat_map(|item| program.signalled_ranks(item)).map(Rank::get);
        let written: BTreeSet<u32> =
            moved.chain(sent).chain(scattered).filter(|&to| to != rank.get()).collect();
        let heard: BTreeSet<u32> = program.awaits.iter().map(|entry| entry.peer).collect();
        assert!(
            written.is_subset(&reached) && reached.is_subset(&heard),
            "{written:?}, {heard:?}: {program}"
        );
    }
}

proptest! {
    #[test]
    fn every_rule_holds(call in any_calls(1..=16)) {
        if let Err(violation) = check::verify(&call.0) {
            prop_assert!(false, "{violation}");
        }
    }

    /// One rank at least uses every split-K slot, so none is held for nothing.
    #[test]
    fn some_rank_uses_all_split_k_slots(call in any_calls(1..=8)) {
        let parts = |program: &TileProgram| {
            program.items.iter().filter(|item| item.sink == Sink::Partial).count() as u32
        };
        prop_assert_eq!(call.0.iter().map(parts).max(), Some(call.0[0].split_k_slots));
    }

    #[test]
    fn every_rule_holds_of_plain_schedules(call in plain_calls(1..=16)) {
        if let Err(violation) = check::verify(&call.0) {
            prop_assert!(false, "{violation}");
        }
    }

    #[test]
    fn a_rank_hears_from_all_that_it_writes_to(call in any_calls(2..=16)) {
        assert_hears_from_all_that_it_writes_to(&call);
    }

    #[test]
    fn the_order_within_a_shard_is_the_same_on_every_rank_and_for_every_shard(
        call in plain_calls(1..=8),
    ) {
        let tiles = |p: &TileProgram, shard: u32| -> Vec<_> {
            p.computed()
                .iter()
                .filter(|item| shard_of(p, item) == shard)
                .map(|item| (item.row, item.col))
                .collect()
        };
        let first = tiles(&call.0[0], 0);
        for program in &call.0 {
            for shard in 0..program.problem.world().get() {
                prop_assert_eq!(&tiles(program, shard), &first);
            }
        }
    }

    #[test]
    fn shards_are_begun_in_the_order_in_which_they_are_sent(
        call in calls(OpKind::AllGatherGemm, 2..=8, 1..=4, 1..=3, chunks()),
    ) {
        for program in &call.0 {
            for transfer in &program.transfers {
                let reader = &call.0[transfer.dest as usize];
                let mut begun = Vec::new();
                for item in &reader.items {
                    if !begun.contains(&item.out_outer) {
                        begun.push(item.out_outer);
                    }
                }
                prop_assert_eq!(
                    begun[transfer.step as usize],
                    program.rank.get(),
                    "{:?}",
                    transfer
                );
            }
        }
    }

    #[test]
    fn what_an_own_tile_awaits_is_sent_a_shard_earlier(
        call in calls(OpKind::GemmReduceScatter, 2..=8, 1..=4, 1..=3, chunks()),
    ) {
        for program in &call.0 {
            let per_shard = program.items.len() / call.0.len();
            let own = program.items.len() - per_shard;
            for (index, item) in program.items.iter().enumerate() {
                prop_assert_eq!(index >= own, item.raise == NONE, "item {}", index);
            }
        }
    }
}

/// Shapes in groups of columns, which may not divide by the ranks, of 16-bit and of 8-bit operands
/// with each form of scales, and a number that selects a candidate.
fn problems() -> impl Strategy<Value = (Problem, usize)> {
    let ops = prop::sample::select(&OpKind::ALL[..]);
    let extents = (1_usize..=5600, 1_usize..=200, 1_usize..=300, 0_usize..8);
    let partials = prop::sample::select(vec![Partials::Output, Partials::F32]);
    let scaled = Scales::OF_QUANTIZED.map(|scales| Numerics::e4m3(scales, DType::Bf16));
    let numerics = prop_oneof![Just(DType::Bf16.into()), prop::sample::select(scaled.to_vec())];
    (ops, 2_u32..=8, extents, (partials, numerics), 0_usize..60).prop_map(
        |(op, world, (m, n, k, more), (partials, numerics), number)| {
            let (world, group) = (WorldSize::new(world).unwrap(), numerics.row_multiple() as usize);
            // As many elements of any type.
            let fewer = |groups: usize| groups.div_ceil(group / 8);
            let split = |groups| group * (fewer(groups) * world.index() + more % world.index());
            let whole = |groups| group * fewer(groups);
            let (n, k) = if op.reduces() { (whole(n), split(k)) } else { (split(n), whole(k)) };
            (Problem::new(op, m, n, k, numerics, world).unwrap().with_partials(partials), number)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_rule_holds_of_the_plans_that_the_model_ranks((problem, number) in problems()) {
        let target = Target::peer_memory(Machine::H100, &problem);
        let plans = Plan::ranked(&problem, &target);
        for plan in [plans[0], plans[number % plans.len()]] {
            let schedule = plan.schedule(&problem, &target);
            if let Err(violation) = check::verify(&build(&problem, &schedule).0) {
                prop_assert!(false, "{problem}, {schedule}: {violation}");
            }
        }
    }

    /// What peers write, the results and the split-K slots follow each other in a half, for either
    /// type of partial sums.
    #[test]
    fn partial_sums_results_and_split_k_slots_do_not_overlap((problem, number) in problems()) {
        let target = Target::peer_memory(Machine::H100, &problem);
        let plans = Plan::candidates(&problem, &target);
        let schedule = plans[number % plans.len()].schedule(&problem, &target);
        let program = TileProgram::build(&problem, Rank::new(0), &schedule).unwrap();
        let (world, peers) = (u64::from(problem.world().get()), u64::from(problem.world().peers()));
        let element = problem.numerics().partial_bytes() as u64;
        let places = match (problem.op(), program.rows.is_flattened()) {
            (OpKind::AllGatherGemm, _) => peers * layout::gather_place_bytes(&problem),
            (_, true) => {
                let rows = if program.rows.has_two_exchanges() {
                    problem.m_shard()
                } else {
                    problem.most_y_rows()
                };
                world * u64::from(rows) * u64::from(problem.n()) * element
            }
            (_, false) => {
                let rows = program.tile.m.min(problem.m_shard());
                let slot = layout::slot_bytes(&problem, program.tile);
                prop_assert!(
                    u64::from(rows) * u64::from(program.tile.n) * element <= slot,
                    "{}",
                    program
                );
                peers * u64::from(program.slots_per_source) * slot
            }
        };
        let mut end = places;
        if problem.op() == OpKind::GemmAllReduce
            && (program.rows.has_two_exchanges() || !program.rows.is_flattened())
        {
            prop_assert!(end <= program.results_offset());
            let results =
                u64::from(problem.m()) * u64::from(problem.n()) * problem.numerics().output.bytes() as u64;
            end = program.results_offset() + results;
        }
        prop_assert!(end <= program.split_k_offset());
        if program.split_k_slots > 0 {
            end = program.split_k_offset()
                + u64::from(program.split_k_slots) * layout::split_k_slot_bytes(program.tile);
        }
        prop_assert!(end <= program.workspace().half_bytes, "{} of {:?}", end, program.workspace());
    }
}

/// Reference shapes, and shapes with partial tiles.
#[test]
fn the_reference_shapes_satisfy_every_rule_with_the_models_plan() {
    for world in [1, 2, 3, 5, 6, 7, 8, 16] {
        let world = WorldSize::new(world).unwrap();
        for m in [3, 64, 517, 8191] {
            for op in OpKind::ALL {
                let even = 6144 * world.index();
                for split in [even, even - 8] {
                    let (n, k) = if op.reduces() { (12296, split) } else { (split, 12288) };
                    let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
                    let target = Target::peer_memory(Machine::H100, &problem);
                    let call = build(
                        &problem,
                        &Plan::ranked(&problem, &target)[0].schedule(&problem, &target),
                    );
                    assert_eq!(check::verify(&call.0), Ok(()), "{problem}");
                }
            }
        }
    }
}

#[test]
fn a_program_prints_what_it_awaits_sends_and_raises() {
    let world = WorldSize::new(2).unwrap();
    let schedule = Schedule { chunk: Chunk::Tiles(2), ..Schedule::of(TileShape::new(64, 16, 64)) };
    let rs = Problem::new(OpKind::GemmReduceScatter, 2 * 65, 8, 16, DType::F16, world).unwrap();
    let text = "rank 0 of gemm_rs m=130 n=8 k=16 fp16 tp=2, tile 64x16x64: 4 items, 0 transfers, 1 signals, 1 counters, 2 slots per source
  item    0: [0..64, 0..8] of x shard 1 -> rank 1 slot 0 raise 0 after 2 in counter 0
  item    1: [64..65, 0..8] of x shard 1 -> rank 1 slot 1 raise 0 after 2 in counter 0
  item    2: [0..64, 0..8] of x shard 0 await 0@1 + 1 partials from slot 0 -> y
  item    3: [64..65, 0..8] of x shard 0 await 0@1 + 1 partials from slot 1 -> y
";
    assert_eq!(build(&rs, &schedule).0[0].to_string(), text);
    let ag = Problem::new(OpKind::AllGatherGemm, 2 * 64, 16, 8, DType::F16, world).unwrap();
    let text = "rank 1 of ag_gemm m=128 n=16 k=8 fp16 tp=2, tile 64x16x64: 2 items, 1 transfers, 1 signals, 0 counters, 0 slots per source
  item    0: [0..64, 0..8] of x shard 0 -> y shard 1
  item    1: [0..64, 0..8] of gather place 0 await 0@0 -> y shard 0
  move    0: step 1 rows 0..64 -> rank 0 place 0 raise 0
";
    assert_eq!(build(&ag, &schedule).0[1].to_string(), text);
}
