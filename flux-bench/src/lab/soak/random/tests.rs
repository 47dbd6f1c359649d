use super::*;
use crate::harness::EpilogueSpec;
use flux_core::program::{Channels, Schedule, Sending, TileProgram};
use flux_core::{Nodes, OpKind, Rank, WorldSize};
use flux_kernels::Variant;
use flux_ops::Activation;

const TARGETS: [Target; 3] = [Target::Host, Target::Gpu { ctas: 132, alone: true }, Target::Gpu { ctas: 16, alone: false }];

fn cases(world: u32, target: Target) -> impl Iterator<Item = RandomCase> {
    (0..400).map(move |number| RandomCase::new(7, number, WorldSize::new(world).unwrap(), target).unwrap())
}

#[test]
fn every_world_and_place_has_valid_cases() {
    for world in 1..=16 {
        for target in TARGETS {
            for case in cases(world, target) {
                for rank in case.problem.world().ranks() {
                    let workers = case.plan(rank, target).workers.unwrap();
                    assert!((1..=132).contains(&workers), "{case}: {workers}");
                }
            }
        }
    }
}

#[test]
fn there_is_a_kernel_for_every_plan_over_peer_memory() {
    for world in [1, 2, 4, 8] {
        for case in cases(world, TARGETS[1]) {
            let nodes = Nodes::apart(case.problem.world());
            let schedule = case.plan(Rank::new(0), TARGETS[1]).schedule.over(Schedule::heuristic(&case.problem), &case.problem, nodes);
            let program = TileProgram::build(&case.problem, Rank::new(0), &schedule).unwrap();
            assert!(Variant::of(&program).is_ok(), "{case}: no kernel for {schedule}");
        }
    }
}

#[test]
fn messages_can_carry_every_plan_for_them() {
    let mut spanning = 0;
    for (world, nodes) in [(2, 2), (4, 4), (4, 2), (6, 3)] {
        let nodes = Nodes::new(WorldSize::new(world).unwrap(), nodes).unwrap();
        for case in cases(world, TARGETS[1]).map(|case| case.in_whole_chunks(nodes.are_mixed(), !nodes.are_mixed())) {
            let sending = case.sending.unwrap_or(Sending::ALL);
            assert!(!nodes.are_mixed() || sending != Sending::Before, "{case}");
            let own = Schedule::in_messages(&case.problem, &Channels::FREE, sending, nodes);
            let schedule = case.plan(Rank::new(0), TARGETS[1]).schedule.over(own, &case.problem, nodes);
            let program = TileProgram::build_across(&case.problem, Rank::new(0), &schedule, nodes).unwrap();
            assert!(program.rounds().is_some(), "{case}: {schedule}");
            assert!(Variant::of(&program).is_ok(), "{case}: no kernel for {schedule}");
            spanning += u32::from(program.flattened);
        }
    }
    assert!(spanning > 100, "{spanning}");
}

#[test]
fn cases_go_from_the_least_to_thousands_with_and_without_tails() {
    let target = TARGETS[1];
    let has = |what: fn(&RandomCase) -> bool| cases(4, target).any(|case| what(&case));
    assert!(has(|c| c.problem.m_shard() == 1) && has(|c| c.problem.m_shard() > 1024));
    assert!(
        has(|c| c.problem.m_shard() % 128 == 1) && has(|c| c.problem.m_shard() % 128 == 127) && has(|c| c.problem.m_shard() % 128 == 0)
    );
    assert!(has(|c| c.problem.k_local() == 8) && has(|c| c.problem.k_local() > 2048) && has(|c| c.problem.k_local() % 64 != 0));
    assert!(has(|c| c.problem.n_local() == 8) && has(|c| c.problem.n_local() > 2048));
    assert!(has(|c| c.shared.tile.is_none()) && has(|c| c.shared.band.is_some_and(|b| b > 4)) && has(|c| c.shared.chunk == Some(0)));
    assert!(has(|c| c.epilogue.bias && c.problem.op() == OpKind::GemmReduceScatter) && has(|c| c.epilogue == EpilogueSpec::default()));
    for activation in Activation::ALL {
        for bias in [false, true] {
            assert!(cases(4, target).any(|c| c.epilogue == EpilogueSpec { bias, activation }), "{activation} {bias}");
        }
    }
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for dtype in [DType::Bf16, DType::F16] {
            assert!(cases(4, target).any(|c| c.problem.op() == op && c.problem.dtype() == dtype));
        }
    }
}

#[test]
fn a_case_is_a_function_of_seed_and_number_and_ranks_differ_only_in_their_own_choices() {
    let world = WorldSize::new(4).unwrap();
    let case = |seed, number| RandomCase::new(seed, number, world, Target::Host).unwrap();
    assert_eq!(case(1, 5).to_string(), case(1, 5).to_string());
    assert_ne!(case(1, 5).to_string(), case(2, 5).to_string());
    let differ = (0..20).any(|number| {
        let case = case(1, number);
        let plans = [0, 1].map(|rank| case.plan(Rank::new(rank), Target::Host));
        assert_eq!(plans[0].schedule, plans[1].schedule);
        plans[0].workers != plans[1].workers
    });
    assert!(differ);
}
