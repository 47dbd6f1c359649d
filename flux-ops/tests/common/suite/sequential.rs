//! Sequential calls: one collective of all rows, before or after one GEMM.

use super::messages::{before_a_new_group, plain, rank_1_never_calls};
use super::{
    Case, Check, Machine, Number, build_case, call, defaults, equal_shards, few_rows, layouts,
};
use crate::common::{Memory, Node, OPS, OpOptions, Values, scaled};
use flux_core::OpKind;
use flux_core::plan::{CommMode, KSplit, Plan};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, PinnedBlock, wait_value_async};
use flux_ops::{Activation, Layout};
use flux_transport::Options;
use half::{bf16, f16};
use std::time::Duration;

fn sequential(machine: Machine) -> Plan {
    Plan { comm: CommMode::Sequential, ..plain(machine) }
}

/// Few rows and partial tiles, whole and split along `k`, between overlapped calls, on one
/// workspace and over the wrap of epochs, whoever is late.
pub fn sequential_calls_share_the_workspace_with_others(machine: Machine) {
    for world in machine.worlds(&[2, 3, 4, 8]) {
        let of = |op| {
            let many = equal_shards(machine, op, world);
            let few = [21 * world as usize, many[1], many[2]];
            let (whole, split) =
                (sequential(machine), Plan { k: KSplit::SplitK(2), ..sequential(machine) });
            let plans = [(few, whole), (many, plain(machine)), (many, whole), (many, split)];
            plans.map(|(shape, plan)| {
                (Case::<bf16>::new(op, shape, world, Values::Integers, 67), OpOptions::of(plan))
            })
        };
        let cases: Vec<_> = OPS.into_iter().flat_map(of).collect();
        let expected: Vec<_> = cases.iter().map(|(case, _)| case.expected_on(machine)).collect();
        let wrap = |options: &mut Options| options.first_epoch = Epoch::new(u32::MAX - 20);
        machine.run(world, wrap, |node| {
            let ops: Vec<_> =
                cases.iter().map(|(case, options)| build_case(case, *options, node)).collect();
            // Each op behind each one, so in both buffers.
            let pairs = (0..ops.len())
                .flat_map(|first| (0..ops.len()).flat_map(move |second| [first, second]));
            let mut first: Vec<Option<Vec<bf16>>> = vec![None; ops.len()];
            for (i, at) in pairs.enumerate() {
                if i % 7 == node.rank.index() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                let (case, op) = (&cases[at].0, &ops[at]);
                let y = call(op, case, node).unwrap();
                case.assert_equal(&expected[at], op, node.rank, &y, "a call");
                let first = first[at].get_or_insert_with(|| y.clone());
                assert!(*first == y, "calls of {} differ: {}", case.problem, op.explain());
            }
            for op in &ops {
                op.status().unwrap();
            }
        });
    }
}

/// Sums of two addends are exact in any order.
pub fn sequential_integers_of_two_ranks_are_exact(machine: Machine) {
    for op in OPS {
        let case = Case::<bf16>::new(op, equal_shards(machine, op, 2), 2, Values::Integers, 71);
        let expected = case.expected_on(machine);
        for world in machine.worlds(&[2]) {
            machine.run(world, defaults, |node| {
                // Of the collectives only an AllReduce crosses nodes.
                let here = case.problem.op() == OpKind::GemmAllReduce
                    || !matches!(machine, Machine::TwoNodes { .. });
                let op = build_case(&case, OpOptions::of(sequential(machine)), node);
                let plan = op.plan(case.problem.m() as usize).unwrap();
                assert_eq!(plan.is_flattened(), here, "{}", op.explain());
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

pub fn sequential_calls_finish_bf16(machine: Machine) {
    finish::<bf16>(machine);
}

pub fn sequential_calls_finish_f16(machine: Machine) {
    finish::<f16>(machine);
}

/// Reals, with a bias and a residual, which a sum over ranks has once, and an activation.
fn finish<T: Number>(machine: Machine) {
    for (world, op) in
        machine.worlds(&[2, 3, 4]).into_iter().flat_map(|world| OPS.map(|op| (world, op)))
    {
        let activation =
            if op == OpKind::AllGatherGemm { Activation::Silu } else { Activation::None };
        for (bias, activation) in [(false, Activation::None), (true, activation)] {
            let case =
                Case::<T>::new(op, equal_shards(machine, op, world), world, Values::Reals, 73);
            let case = case.finished(bias, Values::Reals, activation);
            let case = if bias { case.with_residual(Values::Reals) } else { case };
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = build_case(&case, OpOptions::of(sequential(machine)), node);
                case.assert_close(
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

/// Rows of `x`, `w` and `y` with gaps, which keep what is in them.
pub fn sequential_calls_honour_row_strides(machine: Machine) {
    for (world, op) in
        machine.worlds(&[2, 4]).into_iter().flat_map(|world| OPS.map(|op| (world, op)))
    {
        let case =
            Case::<bf16>::new(op, equal_shards(machine, op, world), world, Values::Integers, 57);
        let expected = case.expected_on(machine);
        machine.run(world, defaults, |node| {
            let op = build_case(&case, OpOptions::of(sequential(machine)), node);
            let wide = |layout: Layout| Layout { row_stride: layout.cols + 24, ..layout };
            let (lx, lw, ly) = layouts(&case, node.rank);
            let (x, w) = (
                with_gaps(&case.x(node.rank), wide(lx), node),
                with_gaps(&case.w(node.rank), wide(lw), node),
            );
            let mut y = node.poisoned::<bf16>(wide(ly).span());
            for _ in 0..3 {
                op.forward(
                    &node.view(&x, wide(lx)),
                    &node.view(&w, wide(lw)),
                    &mut node.view_mut(&mut y, wide(ly)),
                    node.stream(),
                )
                .unwrap();
            }
            let found = node.download(&y);
            let rows = found.chunks(wide(ly).row_stride);
            assert!(
                rows.clone().all(|row| row.iter().skip(ly.cols).all(|gap| gap.is_nan())),
                "{}",
                op.explain()
            );
            let dense: Vec<bf16> = rows.flat_map(|row| &row[..ly.cols]).copied().collect();
            case.assert_equal(&expected, &op, node.rank, &dense, "with gaps");
        });
    }
}

/// Dense rows in a layout with gaps of NaN.
fn with_gaps(dense: &[bf16], layout: Layout, node: &Node) -> Memory<bf16> {
    let mut wide = vec![bf16::NAN; layout.span()];
    for (row, dense) in dense.chunks_exact(layout.cols).enumerate() {
        wide[row * layout.row_stride..][..layout.cols].copy_from_slice(dense);
    }
    node.upload(&wide)
}

/// The deadline of a collective begins when the device has come to it: a stream that others hold up
/// for twice as long ahead of a call is nobody's fault.
pub fn a_stream_that_is_held_up_ahead_of_a_sequential_call_blames_nobody(machine: Machine) {
    let deadline = scaled(Duration::from_secs(3));
    for (world, op) in machine.worlds(&[2]).into_iter().flat_map(|world| OPS.map(|op| (world, op)))
    {
        let shape = equal_shards(machine, op, world);
        let case = Case::<bf16>::new(op, shape, world, Values::Integers, 71);
        let expected = case.expected_on(machine);
        let options = |options: &mut Options| options.deadline = deadline;
        machine.run(world, options, |node| {
            let op = build_case(&case, OpOptions::of(sequential(machine)), node);
            let (lx, lw, ly) = layouts(&case, node.rank);
            let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
            let mut y = node.poisoned(ly.span());
            let device = CudaDevice::open(node.comm.device().ordinal().unwrap()).unwrap();
            let (held, word) =
                (node.stream().raw().unwrap(), PinnedBlock::new(&device, 4).unwrap());
            // To pin memory may wait for all devices.
            node.comm.barrier().unwrap();
            let current = device.enter().unwrap();
            // SAFETY: the word is there until the stream has passed it, below.
            unsafe { wait_value_async(&device, word.address(), 1, held) }.unwrap();
            drop(current);
            op.call(&node.view(&x, lx))
                .weight(&node.view(&w, lw), &mut node.view_mut(&mut y, ly))
                .on(node.stream())
                .unwrap();
            std::thread::sleep(2 * deadline);
            assert_eq!(op.status(), Ok(()));
            // SAFETY: the word is there, and only read by the device.
            unsafe { word.host().cast::<u32>().write_volatile(1) };
            let y = node.download(&y);
            assert_eq!(op.status(), Ok(()));
            case.assert_equal(&expected, &op, node.rank, &y, "a call behind others' work");
        });
    }
}

/// No kernel of a sequential call waits for a peer, so the watchdog ends the collective.
pub fn a_rank_that_never_makes_a_sequential_call_is_named(machine: Machine) {
    before_a_new_group(
        machine,
        &OPS,
        &[2, 3, 4],
        equal_shards,
        OpOptions::of(sequential(machine)),
        rank_1_never_calls,
    );
}
