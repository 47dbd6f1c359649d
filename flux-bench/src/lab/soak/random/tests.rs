use super::*;
use crate::harness::EpilogueSpec;
use crate::harness::epilogue::with_bias;
use flux_core::machine::Machine;
use flux_core::plan::{Chunk, CommMode, Links, Plan, RowMapping, Target};
use flux_core::problem::MAX_WEIGHTS;
use flux_core::program::{Channels, TileProgram};
use flux_core::tile::Generation;
use flux_core::{DType, Nodes, OpKind, Partials, Rank, WorldSize};
use flux_kernels::{KernelTarget, Variant};
use flux_ops::{Activation, Operand, OperandSet};

const GENERATION: Generation = Generation::Hopper;
const PROCESSORS: [Processor; 3] = [
    Processor::Host,
    Processor::Gpu { ctas: 132, generation: GENERATION, alone: true },
    Processor::Gpu { ctas: 16, generation: GENERATION, alone: false },
];

fn cases(world: u32, processor: Processor, legal: Legal) -> impl Iterator<Item = RandomCase> {
    (0..400).map(move |number| {
        RandomCase::new(7, number, WorldSize::new(world).unwrap(), processor, legal).unwrap()
    })
}

#[test]
fn every_world_and_processor_has_valid_cases() {
    for world in 1..=16 {
        for processor in PROCESSORS {
            for case in cases(world, processor, Legal::All) {
                for rank in case.problem.world().ranks() {
                    let workers = case.execution(rank, processor).workers.unwrap();
                    assert!((1..=132).contains(&workers), "{case}: {workers}");
                }
            }
        }
    }
}

/// The program of a case's plan on rank 0, in canonical form.
fn program(case: &RandomCase, nodes: Nodes, links: Links) -> Option<TileProgram> {
    let target = Target { nodes, links, ..Target::peer_memory(Machine::H100, &case.problem) };
    let plan = case.plan?.canonical(&case.problem, &target);
    let schedule = plan.schedule(&case.problem, &target);
    let program = TileProgram::build_across(&case.problem, Rank::new(0), &schedule, nodes).unwrap();
    assert!(
        Variant::of(&program, KernelTarget::of_generation(GENERATION)).is_ok(),
        "{case}: no kernel for {plan}"
    );
    Some(program)
}

#[test]
fn there_is_a_kernel_for_every_plan_over_peer_memory_and_through_the_host() {
    for world in [1, 2, 4, 8] {
        for (legal, links) in [(Legal::All, Links::PeerMemory), (Legal::Staged, Links::HostStaged)]
        {
            for case in cases(world, PROCESSORS[1], legal) {
                program(&case, Nodes::apart(case.problem.world()), links);
            }
        }
    }
}

#[test]
fn messages_can_carry_every_plan_for_them() {
    let mut flattened = 0;
    for (world, nodes) in [(2, 2), (4, 4), (4, 2), (6, 3)] {
        let nodes = Nodes::new(WorldSize::new(world).unwrap(), nodes).unwrap();
        let legal = if nodes.are_mixed() { Legal::Mixed } else { Legal::Messages };
        for case in cases(world, PROCESSORS[1], legal) {
            let Some(program) = program(&case, nodes, Links::Messages(Channels::FREE)) else {
                continue;
            };
            let sequential = case.plan.is_some_and(|plan| plan.comm == CommMode::Sequential);
            let by_library = case.problem.op() == OpKind::GemmAllReduce && sequential;
            assert!(by_library || program.rounds().is_some(), "{case}");
            flattened += u32::from(program.rows.is_flattened());
        }
    }
    assert!(flattened > 100, "{flattened}");
}

#[test]
fn cases_go_from_the_least_to_thousands_with_and_without_tails() {
    let of_gpu = || cases(4, PROCESSORS[1], Legal::All);
    let has = |what: fn(&RandomCase) -> bool| of_gpu().any(|case| what(&case));
    assert!(has(|c| c.problem.m_shard() == 1) && has(|c| c.problem.m_shard() > 1024));
    assert!(
        has(|c| c.problem.m_shard() % 128 == 1)
            && has(|c| c.problem.m_shard() % 128 == 127)
            && has(|c| c.problem.m_shard() % 128 == 0)
    );
    assert!(
        has(|c| c.problem.k_shard() == 8)
            && has(|c| c.problem.k_shard() > 2048)
            && has(|c| c.problem.k_shard() % 64 != 0)
    );
    assert!(has(|c| c.problem.n_shard() == 8) && has(|c| c.problem.n_shard() > 2048));
    for op in OpKind::ALL {
        let [first, last] = [0, 3].map(Rank::new);
        let equal = |c: &RandomCase| c.problem.w_shape(first) == c.problem.w_shape(last);
        assert!(
            [true, false]
                .into_iter()
                .all(|wanted| of_gpu().any(|c| c.problem.op() == op && equal(&c) == wanted)),
            "{op}"
        );
    }
    let has_plan =
        |what: fn(&Plan) -> bool| of_gpu().any(|case| case.plan.as_ref().is_some_and(what));
    assert!(
        has(|c| c.plan.is_none())
            && has_plan(|p| p.rows == RowMapping::PerShard { group: 5 })
            && has_plan(|p| p.chunk == Chunk::Shard)
    );
    assert!(has(|c| c.problem.op() == OpKind::GemmAllReduce
        && c.plan.is_some_and(|plan| plan.rows == RowMapping::FlattenedTwoExchanges)));
    let messages = cases(4, PROCESSORS[1], Legal::Messages);
    assert!(
        messages
            .into_iter()
            .any(|case| case.plan.is_some_and(|plan| plan.comm == CommMode::Sequential))
    );
    assert!(
        has(|c| c.epilogue.operands.has(Operand::Bias) && c.problem.op().reduces())
            && has(|c| c.epilogue == EpilogueSpec::default())
    );
    for op in [OpKind::GemmReduceScatter, OpKind::GemmAllReduce] {
        assert!([false, true].into_iter().all(|bias| {
            of_gpu().any(|c| {
                c.problem.op() == op
                    && c.epilogue.operands.has(Operand::Residual)
                    && c.epilogue.operands.has(Operand::Bias) == bias
            })
        }));
        assert!(of_gpu().any(|c| c.problem.op() == op && c.epilogue.rms_norm.is_some()));
    }
    for activation in Activation::ALL {
        for bias in [false, true] {
            assert!(
                of_gpu().any(|c| c.epilogue
                    == EpilogueSpec {
                        operands: OperandSet::EMPTY.with(Operand::Bias, bias),
                        activation,
                        ..EpilogueSpec::default()
                    }),
                "{activation} {bias}"
            );
        }
    }
    for gated in with_bias(OpKind::AllGatherGemm).filter(|epilogue| epilogue.gates.is_some()) {
        assert!(of_gpu().any(|c| c.epilogue == gated), "{gated}");
    }
    for weights in 1..=MAX_WEIGHTS {
        for bias in [false, true] {
            assert!(
                of_gpu().any(|c| c.problem.weight_count() == weights
                    && c.epilogue.operands.has(Operand::Bias) == bias),
                "{weights} weights, {bias}"
            );
        }
    }
    assert!(has(|c| c.batch_invariant) && has(|c| c.plan.is_none() && !c.batch_invariant));
    for op in OpKind::ALL {
        for dtype in DType::ALL {
            assert!(
                of_gpu().any(|c| c.problem.op() == op && c.problem.numerics().operand == dtype)
            );
        }
        assert_eq!(
            of_gpu()
                .any(|c| c.problem.op() == op && c.problem.numerics().partials == Partials::F32),
            op.reduces()
        );
    }
}

#[test]
fn a_case_is_a_function_of_seed_and_number_and_ranks_differ_only_in_their_own_choices() {
    let world = WorldSize::new(4).unwrap();
    let case =
        |seed, number| RandomCase::new(seed, number, world, Processor::Host, Legal::All).unwrap();
    assert_eq!(case(1, 5).to_string(), case(1, 5).to_string());
    assert_ne!(case(1, 5).to_string(), case(2, 5).to_string());
    let differ = (0..20).any(|number| {
        let case = case(1, number);
        let plans = [0, 1].map(|rank| case.execution(Rank::new(rank), Processor::Host));
        assert_eq!(plans[0].plan, plans[1].plan);
        plans[0].workers != plans[1].workers
    });
    assert!(differ);
}
