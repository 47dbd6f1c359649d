//! Both ops on ranks of two nodes: peer memory within, NCCL between.
//!
//! Ranks are threads, and this machine is taken for two. Two nodes of one rank need two GPUs, and so do two of two that share one a node; two of two with a GPU each
//! need four. One line says what is skipped.
#![allow(clippy::unwrap_used, reason = "clippy knows test functions, not the functions that they call")]

mod common;

use common::suite::{self, call};
use common::{AnyOp, Case, Machine, Node, OPS, Plan, Values};
use cudarc::driver::sys::CUstreamCaptureMode;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::tile::Raster;
use flux_core::{Nodes, OpKind, Rank, WorldSize};
use flux_ops::{BuildError, CallError, Layout};
use flux_transport::{Communicator, ConnectError, Fault, Options, Select, TransportError, TransportKind, World, cuda, nccl};
use half::bf16;
use std::io::Write;
use std::sync::{Barrier, Once};
use std::time::{Duration, Instant};

/// Machines that there are here, and what is left out of them.
fn find() -> Result<(Vec<Machine>, Vec<String>), String> {
    cuda::available().map_err(|why| why.to_string())?;
    let gpus = cuda::device_count().map_err(|e| e.to_string())?;
    if gpus < 2 {
        return Err("two nodes need a GPU each, and there is one".to_owned());
    }
    nccl::available().map_err(|why| why.to_string())?;
    let (mut machines, mut left_out) = (vec![Machine::TwoNodes { per_gpu: 1, ranks: 2 }], Vec::new());
    // A stream that waits must not hold up another's launch or copy: there are as many queues of each as these variables say, 8 by default.
    let queues = ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS"];
    if queues.iter().all(|name| std::env::var(name).is_ok_and(|value| value == "32")) {
        machines.push(Machine::TwoNodes { per_gpu: 2, ranks: 4 });
    } else {
        left_out.push(format!("two ranks on each GPU: set {} to 32", queues.join(" and ")));
    }
    match gpus {
        4.. => machines.push(Machine::TwoNodes { per_gpu: 1, ranks: 4 }),
        _ => left_out.push(format!("a GPU for each of four ranks: there are {gpus}")),
    }
    Ok((machines, left_out))
}

fn say(what: &str) {
    // Past the capture of a test's output, so that it is seen.
    std::io::stderr().write_all(format!("\ngpu_mixed: skipped, {what}\n").as_bytes()).unwrap_or_default();
}

fn on_nodes(test: impl Fn(Machine, u32)) {
    static SAID: Once = Once::new();
    match find() {
        Ok((machines, left_out)) => {
            SAID.call_once(|| left_out.iter().for_each(|what| say(what)));
            for machine in machines {
                test(machine, machine.worlds(&[2, 4])[0]);
            }
        }
        Err(why) => SAID.call_once(|| say(&why)),
    }
}

fn nodes(world: u32) -> Nodes {
    Nodes::new(WorldSize::new(world).unwrap(), 2).unwrap()
}

fn case(machine: Machine, op: OpKind, world: u32, values: Values, seed: u64) -> Case<bf16> {
    Case::new(op, suite::ragged(machine, op, world), world, values, seed)
}

fn schedules(machine: Machine) -> Vec<Option<Schedule>> {
    let of = |tile| Schedule { raster: Raster::RowGroups(2), ..Schedule::of(tile) };
    let tiles = machine.tiles();
    let small = Schedule { chunk: Chunk::Tiles(1), ..of(tiles[0]) };
    let banded = Schedule { chunk: Chunk::Tiles(2), band: 2, ..of(tiles[1]) };
    vec![None, Some(small), Some(banded), Some(Schedule { splits: 2, ..small })]
}

fn plain(machine: Machine) -> Schedule {
    Schedule::of(machine.tiles()[0])
}

#[test]
fn integers_give_the_exact_sums_of_nodes() {
    on_nodes(|machine, world| {
        for op in OPS {
            let case = case(machine, op, world, Values::Integers, 71);
            let expected = case.expected_across(&plain(machine), nodes(world));
            for schedule in schedules(machine) {
                machine.run(world, suite::defaults, |node| {
                    assert_eq!((node.comm.transport(), node.comm.nodes()), (TransportKind::Mixed, nodes(world)));
                    let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                    for _ in 0..5 {
                        case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
                    }
                    op.status().unwrap();
                });
            }
        }
    });
}

#[test]
fn reals_stay_within_the_bound_and_are_the_same_bits_in_every_run() {
    on_nodes(|machine, world| {
        for op in OPS {
            let case = case(machine, op, world, Values::Reals, 73);
            let expected = case.expected_across(&plain(machine), nodes(world));
            let mut first: Option<Vec<Vec<bf16>>> = None;
            for schedule in schedules(machine).into_iter().take(3) {
                let ys = machine.run(world, suite::defaults, |node| {
                    let op = AnyOp::of(&case, Plan { schedule, ..Plan::default() }, node);
                    let ys: Vec<_> = (0..5).map(|_| call(&op, &case, node).unwrap()).collect();
                    assert!(ys.iter().all(|y| *y == ys[0]), "calls of {} differ", case.problem);
                    case.assert_close(&expected, node.rank, &ys[0], &op.explain());
                    ys.into_iter().next().unwrap()
                });
                // Another tile adds along k alike, and orders change nothing.
                let first = first.get_or_insert_with(|| ys.clone());
                assert!(*first == ys, "{}: other bits with another schedule", case.problem);
            }
        }
    });
}

#[test]
fn ops_of_different_sizes_share_the_workspace_and_the_wrap_of_epochs() {
    on_nodes(|machine, world| {
        let cases = OPS.map(|op| case(machine, op, world, Values::Integers, 79));
        let expected = cases.each_ref().map(|case| case.expected_across(&plain(machine), nodes(world)));
        let wrap = |options: &mut Options| options.first_epoch = Epoch::new(u32::MAX - 20);
        machine.run(world, wrap, |node| {
            let ops = cases.each_ref().map(|case| AnyOp::of(case, Plan::default(), node));
            for i in 0..64 {
                let (case, op) = (&cases[i % 2], &ops[i % 2]);
                // One rank is late now and then.
                if i % 7 == node.rank.index() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                case.assert_equal(&expected[i % 2], node.rank, &call(op, case, node).unwrap(), &op.explain());
            }
        });
    });
}

#[test]
fn rows_with_gaps_are_sent_without_them() {
    on_nodes(|machine, world| {
        let case = case(machine, OpKind::AllGatherGemm, world, Values::Integers, 83);
        let expected = case.expected();
        machine.run(world, suite::defaults, |node| {
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
fn what_messages_cannot_carry_is_refused_before_anything_is_sent() {
    on_nodes(|machine, world| {
        let case = case(machine, OPS[0], world, Values::Integers, 89);
        let expected = case.expected();
        machine.run(world, suite::defaults, |node| {
            let p = &case.problem;
            let shape = [p.m() as usize, p.n() as usize, p.k() as usize];
            let sliced = Plan { schedule: Some(Schedule { k_chunks: 2, ..plain(machine) }), ..Plan::default() };
            let refused = AnyOp::<bf16>::build(OPS[0], shape, sliced, &node.comm).unwrap_err();
            assert!(matches!(refused, BuildError::NoMessages { .. }), "{refused}");

            let op = AnyOp::of(&case, Plan::default(), node);
            let stream = node.cuda_stream().unwrap();
            // SAFETY: every buffer of this rank is used on this one stream.
            unsafe { stream.context().disable_event_tracking() };
            let (lx, lw, ly) = suite::layouts(&case);
            let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
            let mut y = node.poisoned(ly.span());
            stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
            let refused = op.forward(&node.view(&x, lx), &node.view(&w, lw), &mut node.view_mut(&mut y, ly), node.stream()).unwrap_err();
            let captured = TransportKind::Mixed;
            assert!(
                matches!(refused, CallError::Transport(TransportError::NotCapturable { transport, .. }) if transport == captured),
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
    on_nodes(|machine, world| {
        for op in OPS {
            let case = case(machine, op, world, Values::Integers, 97);
            let expected = case.expected_across(&plain(machine), nodes(world));
            let together = Barrier::new(world as usize);
            let deadline = Duration::from_secs(3);
            // Kernels are loaded, and NCCL too, before anything is measured.
            machine.run(world, suite::defaults, |node| drop(AnyOp::of(&case, Plan::default(), node)));
            let short = |options: &mut Options| options.deadline = deadline;
            machine.run(world, short, |node: &Node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                call(&op, &case, node).unwrap();
                together.wait();
                let began = Instant::now();
                let tried = (node.rank.get() != 1).then(|| {
                    let returned = call(&op, &case, node).is_ok();
                    (returned, began.elapsed(), op.status(), call(&op, &case, node).err())
                });
                // Before anything is asserted: a rank that panicked would leave the others here.
                together.wait();
                if let Some((returned, waited, status, again)) = tried {
                    let fault = status.unwrap_err();
                    assert!(returned && waited >= deadline && waited < deadline + Duration::from_secs(2), "{waited:?}, {fault}");
                    match &fault {
                        Fault::Timeout { rank, late, .. } => {
                            assert_eq!((*rank, late.as_slice()), (node.rank, [Rank::new(1)].as_slice()), "{fault}");
                        }
                        other => panic!("{other}"),
                    }
                    assert!(matches!(again, Some(CallError::Transport(TransportError::Broken { .. }))), "{again:?}");
                }
            });
            // The devices and NCCL still work.
            machine.run(world, suite::defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
            });
        }
    });
}

#[test]
fn one_node_is_refused_and_so_are_uneven_ones() {
    let refused = |nodes: Option<u32>| {
        let worlds = World::local(2).unwrap();
        std::thread::scope(|scope| {
            let rank = |world: World| {
                let options = Options { select: Select::Mixed, nodes, ..Options::default() };
                scope.spawn(move || Communicator::connect_blocking(&world, options).map(drop).unwrap_err())
            };
            let ranks: Vec<_> = worlds.into_iter().map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for (nodes, word) in [(Some(1), "all ranks are of one node"), (None, "FLUX_NODES"), (Some(3), "cannot be dealt evenly")] {
        for error in refused(nodes) {
            assert!(matches!(&error, ConnectError::Unusable { select: Select::Mixed, why } if why.contains(word)), "{error}");
        }
    }
}
