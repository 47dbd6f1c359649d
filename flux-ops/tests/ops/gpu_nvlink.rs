//! The ops on GPUs: what must hold on any machine, and what only a device has (graphs, two
//! movers).
//!
//! Ranks are threads with a GPU each, and on a machine with one GPU share it; or they are processes
//! of a launch (`common/launched.rs`), with any number on each. Where there is none, one line says
//! why all are skipped.

use crate::common::launched::places;
use crate::common::suite::{self, Number};
use crate::common::{
    Case, Check, Machine, Memory, Node, OPS, OpOptions, Values, build, build_case,
};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flux_core::OpKind;
use flux_core::plan::{CommMode, Mover, Plan, RowMapping};
use flux_core::program::Sink;
use flux_kernels::nvrtc::Nvrtc;
use flux_ops::internal::limit_programs;
use flux_ops::{AllGatherGemm, CallError, FusedLinear, Layout, TimedItem, Timeline, TimelineError};
use half::bf16;

/// Runs a test where it can run.
fn on_gpus(test: fn(Machine)) {
    let places = crate::common::gpus::count().map(places);
    crate::common::where_found::run("gpu_nvlink", places.map(Machine::Gpus), test);
}

tests_of_any_machine!(on_gpus);

#[test]
fn ten_thousand_calls_in_a_row() {
    on_gpus(|machine| suite::many_calls_in_a_row(machine, 10_000));
}

#[test]
fn few_rows_leave_no_wrong_element() {
    on_gpus(|machine| suite::few_rows_leave_no_wrong_element(machine, 200_000));
}

#[test]
fn few_rows_that_do_not_come_are_named() {
    on_gpus(suite::few_rows_that_do_not_come_are_named);
}

#[test]
fn calls_with_other_rows_fail_on_every_rank() {
    on_gpus(suite::calls_with_other_rows_fail_on_every_rank);
}

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    on_gpus(suite::calls_in_different_orders_fail_on_every_rank);
}

/// A plan with this mover.
fn moved_by(machine: Machine, mover: Mover) -> Plan {
    Plan { comm: CommMode::Fused { mover }, ..Plan::of(machine.tiles()[0]) }
}

/// Copy engines bring the same bytes as the kernel's own stores.
#[test]
fn no_mover_changes_a_bit() {
    on_gpus(|machine| {
        for world in machine.worlds(&[2, 4, 8]) {
            let w = world as usize;
            let case = Case::<bf16>::new(
                OpKind::AllGatherGemm,
                [300 * w, 264 * w, 456],
                world,
                Values::Integers,
                37,
            );
            let expected = case.expected_on(machine);
            machine.run(world, suite::defaults, |node| {
                for mover in [Mover::CopyEngine, Mover::Kernel] {
                    let plan = moved_by(machine, mover);
                    let op = build_case(&case, OpOptions::of(plan), node);
                    assert_eq!(op.plan(case.problem.m() as usize).unwrap().comm, plan.comm);
                    for _ in 0..3 {
                        case.assert_equal(
                            &expected,
                            &op,
                            node.rank,
                            &suite::call(&op, &case, node).unwrap(),
                            "a call",
                        );
                    }
                }
            });
        }
    });
}

/// A kernel that records computes the same, and what it records is in the order in which things
/// happen.
#[test]
fn a_traced_call_gives_the_same_bits_and_times_in_order() {
    on_gpus(|machine| {
        if let Err(why) = Nvrtc::get() {
            // Traced kernels are not compiled ahead of time.
            return crate::common::skipped::skip(
                "a_traced_call_gives_the_same_bits_and_times_in_order",
                &why,
            );
        }
        for world in machine.worlds(&[1, 2, 4]) {
            for op in OPS {
                let case = Case::<bf16>::new(
                    op,
                    suite::unaligned(machine, op, world),
                    world,
                    Values::Reals,
                    41,
                );
                machine.run(world, suite::defaults, |node| {
                    let plain =
                        suite::call(&build_case(&case, OpOptions::default(), node), &case, node)
                            .unwrap();
                    let op =
                        build_case(&case, OpOptions { trace: true, ..OpOptions::default() }, node);
                    assert_eq!(op.timeline(node.stream()), Err(TimelineError::NoCall));
                    let mut last_end = 0;
                    for _ in 0..3 {
                        assert!(
                            suite::call(&op, &case, node).unwrap() == plain,
                            "rank {}: {} differs traced",
                            node.rank,
                            case.problem
                        );
                        let timeline = op.timeline(node.stream()).unwrap();
                        assert!(last_end < timeline.start_ns());
                        last_end = timeline.end_ns();
                        assert_in_order(&timeline);
                    }
                });
            }
        }
    });
}

fn assert_in_order(timeline: &Timeline) {
    let workers = timeline.workers.len();
    for (w, worker) in timeline.workers.iter().enumerate() {
        let [mut opened_after, mut written_after, mut sent_after] = [worker.entered; 3];
        for (i, TimedItem { item, times: t }) in
            timeline.items.iter().enumerate().skip(w).step_by(workers)
        {
            // The producer passes by a reduction of rows, which has no tile to multiply and send.
            let reduces = item.sink == Sink::ReduceRows;
            let adds = item.partials > 0 && !reduces;
            let producer = [
                opened_after,
                t.opened,
                t.rows_there,
                t.loaded,
                if adds { t.partials_there } else { t.loaded },
            ];
            let tile = [t.multiplied, t.summed, t.written, t.sent];
            let rows = [written_after, t.partials_there, t.written];
            let sent = if reduces { sent_after } else { t.sent };
            let in_turn = [sent_after, sent, worker.left];
            let consumers = if reduces { &rows[..] } else { &tile };
            for order in [&producer[..], consumers, &in_turn] {
                assert!(
                    order.is_sorted(),
                    "rank {}, item {i} of CTA {w}: {order:?} in {t:?}, {worker:?}",
                    timeline.rank
                );
            }
            assert_eq!(reduces, t.multiplied == 0 && t.sent == 0, "item {i}: {t:?}");
            assert!(reduces || t.loaded <= t.multiplied, "item {i}: {t:?}");
            assert!(adds || reduces || t.partials_there == 0, "item {i} adds nothing: {t:?}");
            (opened_after, written_after, sent_after) = (t.loaded, t.written, sent);
        }
    }
}

/// A call is captured once and replayed on changing inputs, with eager calls in between. An op
/// whose mover is the copy engines uses the kernel from the capture on, and computes the same bits.
/// Sums have a residual, which replays find in `y`.
#[test]
fn a_replayed_graph_gives_the_bits_of_eager_calls() {
    on_gpus(|machine| {
        for world in machine.worlds(&[1, 2, 4, 8]) {
            let movers = [Mover::Kernel, Mover::CopyEngine]
                .map(|mover| (OPS[0], OpOptions::of(moved_by(machine, mover))));
            for (op, options) in
                movers.into_iter().chain([OPS[1], OPS[2]].map(|op| (op, OpOptions::default())))
            {
                let w = world as usize;
                let shape =
                    if op == OPS[0] { [257 * w, 136 * w, 456] } else { [257 * w, 392, 136 * w] };
                let cases: Vec<_> = (0..4)
                    .map(|seed| {
                        Case::<bf16>::new(op, shape, world, Values::Reals, seed)
                            .with_residual(Values::Reals)
                    })
                    .collect();
                machine.run(world, suite::defaults, |node| replay(node, &cases, options));
            }
        }
    });
}

/// The norm behind an op is in the graph, and normalises the rows of each replay.
#[test]
fn a_replayed_graph_normalises() {
    on_gpus(|machine| {
        for (world, op) in machine
            .worlds(&[1, 2, 4, 8])
            .into_iter()
            .flat_map(|world| [OPS[1], OPS[2]].map(|op| (world, op)))
        {
            let shape = [257 * world as usize, 392, 136 * world as usize];
            let cases =
                [151, 157].map(|seed| Case::<bf16>::new(op, shape, world, Values::Reals, seed));
            let options = OpOptions { rms_norm: Some(1e-5.into()), ..OpOptions::default() };
            machine.run(world, suite::defaults, |node| replay_norm(node, &cases, options));
        }
    });
}

/// The copy of the gathered rows is in the graph, and each replay takes them from its own buffer.
#[test]
fn a_replayed_graph_hands_out_gathered_rows() {
    on_gpus(|machine| {
        let movers = [Mover::Kernel, Mover::CopyEngine].map(|mover| moved_by(machine, mover));
        let flattened = Plan { rows: RowMapping::Flattened, ..movers[0] };
        for (world, plan) in machine
            .worlds(&[1, 2, 4, 8])
            .into_iter()
            .flat_map(|world| [movers[0], movers[1], flattened].map(|p| (world, p)))
        {
            let shape = [257 * world as usize + 1, 136 * world as usize, 456];
            let cases = [173, 179, 181]
                .map(|seed| Case::<bf16>::new(OPS[0], shape, world, Values::Reals, seed));
            machine.run(world, suite::defaults, |node| {
                replay_gathered(node, &cases, OpOptions::of(plan));
            });
        }
    });
}

fn replay_gathered(node: &Node, cases: &[Case<bf16>], options: OpOptions) {
    let stream = node.cuda_stream().unwrap();
    // SAFETY: every buffer of this rank is used on this one stream.
    unsafe { stream.context().disable_event_tracking() };
    let op = build_case(&cases[0], options, node);
    let (lx, lw, ly) = suite::layouts(&cases[0], node.rank);
    let full = Layout::dense(ly.rows, lx.cols);
    let (mut x, mut w) = (node.poisoned::<bf16>(lx.span()), node.poisoned::<bf16>(lw.span()));
    let (mut y, mut x_full) =
        (node.poisoned::<bf16>(ly.span()), node.poisoned::<bf16>(full.span()));
    let poison = node.download(&x_full);
    suite::call(&op, &cases[0], node).unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    {
        let (x, w, mut to) =
            (node.view(&x, lx), node.view(&w, lw), node.view_mut(&mut x_full, full));
        op.call(&x)
            .weight(&w, &mut node.view_mut(&mut y, ly))
            .gathered(&mut to)
            .on(node.stream())
            .unwrap();
    }
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("a captured call");
    for (turn, case) in cases.iter().cycle().take(12).enumerate() {
        node.write(&mut x, &case.x(node.rank));
        node.write(&mut w, &case.w(node.rank));
        node.write(&mut x_full, &poison);
        graph.launch().unwrap();
        assert!(
            node.download(&x_full) == case.all_x(),
            "rank {}: replay {turn} of {}",
            node.rank,
            case.problem
        );
        // A call between replays changes which buffer the next one uses.
        if turn % 3 == 0 {
            assert!(
                suite::call_gathered(&op, &cases[1], node, 8).1 == cases[1].all_x(),
                "rank {}: after replay {turn}",
                node.rank
            );
        }
    }
    op.status().unwrap();
}

fn replay_norm(node: &Node, cases: &[Case<bf16>], options: OpOptions) {
    let stream = node.cuda_stream().unwrap();
    // SAFETY: every buffer of this rank is used on this one stream.
    unsafe { stream.context().disable_event_tracking() };
    let op = build_case(&cases[0], options, node);
    let (lx, lw, ly) = suite::layouts(&cases[0], node.rank);
    let (mut x, mut w) = (node.poisoned::<bf16>(lx.span()), node.poisoned::<bf16>(lw.span()));
    let (mut y, mut y_norm) = (node.poisoned::<bf16>(ly.span()), node.poisoned::<bf16>(ly.span()));
    let (gain, poison) = (node.upload(&suite::gain::<bf16>(ly.cols)), node.download(&y));
    let mut call = || {
        let (gain, mut to) = (node.view(&gain, (ly.cols,)), node.view_mut(&mut y_norm, ly));
        op.call(&node.view(&x, lx))
            .weight(&node.view(&w, lw), &mut node.view_mut(&mut y, ly))
            .norm(&gain, &mut to)
            .on(node.stream())
            .unwrap();
    };
    call();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    call();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("a captured call");
    for case in cases.iter().cycle().take(6) {
        node.write(&mut x, &case.x(node.rank));
        node.write(&mut w, &case.w(node.rank));
        node.write(&mut y, &poison);
        node.write(&mut y_norm, &poison);
        graph.launch().unwrap();
        suite::assert_normalised(&node.download(&y), &node.download(&y_norm), ly.cols, &op);
    }
    op.status().unwrap();
}

/// Nothing is left in the capture, and the communicator works on.
#[test]
fn a_capture_that_nobody_has_vouched_for_is_refused() {
    on_gpus(|machine| {
        machine.run(1, suite::defaults, |node| {
            let case = Case::<bf16>::new(OPS[0], [256, 128, 128], 1, Values::Reals, 1);
            let op = AllGatherGemm::<bf16>::builder(256, 128, 128).build(&node.comm).unwrap();
            let stream = node.cuda_stream().unwrap();
            // SAFETY: every buffer of this rank is used on this one stream.
            unsafe { stream.context().disable_event_tracking() };
            let (lx, lw, ly) = suite::layouts(&case, node.rank);
            let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
            let mut y = node.poisoned(ly.span());
            let mut call = || {
                op.forward(
                    &node.view(&x, lx),
                    &node.view(&w, lw),
                    &mut node.view_mut(&mut y, ly),
                    node.stream(),
                )
            };
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            assert!(matches!(call(), Err(CallError::Captured)));
            drop(stream.end_capture(
                CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH,
            ));
            call().unwrap();
            stream.synchronize().unwrap();
            op.status().unwrap();
        });
    });
}

/// Each rank captures its own part; the ranks' replays meet on the devices.
fn replay<T: Number>(node: &Node, cases: &[Case<T>], options: OpOptions) {
    let stream = node.cuda_stream().unwrap();
    // SAFETY: every buffer of this rank is used on this one stream. A tracked buffer would bring
    // events from outside into the capture.
    unsafe { stream.context().disable_event_tracking() };
    let op = build_case(&cases[0], options, node);
    let eager: Vec<Vec<T>> =
        cases.iter().map(|case| suite::call(&op, case, node).unwrap()).collect();

    let (lx, lw, ly) = suite::layouts(&cases[0], node.rank);
    let (mut x, mut w) = (node.poisoned::<T>(lx.span()), node.poisoned::<T>(lw.span()));
    let mut y = node.poisoned::<T>(ly.span());
    let poison = node.download(&y);
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    {
        let (x, w, mut y) = (node.view(&x, lx), node.view(&w, lw), node.view_mut(&mut y, ly));
        let call = op.call(&x).weight(&w, &mut y);
        let call = if cases[0].has_residual() { call.residual_in_y() } else { call };
        call.on(node.stream()).unwrap();
    }
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).unwrap().expect("a captured call");

    for i in 0..20 {
        let (case, eager_bits) = (&cases[i % cases.len()], &eager[i % cases.len()]);
        node.write(&mut x, &case.x(node.rank));
        node.write(&mut w, &case.w(node.rank));
        node.write(&mut y, &case.residual(node.rank).unwrap_or_else(|| poison.clone()));
        graph.launch().unwrap();
        assert!(
            node.download(&y) == *eager_bits,
            "rank {}: replay {i} of {} differs from the eager call",
            node.rank,
            case.problem
        );
        if i % 3 == 0 {
            let other = (i + 1) % cases.len();
            let y = suite::call(&op, &cases[other], node).unwrap();
            assert!(
                y == eager[other],
                "rank {}: the eager call after replay {i} differs",
                node.rank
            );
        }
    }
    op.status().unwrap();
}

/// Graphs of prepared rows keep their programs while calls with other rows evict each other, and
/// replay between them. A capture of rows that were not prepared is refused, and changes nothing.
#[test]
fn graphs_of_prepared_rows_replay_between_calls_with_other_rows() {
    on_gpus(|machine| {
        for world in machine.worlds(&[1, 2, 4, 8]) {
            for op in OPS {
                let w = world as usize;
                let shape = |rows: usize| {
                    if op == OPS[0] { [rows, 136 * w, 456] } else { [rows, 392, 136 * w] }
                };
                let case = |rows| Case::<bf16>::new(op, shape(rows), world, Values::Reals, 83);
                let (captured, eager) = ([16, 101].map(case), [1, 9, 64, 177, 256, 500].map(case));
                machine.run(world, suite::defaults, |node| {
                    // Room for the captured programs and two or three more.
                    limit_programs(
                        &node.comm,
                        if op == OPS[2] { 24 << 10 } else { 2048 * w.max(2) as u64 },
                    );
                    let stream = node.cuda_stream().unwrap();
                    // SAFETY: every buffer of this rank is used on this one stream.
                    unsafe { stream.context().disable_event_tracking() };
                    let options = OpOptions {
                        workers: node.workers,
                        ..OpOptions::of(moved_by(machine, Mover::Kernel))
                    };
                    let built = build::<bf16>(op, shape(500), options, &node.comm).unwrap();
                    refused_capture(node, &built, &captured[0]);
                    let rows: Vec<usize> =
                        captured.iter().map(|case| case.problem.m() as usize).collect();
                    built.prepare(&rows).unwrap();
                    let wanted: Vec<_> = captured
                        .iter()
                        .chain(&eager)
                        .map(|case| suite::call(&built, case, node).unwrap())
                        .collect();
                    let mut graphs: Vec<_> =
                        captured.iter().map(|case| capture(node, &built, case)).collect();
                    for turn in 0..60 {
                        let (graph, y, _operands) = &mut graphs[turn % 2];
                        let poison = vec![bf16::NAN; wanted[turn % 2].len()];
                        node.write(y, &poison);
                        graph.launch().unwrap();
                        assert!(
                            node.download(y) == wanted[turn % 2],
                            "rank {}: replay {turn} differs",
                            node.rank
                        );
                        let other = turn % eager.len();
                        let y = suite::call(&built, &eager[other], node).unwrap();
                        assert!(
                            y == wanted[2 + other],
                            "rank {}: {} after replay {turn} differs",
                            node.rank,
                            eager[other].problem
                        );
                    }
                    built.status().unwrap();
                    // What graphs read outlives the op.
                    drop(built);
                    let (graph, y, _operands) = &mut graphs[0];
                    graph.launch().unwrap();
                    assert!(node.download(y) == wanted[0]);
                });
            }
        }
    });
}

/// A graph of one call, with its output and its operands.
type Captured = (cudarc::driver::CudaGraph, Memory<bf16>, [Memory<bf16>; 2]);

fn capture(node: &Node, op: &FusedLinear, case: &Case<bf16>) -> Captured {
    let (lx, lw, ly) = suite::layouts(case, node.rank);
    let (x, w, mut y) = (
        node.upload(&case.x(node.rank)),
        node.upload(&case.w(node.rank)),
        node.poisoned::<bf16>(ly.span()),
    );
    let stream = node.cuda_stream().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    op.forward(
        &node.view(&x, lx),
        &node.view(&w, lw),
        &mut node.view_mut(&mut y, ly),
        node.stream(),
    )
    .unwrap();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    (stream.end_capture(flags).unwrap().expect("a captured call"), y, [x, w])
}

fn refused_capture(node: &Node, op: &FusedLinear, case: &Case<bf16>) {
    let (lx, lw, ly) = suite::layouts(case, node.rank);
    let (x, w, mut y) = (
        node.upload(&case.x(node.rank)),
        node.upload(&case.w(node.rank)),
        node.poisoned::<bf16>(ly.span()),
    );
    let stream = node.cuda_stream().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let refused = op.forward(
        &node.view(&x, lx),
        &node.view(&w, lw),
        &mut node.view_mut(&mut y, ly),
        node.stream(),
    );
    assert!(
        matches!(refused, Err(CallError::NotPrepared { m }) if m == case.problem.m()),
        "{refused:?}"
    );
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    // The capture goes on: nothing was put into it.
    drop(stream.end_capture(flags).unwrap());
    op.status().unwrap();
}

/// CTAs are at most those that a margin leaves.
#[test]
fn a_margin_leaves_sms_to_others() {
    on_gpus(|machine| {
        let case = Case::<bf16>::new(OPS[0], [2048, 4096, 64], 1, Values::Integers, 89);
        machine.run(1, suite::defaults, |node| {
            let sms = node.comm.device().info().unwrap().sms;
            let [m, n, k] = [2048, 4096, 64];
            let build = |margin| {
                AllGatherGemm::<bf16>::builder(m, n, k).sm_margin(margin).build(&node.comm)
            };
            for margin in [0, 20, sms - 1] {
                let op = build(margin).unwrap();
                assert!(op.execution(m).unwrap().workers <= sms - margin, "{}", op.explain());
                let (lx, lw, ly) = suite::layouts(&case, node.rank);
                let (x, w, mut y) = (
                    node.upload(&case.x(node.rank)),
                    node.upload(&case.w(node.rank)),
                    node.poisoned::<bf16>(ly.span()),
                );
                op.forward(
                    &node.view(&x, lx),
                    &node.view(&w, lw),
                    &mut node.view_mut(&mut y, ly),
                    node.stream(),
                )
                .unwrap();
                assert!(node.download(&y).iter().all(|e| e.is_finite()));
            }
            let refused = build(sms).unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("sm_margin = {sms}: the device has {sms} SMs")),
                "{refused}"
            );
        });
    });
}
