//! Where messages carry what crosses nodes: the workspace's words over many calls, rows with gaps,
//! what cannot be carried, a rank that never comes.

use super::{
    Case, Check, Machine, build, build_case, call, defaults, few_rows, layouts, unaligned,
};
use crate::common::lateness::assert_soon;
use crate::common::{Meeting, Node, OPS, OpOptions, SHARDED, Values, scaled};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flux_core::plan::{Chunk, Plan, RowMapping};
use flux_core::program::ScheduleError;
use flux_core::signal::Epoch;
use flux_core::{OpKind, Partials, Rank};
use flux_ops::{BuildError, CallError, FusedLinear, Layout};
use flux_transport::{Fault, Options, TransportError};
use half::bf16;
use std::time::{Duration, Instant};

/// Of calls to which a rank does not come.
const DEADLINE: Duration = Duration::from_secs(5);

/// A plan that messages can carry out.
pub fn plain(machine: Machine) -> Plan {
    Plan::of(machine.tiles()[0])
}

pub fn ops_of_different_sizes_share_the_workspace_and_the_wrap_of_epochs(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        let cases = SHARDED.map(|op| {
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 53)
        });
        let expected = cases.each_ref().map(|case| case.expected_on(machine));
        let wrap = |options: &mut Options| options.first_epoch = Epoch::new(u32::MAX - 20);
        machine.run(world, wrap, |node| {
            let ops = cases.each_ref().map(|case| build_case(case, OpOptions::default(), node));
            for i in 0..64 {
                let (case, op) = (&cases[i % 2], &ops[i % 2]);
                // One rank is late now and then.
                if i % 7 == node.rank.index() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                case.assert_equal(
                    &expected[i % 2],
                    op,
                    node.rank,
                    &call(op, case, node).unwrap(),
                    "a call",
                );
            }
        });
    }
}

pub fn rows_with_gaps_are_sent_without_them(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        let op = OpKind::AllGatherGemm;
        let case =
            Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 57);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::default(), node);
            let (lx, lw, ly) = layouts(&case, node.rank);
            let wide = Layout { row_stride: lx.cols + 24, ..lx };
            let mut spread = vec![bf16::NAN; wide.span()];
            for (row, dense) in case.x(node.rank).chunks_exact(lx.cols).enumerate() {
                spread[row * wide.row_stride..][..lx.cols].copy_from_slice(dense);
            }
            let (x, w) = (node.upload(&spread), node.upload(&case.w(node.rank)));
            let mut y = node.poisoned(ly.span());
            for _ in 0..3 {
                op.forward(
                    &node.view(&x, wide),
                    &node.view(&w, lw),
                    &mut node.view_mut(&mut y, ly),
                    node.stream(),
                )
                .unwrap();
            }
            case.assert_equal(&expected, &op, node.rank, &node.download(&y), "a call");
        });
    }
}

pub fn what_messages_cannot_carry_is_refused_before_anything_is_sent(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        let case = Case::<bf16>::new(
            OPS[0],
            unaligned(machine, OPS[0], world),
            world,
            Values::Integers,
            59,
        );
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            // A message has all rows for one owner, not a tile of several.
            let flattened = Plan { rows: RowMapping::Flattened, chunk: Chunk::Tiles(1), ..plain(machine) };
            let few = [16 * world as usize, 256, 64 * world as usize];
            let refused = build::<bf16>(OPS[1], few, OpOptions::of(flattened), &node.comm).unwrap_err();
            if node.comm.nodes().are_mixed() {
                assert!(matches!(refused, BuildError::Schedule(_)), "{refused}");
                // A library's sums are of the op's type.
                let options = OpOptions { partials: Partials::F32, ..OpOptions::default() };
                let refused = build::<bf16>(OPS[2], few, options, &node.comm).unwrap_err();
                let nodes = |refused: &BuildError| {
                    matches!(refused, BuildError::Schedule(ScheduleError::AllReduceNodes { .. }))
                };
                assert!(nodes(&refused), "{refused}");
            } else {
                assert!(matches!(refused, BuildError::NoMessages { .. }), "{refused}");
            }

            let op = build_case(&case, OpOptions::default(), node);
            op.prepare(&[case.problem.m() as usize]).unwrap();
            let refused = captured(&op, &case, node);
            let here = node.comm.transport();
            assert!(
                matches!(refused, CallError::Transport(TransportError::NotCapturable { transport, .. }) if transport == here),
                "{refused}"
            );
            case.assert_equal(&expected, &op, node.rank, &call(&op, &case, node).unwrap(), "a call");
        });
    }
}

/// Why a call is refused while its stream is captured.
fn captured(op: &FusedLinear, case: &Case<bf16>, node: &Node) -> CallError {
    let stream = node.cuda_stream().unwrap();
    // SAFETY: every buffer of this rank is used on this one stream.
    unsafe { stream.context().disable_event_tracking() };
    let (lx, lw, ly) = layouts(case, node.rank);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.poisoned::<bf16>(ly.span());
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let refused = op
        .forward(
            &node.view(&x, lx),
            &node.view(&w, lw),
            &mut node.view_mut(&mut y, ly),
            node.stream(),
        )
        .unwrap_err();
    // The end of an empty capture has nothing to keep.
    drop(
        stream
            .end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH),
    );
    refused
}

pub fn a_rank_that_never_calls_is_named_and_the_rest_make_a_new_group(machine: Machine) {
    before_a_new_group(
        machine,
        &SHARDED,
        &[2, 3, 4],
        unaligned,
        OpOptions::default(),
        rank_1_never_calls,
    );
}

/// Ranks make calls and wait for none, and rank 1 makes none: their hosts wait where a stream is
/// full, and are let go with all that is on it.
pub fn streams_that_are_full_end_when_a_rank_never_calls(machine: Machine) {
    before_a_new_group(
        machine,
        &SHARDED,
        &[2, 4],
        few_rows,
        OpOptions::default(),
        rank_1_never_calls_while_streams_are_filled,
    );
}

/// Has the calls of a group fail, which `fail` sees to, and then a new group make one: the devices
/// and NCCL still work.
pub(super) fn before_a_new_group(
    machine: Machine,
    ops: &[OpKind],
    worlds: &[u32],
    shape: fn(Machine, OpKind, u32) -> [usize; 3],
    options: OpOptions,
    fail: fn(Machine, &Case<bf16>, OpOptions),
) {
    for world in machine.worlds(worlds) {
        for &op in ops {
            let case =
                Case::<bf16>::new(op, shape(machine, op, world), world, Values::Integers, 61);
            let expected = case.expected_on(machine);
            // Kernels are loaded, and NCCL too, before anything is measured.
            machine.run(world, defaults, |node| drop(build_case(&case, options, node)));
            fail(machine, &case, options);
            machine.run(world, defaults, |node| {
                let op = build_case(&case, options, node);
                case.assert_equal(
                    &expected,
                    &op,
                    node.rank,
                    &call(&op, &case, node).unwrap(),
                    "a call",
                );
            });
        }
    }
}

/// One call of all ranks, then what `tried` makes of calls to which rank 1 does not come, on each
/// other rank, no longer than `slack` beyond the deadline; and `judge` of what came of that.
fn without_rank_1<T: Send>(
    machine: Machine,
    case: &Case<bf16>,
    options: OpOptions,
    tried: impl Fn(&FusedLinear, &Node) -> T + Sync,
    slack: Duration,
    judge: impl Fn(&Node, T, Result<(), Fault>) + Sync,
) {
    let world = case.problem.world();
    let together = Meeting::new(world.index());
    let deadline = scaled(DEADLINE);
    let short = |options: &mut Options| options.deadline = deadline;
    machine.run(world.get(), short, |node| {
        let op = build_case(case, options, node);
        call(&op, case, node).unwrap();
        together.wait();
        let began = Instant::now();
        let came = (node.rank.get() != 1).then(|| {
            let tried = tried(&op, node);
            (began.elapsed(), tried, op.status())
        });
        // Before anything is judged: a rank that panicked would leave the others here.
        together.wait();
        if let Some((waited, tried, status)) = came {
            assert!(waited >= deadline, "{waited:?}: {status:?}");
            assert_soon(waited, deadline + slack);
            judge(node, tried, status);
        }
    });
}

pub(super) fn rank_1_never_calls(machine: Machine, case: &Case<bf16>, options: OpOptions) {
    let one = |op: &FusedLinear, node: &Node| {
        let returned = call(op, case, node).is_ok();
        (returned, call(op, case, node).err())
    };
    without_rank_1(
        machine,
        case,
        options,
        one,
        Duration::from_secs(2),
        |node, (returned, again), status| {
            let fault = status.unwrap_err();
            assert!(returned, "{fault}");
            match &fault {
                Fault::Timeout { rank, late, .. } => {
                    assert_eq!(
                        (*rank, late.as_slice()),
                        (node.rank, [Rank::new(1)].as_slice()),
                        "{fault}"
                    );
                }
                other => panic!("{other}"),
            }
            assert!(
                matches!(again, Some(CallError::Transport(TransportError::Broken { .. }))),
                "{again:?}"
            );
        },
    );
}

fn rank_1_never_calls_while_streams_are_filled(
    machine: Machine,
    case: &Case<bf16>,
    options: OpOptions,
) {
    /// More than a stream takes: 1,024 launches, of which a call has several.
    const CALLS: usize = 20_000;
    let fill = |op: &FusedLinear, node: &Node| {
        let (lx, lw, ly) = layouts(case, node.rank);
        let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
        let mut y = node.poisoned::<bf16>(ly.span());
        let one = |_| {
            op.forward(
                &node.view(&x, lx),
                &node.view(&w, lw),
                &mut node.view_mut(&mut y, ly),
                node.stream(),
            )
            .err()
        };
        (0..CALLS).find_map(one)
    };
    without_rank_1(machine, case, options, fill, Duration::from_secs(20), |_, refused, status| {
        assert!(refused.is_some(), "a stream took {CALLS} calls");
        assert!(matches!(status, Err(Fault::Timeout { .. })), "{status:?}");
    });
}
