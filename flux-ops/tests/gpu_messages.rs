//! Both ops over NCCL's messages: the bits of peer memory, and faults as everywhere.
//!
//! Ranks are threads with a GPU each; NCCL takes no two on one. Where there are not two GPUs, or no NCCL, one line says why all are skipped.
#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]

mod common;

use common::suite::{self, call};
use common::{AnyOp, Case, Machine, Node, OPS, Plan, Values};
use cudarc::driver::sys::CUstreamCaptureMode;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::tile::Raster;
use flux_core::{OpKind, Rank};
use flux_ops::{CallError, Layout};
use flux_transport::{Fault, Options, Select, TransportError, TransportKind, cuda, nccl};
use half::bf16;
use std::sync::Barrier;
use std::time::{Duration, Instant};

fn find() -> Result<Machine, String> {
    cuda::available().map_err(|why| why.to_string())?;
    let count = cuda::device_count().map_err(|e| e.to_string())?;
    if count < 2 {
        return Err("NCCL needs a GPU for each rank, and there is one".to_owned());
    }
    nccl::available().map_err(|why| why.to_string())?;
    Ok(Machine::Gpus(count))
}

fn on_gpus(test: impl FnOnce(Machine)) {
    common::where_found::run("gpu_messages", find(), test);
}

fn messages(options: &mut Options) {
    options.select = Select::Nccl;
}

/// The sum is in rank order whoever brings its parts.
#[test]
fn messages_give_the_bits_of_peer_memory() {
    on_gpus(|machine| {
        for world in machine.worlds(&[2, 3, 4, 8]) {
            for op in OPS {
                let shape = suite::ragged(machine, op, world);
                let case = Case::<bf16>::new(op, shape, world, Values::Reals, 51);
                let expected = case.expected();
                let one = |node: &Node| call(&AnyOp::of(&case, Plan::default(), node), &case, node).unwrap();
                let mapped = machine.run(world, suite::defaults, one);
                for schedule in schedules() {
                    let carried = machine.run(world, messages, |node| {
                        assert_eq!(node.comm.transport(), TransportKind::Nccl);
                        let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                        let ys: Vec<_> = (0..5).map(|_| call(&op, &case, node).unwrap()).collect();
                        op.status().unwrap();
                        assert!(ys.iter().all(|y| *y == ys[0]), "calls of {} differ", case.problem);
                        case.assert_close(&expected, node.rank, &ys[0], &op.explain());
                        ys.into_iter().next().unwrap()
                    });
                    // Another tile adds along k alike.
                    assert!(carried == mapped, "{}: nccl's bits are others than nvlink's", case.problem);
                }
            }
        }
    });
}

fn schedules() -> Vec<Option<Schedule>> {
    let of = |tile| Schedule { raster: Raster::RowGroups(2), ..Schedule::of(tile) };
    let tiles = Machine::Gpus(2).tiles();
    let small = Schedule { chunk: Chunk::Tiles(1), ..of(tiles[0]) };
    vec![None, Some(small), Some(Schedule { chunk: Chunk::Tiles(2), band: 2, ..of(tiles[1]) })]
}

#[test]
fn ops_of_different_sizes_share_the_workspace_and_the_wrap_of_epochs() {
    on_gpus(|machine| {
        for world in machine.worlds(&[2, 4]) {
            let cases = OPS.map(|op| Case::<bf16>::new(op, suite::ragged(machine, op, world), world, Values::Integers, 53));
            let expected = cases.each_ref().map(Case::expected);
            let wrap = |options: &mut Options| {
                messages(options);
                options.first_epoch = Epoch::new(u32::MAX - 20);
            };
            machine.run(world, wrap, |node| {
                let ops = cases.each_ref().map(|case| AnyOp::of(case, Plan::default(), node));
                for i in 0..48 {
                    let (case, op) = (&cases[i % 2], &ops[i % 2]);
                    // One rank is late now and then.
                    if i % 7 == node.rank.index() {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    case.assert_equal(&expected[i % 2], node.rank, &call(op, case, node).unwrap(), &op.explain());
                }
            });
        }
    });
}

#[test]
fn rows_with_gaps_are_sent_without_them() {
    on_gpus(|machine| {
        let world = 2;
        let case = Case::<bf16>::new(OpKind::AllGatherGemm, suite::ragged(machine, OPS[0], world), world, Values::Integers, 57);
        let expected = case.expected();
        machine.run(world, messages, |node| {
            let op = AnyOp::of(&case, Plan::default(), node);
            let (lx, lw, ly) = suite::layouts(&case);
            let wide = Layout { row_stride: lx.cols + 24, ..lx };
            let mut spread = vec![bf16::NAN; wide.span()];
            for (row, dense) in case.x(node.rank).chunks_exact(lx.cols).enumerate() {
                spread[row * wide.row_stride..][..lx.cols].copy_from_slice(dense);
            }
            let (x, w) = (node.upload(&spread), node.upload(&case.w(node.rank)));
            let mut y = node.poisoned(ly.span());
            for _ in 0..3 {
                op.forward(&node.view(&x, wide), &node.view(&w, lw), &mut node.view_mut(&mut y, ly), node.stream()).unwrap();
            }
            case.assert_equal(&expected, node.rank, &node.download(&y), &op.explain());
        });
    });
}

#[test]
fn a_capture_is_refused_before_anything_is_sent() {
    on_gpus(|machine| {
        let case = Case::<bf16>::new(OPS[0], suite::ragged(machine, OPS[0], 2), 2, Values::Integers, 59);
        let expected = case.expected();
        machine.run(2, messages, |node| {
            let op = AnyOp::of(&case, Plan::default(), node);
            let stream = node.cuda_stream().unwrap();
            // SAFETY: every buffer of this rank is used on this one stream.
            unsafe { stream.context().disable_event_tracking() };
            let (lx, lw, ly) = suite::layouts(&case);
            let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
            let mut y = node.poisoned(ly.span());
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let refused = op.forward(&node.view(&x, lx), &node.view(&w, lw), &mut node.view_mut(&mut y, ly), node.stream()).unwrap_err();
            assert!(
                matches!(refused, CallError::Transport(TransportError::NotCapturable { transport: TransportKind::Nccl, .. })),
                "{refused}"
            );
            // The end of an empty capture has nothing to keep.
            let flags = cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            drop(stream.end_capture(flags));
            case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
        });
    });
}

#[test]
fn a_rank_that_never_calls_is_named_and_the_rest_make_a_new_group() {
    on_gpus(|machine| {
        for world in machine.worlds(&[2, 3]) {
            for op in OPS {
                let case = Case::<bf16>::new(op, suite::ragged(machine, op, world), world, Values::Integers, 61);
                let expected = case.expected();
                let together = Barrier::new(world as usize);
                let deadline = Duration::from_secs(5);
                // Kernels are loaded, and NCCL too, before anything is measured.
                let load = |node: &Node| drop(AnyOp::of(&case, Plan::default(), node));
                machine.run(world, messages, load);
                let short = |options: &mut Options| {
                    messages(options);
                    options.deadline = deadline;
                };
                machine.run(world, short, |node| {
                    let op = AnyOp::of(&case, Plan::default(), node);
                    call(&op, &case, node).unwrap();
                    together.wait();
                    if node.rank.get() != 1 {
                        let began = Instant::now();
                        let returned = call(&op, &case, node).is_ok();
                        let (waited, fault) = (began.elapsed(), op.status().unwrap_err());
                        assert!(returned && waited >= deadline && waited < deadline + Duration::from_secs(2), "{waited:?}, {fault}");
                        match &fault {
                            Fault::Timeout { rank, late, .. } => {
                                assert_eq!((*rank, late.as_slice()), (node.rank, [Rank::new(1)].as_slice()), "{fault}");
                            }
                            other => panic!("{other}"),
                        }
                        assert!(matches!(call(&op, &case, node), Err(CallError::Transport(TransportError::Broken { .. }))));
                    }
                    together.wait();
                });
                // The devices and NCCL still work.
                machine.run(world, messages, |node| {
                    let op = AnyOp::of(&case, Plan::default(), node);
                    case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
                });
            }
        }
    });
}
