//! The ops on the host transport, between threads and between processes.

use crate::common::launched::launched;
use crate::common::{
    Case, Check, Machine, Meeting, OPS, OpOptions, Values, build, build_case, scaled, suite,
};
use flux_core::WorldSize;
use flux_ops::{
    Activation, AllGatherGemm, BuildError, CallError, CommMode, Plan, TensorMut, TensorRef,
    TimedItem, Timeline, TimelineError,
};
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, Select, Stream, World};
use half::bf16;
use std::error::Error;
use std::process::Command;
use std::sync::Barrier;
use std::time::Duration;

const MACHINE: Machine = Machine::Host;

/// Runs a test with ranks as threads.
fn on_host(test: fn(Machine)) {
    test(MACHINE);
}

tests_of_any_machine!(on_host);
suite_tests!(on_host: sequential_integers_of_two_ranks_are_exact, sequential_calls_honour_row_strides);

/// Tests of other arithmetic: ranks as processes add with the same code as threads, on memory that
/// other tests show to be shared.
const ARITHMETIC: [&str; 13] = [
    "f16_integers",
    "an_integer_",
    "gates_multiply",
    "_stay_within",
    "strides",
    "scaled_integers",
    "scaled_numbers",
    "finished_rows",
    "weights_of_k_and_n",
    "small_shards",
    "batch_invariant",
    "f32_partials_",
    "unequal_parts",
];

/// The tests of this module, with ranks as processes: what tests on GPUs do where ranks share them.
#[test]
fn ranks_as_processes_pass_all_of_these_tests() {
    if launched().is_some() {
        return;
    }
    let this = std::env::current_exe().unwrap();
    let listed = Command::new(&this).args(["host::", "--list"]).output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    for words in ARITHMETIC {
        assert!(listed.contains(words), "no test has {words:?} in its name");
    }
    let launcher = Launcher::new(WorldSize::new(3).unwrap(), this);
    let skipped = ARITHMETIC.into_iter().flat_map(|words| ["--skip", words]);
    let args = ["host::", "--test-threads=1"].into_iter().chain(skipped);
    assert_eq!(
        exit_code(launcher.args(args).run().unwrap()),
        0,
        "a rank failed; its words are above"
    );
}

#[test]
fn few_rows_leave_no_wrong_element() {
    on_host(|machine| suite::few_rows_leave_no_wrong_element(machine, 150));
}

#[test]
fn few_rows_that_do_not_come_are_named() {
    on_host(suite::few_rows_that_do_not_come_are_named);
}

#[test]
fn many_calls_in_a_row() {
    suite::many_calls_in_a_row(MACHINE, 500);
}

#[test]
fn calls_with_other_rows_fail_on_every_rank() {
    suite::calls_with_other_rows_fail_on_every_rank(MACHINE);
}

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    suite::calls_in_different_orders_fail_on_every_rank(MACHINE);
}

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Runs two ranks as threads. Returns what each returns; `None` of one that panics.
fn two_ranks<T: Send>(rank: impl Fn(World) -> T + Sync) -> Vec<Option<T>> {
    std::thread::scope(|scope| {
        let spawn = |world| scope.spawn(|| rank(world));
        let ranks: Vec<_> = World::local(2).unwrap().into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().ok()).collect()
    })
}

/// An op for two rows at most, with this activation.
fn small_op(comm: &Communicator, activation: Activation) -> AllGatherGemm<bf16> {
    AllGatherGemm::builder(2, 16, 8).activation(activation).build(comm).unwrap()
}

fn call_small_op(op: &AllGatherGemm<bf16>, m: usize) -> std::result::Result<(), CallError> {
    let (x, w, y) = ([bf16::ONE; 8], vec![bf16::ONE; 64], [bf16::NAN; 16]);
    let (x, mut y) = (x[..m / 2 * 8].to_vec(), y[..m * 8].to_vec());
    op.forward(
        &TensorRef::host(&x, (m / 2, 8)).unwrap(),
        &TensorRef::host(&w, (8, 8)).unwrap(),
        &mut TensorMut::host(&mut y, (m, 8)).unwrap(),
        Stream::Host,
    )
}

/// `main` prints the error that it returns by `Debug`.
#[test]
fn a_main_that_returns_an_error_prints_its_sentence() {
    let main = || -> Result<()> {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
        AllGatherGemm::<bf16>::builder(8, 20, 8).build(&comm)?;
        Ok(())
    };
    assert_eq!(
        format!("Error: {:?}", main().unwrap_err()),
        "Error: n = 20 is not a multiple of 8: rows of 16-byte multiples are required; pad n with \
         zeros to 24"
    );
}

#[test]
fn a_main_that_returns_the_loss_of_a_peer_prints_one_line() {
    let printed = two_ranks(|world| {
        let comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
        let op = small_op(&comm, Activation::None);
        // As many as a rank remembers.
        for _ in 0..64 {
            call_small_op(&op, 2).unwrap();
        }
        if world.rank().get() == 1 {
            std::panic::resume_unwind(Box::new("as a panic, but unsaid"));
        }
        let main = || -> Result<()> { Ok(call_small_op(&op, 2)?) };
        let failure = main().unwrap_err();
        [format!("Error: {failure:?}"), format!("Error: {:?}", op.failure().unwrap())]
    });
    for text in printed[0].as_ref().unwrap() {
        assert!(text.contains("rank 1 is gone: its process"), "{text}");
        assert!(text.len() < 400 && !text.contains(['\n', '{']), "{text}");
    }
}

#[test]
fn ranks_in_different_calls_are_told_by_what_the_calls_differ() {
    let both = Barrier::new(2);
    // By their activation, and by a call without rows.
    for empty in [0, 1] {
        let told = two_ranks(|world| {
            let comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
            let ops = [Activation::Relu, Activation::Gelu].map(|of| small_op(&comm, of));
            let first = world.rank().index();
            if first < empty {
                call_small_op(&ops[0], 0).unwrap();
            }
            let op = &ops[if empty == 0 { first } else { 0 }];
            let refused = call_small_op(op, 2).map_err(|error| error.to_string());
            both.wait();
            refused.unwrap_err()
        });
        let all = told.into_iter().flatten().collect::<Vec<_>>().join("\n");
        let expected = [
            ["(ag_gemm+relu 2x16x8)", "(ag_gemm+gelu 2x16x8)"],
            ["(ag_gemm+relu 2x16x8)", "(ag_gemm+relu 2x16x8) after 1 call without rows"],
        ];
        assert!(expected[empty].iter().all(|words| all.contains(words)), "{all}");
    }
}

/// Each worker has its items' phases in turn, and what waits for peers has the stamps of waits.
#[test]
fn a_traced_call_gives_the_same_bits_and_times_in_order() {
    for (op, workers) in OPS.into_iter().flat_map(|op| [(op, 1), (op, 3)]) {
        let case = Case::<bf16>::new(op, [96, 48, 64], 2, Values::Reals, 41);
        MACHINE.run(2, suite::defaults, |node| {
            let plain = build_case(&case, OpOptions::default(), node);
            assert_eq!(plain.timeline(node.stream()), Err(TimelineError::NotTraced));
            let options = OpOptions { trace: true, workers: Some(workers), ..OpOptions::default() };
            let traced = build_case(&case, options, node);
            assert_eq!(traced.timeline(node.stream()), Err(TimelineError::NoCall));
            let bits = suite::call(&plain, &case, node).unwrap();
            let mut last_end = 0;
            for _ in 0..3 {
                assert!(suite::call(&traced, &case, node).unwrap() == bits, "{}", case.problem);
                let timeline = traced.timeline(node.stream()).unwrap();
                assert!(last_end < timeline.start_ns(), "another call");
                last_end = timeline.end_ns();
                assert_in_order(&timeline, workers as usize);
            }
        });
    }
}

fn assert_in_order(timeline: &Timeline, workers: usize) {
    assert_eq!(timeline.workers.len(), workers);
    let mut awaited = 0;
    for (number, worker) in timeline.workers.iter().enumerate() {
        let mut at = worker.entered;
        for TimedItem { item, times: t } in timeline.items.iter().skip(number).step_by(workers) {
            let partials = if t.partials_there == 0 { t.multiplied } else { t.partials_there };
            let order = [
                at,
                t.opened,
                t.rows_there,
                t.loaded,
                t.multiplied,
                partials,
                t.summed,
                t.written,
                t.sent,
                worker.left,
            ];
            assert!(at > 0 && order.is_sorted(), "{item:?}: {t:?}");
            assert!(item.partials == 0 || t.partials_there > 0, "{item:?}: {t:?}");
            awaited += u32::from(t.partials_there > 0) + u32::from(worker.first_rows > 0);
            at = t.sent;
        }
    }
    assert!(awaited > 0, "a call of two ranks waits for rows or partial tiles");
}

/// Ops are shared between threads, as a model's layers are.
#[test]
fn an_op_can_be_used_from_any_thread() {
    fn shared<T: Send + Sync>() {}
    shared::<AllGatherGemm<bf16>>();
    shared::<flux_ops::GemmReduceScatter<half::f16>>();
}

#[test]
fn ranks_at_other_steps_than_a_build_are_told_who_is_where() {
    let case = Case::<bf16>::new(OPS[0], [16, 16, 16], 2, Values::Integers, 3);
    let expected = case.expected_on(MACHINE);
    MACHINE.run(2, suite::defaults, |node| {
        let comm = &node.comm;
        let builds = node.rank.get() == 0;
        let build = || {
            build::<bf16>(OPS[0], [16, 16, 16], OpOptions::default(), comm)
                .map(drop)
                .unwrap_err()
                .to_string()
        };
        let others: [(&str, &dyn Fn() -> String); 4] = [
            ("exchange", &|| comm.exchange(b"hi").unwrap_err().to_string()),
            ("barrier", &|| comm.barrier().unwrap_err().to_string()),
            ("connecting", &|| {
                Communicator::connect_blocking(&comm.world(), Select::Host).unwrap_err().to_string()
            }),
            ("growing the workspace", &|| {
                comm.reserve(comm.workspace_size()).unwrap_err().to_string()
            }),
        ];
        for (step, other) in others {
            // What is being connected is the next communicator.
            let (step, built) = (
                format!("{step} (communicator {})", u32::from(step == "connecting")),
                "building an op (communicator 0)",
            );
            let (text, expected) = if builds {
                (
                    build(),
                    format!(
                        "while building ag_gemm 16x16x16: rank 1: it is at: {step}, this rank is \
                         at: {built};"
                    ),
                )
            } else {
                (other(), format!("rank 0: it is at: {built}, this rank is at: {step};"))
            };
            assert!(text.starts_with(&expected) && text.ends_with("in one order"), "{text}");
        }
        // They are still in step.
        let op = build_case(&case, OpOptions::default(), node);
        case.assert_equal(
            &expected,
            &op,
            node.rank,
            &suite::call(&op, &case, node).unwrap(),
            "after steps of different kinds",
        );
    });
}

#[test]
fn ops_of_two_communicators_built_in_different_orders_are_refused_on_every_rank() {
    let case = Case::<bf16>::new(OPS[1], [16, 16, 16], 2, Values::Integers, 5);
    let expected = case.expected_on(MACHINE);
    MACHINE.run(2, suite::defaults, |node| {
        let second = Communicator::connect_blocking(&node.comm.world(), Select::Host).unwrap();
        let build =
            |comm: &Communicator| build::<bf16>(OPS[1], [16, 16, 16], OpOptions::default(), comm);
        let mut both = [&node.comm, &second];
        if node.rank.get() == 1 {
            both.reverse();
        }
        for comm in both {
            let text = build(comm).unwrap_err().to_string();
            let is_at = |number| format!("is at: building an op (communicator {number})");
            assert!(text.contains(&is_at(0)) && text.contains(&is_at(1)), "{text}");
        }
        // They are still in step.
        for op in [&node.comm, &second].map(|comm| build(comm).unwrap()) {
            case.assert_equal(
                &expected,
                &op,
                node.rank,
                &suite::call(&op, &case, node).unwrap(),
                "after builds in different orders",
            );
        }
    });
}

#[test]
fn a_rank_that_builds_alone_is_told_which_op_nobody_else_builds() {
    let (built, deadline) = (Meeting::new(2), scaled(Duration::from_millis(1500)));
    MACHINE.run(
        2,
        |options| options.deadline = deadline,
        |node| {
            let alone = (node.rank.get() == 0).then(|| {
                build::<bf16>(OPS[1], [16, 24, 32], OpOptions::default(), &node.comm).map(drop)
            });
            built.wait(); // the other has not left meanwhile
            if let Some(refused) = alone {
                let why = "while building gemm_rs 16x24x32: building an op: the deadline passed \
                           while waiting for rank 1; build blocks its thread, so ranks that are \
                           asynchronous tasks call it in spawn_blocking or on threads of their own";
                assert_eq!(refused.unwrap_err().to_string(), why);
            }
        },
    );
}

/// Names of both crates can be used side by side.
#[test]
fn plans_are_named_beside_names_of_both_crates() {
    #[allow(clippy::wildcard_imports, reason = "what this is about")]
    mod names {
        use flux_ops::*;
        use flux_transport::*;

        pub(super) fn both() -> (Result<Plan, ParsePlanError>, Select) {
            ("tile=16x16x16 comm=sequential".parse(), Select::Host)
        }
    }
    let (plan, select) = names::both();
    assert_eq!((plan.unwrap().comm, select), (CommMode::Sequential, Select::Host));
}

#[test]
fn ranks_agree_on_the_plan() {
    let named = |rank: u32, texts: [&str; 2]| -> Plan { texts[rank as usize].parse().unwrap() };
    MACHINE.run(2, suite::defaults, |node| {
        let build = |texts| {
            AllGatherGemm::<bf16>::builder(16, 16, 16)
                .plan(named(node.rank.get(), texts))
                .build(&node.comm)
        };
        let refused = build(["tile=16x16x16", "tile=16x16x16 rows=flattened"]).unwrap_err();
        assert!(matches!(refused, BuildError::Disagreement { .. }), "{refused}");
        assert!(
            refused.to_string().contains(
                "rank 1 `ag_gemm max_m=16 n=16 k=16 bf16, no bias, tile=16x16x16 rows=flattened"
            ),
            "{refused}"
        );
        assert!(build(["tile=16x16x16 comm=fused:copy-engine"; 2]).is_ok());
    });
}

/// SMs count in what stream-K shares, so a margin is part of what ranks agree on.
#[test]
fn ranks_agree_on_the_margin() {
    MACHINE.run(2, suite::defaults, |node| {
        let build =
            |margin| AllGatherGemm::<bf16>::builder(16, 16, 16).sm_margin(margin).build(&node.comm);
        let refused = build(4 * node.rank.get()).unwrap_err().to_string();
        assert!(
            refused.contains(
                "rank 1 `ag_gemm max_m=16 n=16 k=16 bf16, no bias, plan of rank 0, sm_margin=4"
            ),
            "{refused}"
        );
        let refused = build(132).unwrap_err();
        assert!(matches!(refused, BuildError::SmMargin { value: 132, sms: 132 }), "{refused}");
        assert_eq!(build(4).unwrap().max_m(), 16);
    });
}

/// What calls with fewer rows need was reserved when the op was built.
#[test]
fn no_number_of_rows_grows_the_workspace() {
    let case = |m| Case::<bf16>::new(OPS[1], [m, 40, 48], 2, Values::Integers, 91);
    let cases: Vec<_> = [1, 3, 77, 128, 150, 199]
        .map(case)
        .into_iter()
        .map(|case| (case.expected_on(MACHINE), case))
        .collect();
    for plan in [
        "tile=16x24x16 k=stream-k",
        "tile=16x16x8 rows=flattened k=stream-k chunk=1",
        "tile=32x16x32 chunk=3 k=split-k:2",
    ] {
        let options = OpOptions::of(plan.parse::<Plan>().unwrap());
        MACHINE.run(2, suite::defaults, |node| {
            let op = build::<bf16>(OPS[1], [199, 40, 48], options, &node.comm).unwrap();
            let reserved = node.comm.workspace_size();
            for (expected, case) in &cases {
                case.assert_equal(
                    expected,
                    &op,
                    node.rank,
                    &suite::call(&op, case, node).unwrap(),
                    plan,
                );
            }
            assert_eq!(node.comm.workspace_size(), reserved);
        });
    }
}

/// The host has no library collective: its own mover brings flattened rows.
#[test]
fn a_sequential_plan_is_carried_out_by_the_hosts_mover() {
    for op in OPS {
        let case = Case::<bf16>::new(op, [24, 24, 48], 3, Values::Integers, 7);
        let expected = case.expected_on(MACHINE);
        let plan: Plan = "tile=16x16x16 comm=sequential".parse().unwrap();
        MACHINE.run(3, suite::defaults, |node| {
            let op = build_case(&case, OpOptions::of(plan), node);
            let plan = op.plan(24).unwrap();
            assert!(plan.is_flattened() && plan.comm != CommMode::Sequential, "{}", op.explain());
            case.assert_equal(
                &expected,
                &op,
                node.rank,
                &suite::call(&op, &case, node).unwrap(),
                "a call",
            );
        });
    }
}
