//! What must hold on every machine. Each function is one test; the binaries give them their machine.

use super::{AnyOp, Case, Machine, Node, OPS, Plan, Values};
use flux_core::program::{Chunk, Schedule};
use flux_core::tile::Raster;
use flux_core::{DType, OpKind, Rank};
use flux_kernels::Element;
use flux_ops::{BuildError, CallError, Layout, Location, RawTensor, TensorMut, TensorRef};
use flux_transport::{Fault, Options, Stream, TransportError};
use half::{bf16, f16};
use std::sync::Barrier;
use std::time::Duration;

/// Elements of the tests: on the host and on a device.
pub trait Number: Element + cudarc::driver::DeviceRepr {}
impl Number for bf16 {}
impl Number for f16 {}

const WORLDS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

fn defaults(_: &mut Options) {}

/// Extents for a world: a row block of 128 and one of a single row in each shard, tails of columns and of the inner dimension. On GPUs, where
/// the tests are optimised, several column blocks and pipeline stages too.
fn ragged(machine: Machine, op: OpKind, world: u32) -> [usize; 3] {
    let w = world as usize;
    match (op, machine) {
        (OpKind::AllGatherGemm, Machine::Host) => [129 * w, 40 * w, 72],
        (OpKind::GemmReduceScatter, Machine::Host) => [129 * w, 136, 24 * w],
        (OpKind::AllGatherGemm, Machine::Gpus(_)) => [129 * w, 328 * w, 456],
        (OpKind::GemmReduceScatter, Machine::Gpus(_)) => [129 * w, 584, 392 * w],
    }
}

/// One call on fresh buffers.
fn call<T: Number>(op: &AnyOp<T>, case: &Case<T>, node: &Node) -> Result<Vec<T>, CallError> {
    let p = &case.problem;
    let shape = |s: flux_core::problem::Shape| (s.rows as usize, s.cols as usize);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let (rows, cols) = shape(p.y_shape());
    let mut y = node.poisoned(rows * cols);
    let (x, w) = (node.view(&x, shape(p.x_shape())), node.view(&w, shape(p.w_shape())));
    op.forward(&x, &w, &mut node.view_mut(&mut y, (rows, cols)), node.stream())?;
    Ok(node.download(&y))
}

fn equals_the_exact_result<T: Number>(machine: Machine) {
    for world in machine.worlds(&WORLDS) {
        for op in OPS {
            let case = Case::<T>::new(op, ragged(machine, op, world), world, Values::Integers, u64::from(world));
            let expected = case.expected();
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                let y = call(&op, &case, node).unwrap();
                case.assert_equal(&expected, node.rank, &y, &op.explain());
                op.status().unwrap();
            });
        }
    }
}

pub fn bf16_integers_give_the_exact_result(machine: Machine) {
    equals_the_exact_result::<bf16>(machine);
}

pub fn f16_integers_give_the_exact_result(machine: Machine) {
    equals_the_exact_result::<f16>(machine);
}

fn stays_within_the_bound<T: Number>(machine: Machine) {
    for world in machine.worlds(&[1, 3, 4]) {
        for op in OPS {
            let case = Case::<T>::new(op, ragged(machine, op, world), world, Values::Reals, 7);
            let expected = case.expected();
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                case.assert_close(&expected, node.rank, &call(&op, &case, node).unwrap(), &op.explain());
            });
        }
    }
}

pub fn random_numbers_stay_within_the_derived_bound(machine: Machine) {
    stays_within_the_bound::<bf16>(machine);
    stays_within_the_bound::<f16>(machine);
}

/// Chunks and rasters, on shards of three by three tiles, the last ones ragged.
pub fn no_schedule_changes_a_bit(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3, 5]) {
        for (op, tile) in OPS.into_iter().flat_map(|op| machine.tiles().into_iter().map(move |tile| (op, tile))) {
            let (w, m, n) = (world as usize, 2 * tile.m as usize + 1, 2 * tile.n as usize + 8);
            let shape = if op == OPS[0] { [m * w, n * w, 72] } else { [m * w, n, 40 * w] };
            let case = Case::<bf16>::new(op, shape, world, Values::Reals, 11);
            let expected = case.expected();
            machine.run(world, defaults, |node| {
                let mut first: Option<Vec<bf16>> = None;
                for chunk in [Chunk::Shard, Chunk::Tiles(1), Chunk::Tiles(2), Chunk::Tiles(4)] {
                    for raster in [Raster::RowsFastest, Raster::ColumnsFastest, Raster::RowGroups(2)] {
                        let plan = Plan { schedule: Some(Schedule { tile, chunk, raster }), ..Plan::default() };
                        let op = AnyOp::of(&case, plan, node);
                        let y = call(&op, &case, node).unwrap();
                        case.assert_close(&expected, node.rank, &y, &op.explain());
                        let first = first.get_or_insert_with(|| y.clone());
                        assert!(*first == y, "other bits with {}", op.explain());
                    }
                }
            });
        }
    }
}

/// The same inputs on two communicators, with one worker and with several.
pub fn runs_give_the_same_bits(machine: Machine) {
    for world in machine.worlds(&[2, 4]) {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(machine, op, world), world, Values::Reals, 13);
            let run = |workers| {
                let plan = Plan { workers: Some(workers), ..Plan::default() };
                machine.run(world, defaults, |node| call(&AnyOp::of(&case, plan, node), &case, node).unwrap())
            };
            let first = run(1);
            assert!(first == run(1) && first == run(3), "{}: bits differ between runs", case.problem);
        }
    }
}

/// Two ops of different kind and size, call by call, on one communicator and so in one workspace.
pub fn ops_share_a_communicator_and_its_workspace(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3]) {
        let shapes = |op| match op {
            OpKind::AllGatherGemm => [40 * world as usize, 24 * world as usize, 64],
            OpKind::GemmReduceScatter => [136 * world as usize, 144, 24 * world as usize],
        };
        let cases = |op| -> Vec<_> {
            let case = |seed| Case::<bf16>::new(op, shapes(op), world, Values::Integers, seed);
            (0..4).map(case).map(|case| (case.expected(), case)).collect()
        };
        let (ag, rs) = (cases(OPS[0]), cases(OPS[1]));
        machine.run(world, defaults, |node| {
            let small = AnyOp::of(&ag[0].1, Plan::default(), node);
            let first = call(&small, &ag[0].1, node).unwrap();
            ag[0].1.assert_equal(&ag[0].0, node.rank, &first, "before the workspace grew");
            // Growing it moves it.
            let large = AnyOp::of(&rs[0].1, Plan::default(), node);
            for round in 0..12 {
                for (op, cases) in [(&small, &ag), (&large, &rs), (&large, &rs)] {
                    let (expected, case) = &cases[round % cases.len()];
                    case.assert_equal(expected, node.rank, &call(op, case, node).unwrap(), &format!("round {round}"));
                }
            }
        });
    }
}

/// `calls` calls in a row on the same buffers with changing data, each result compared.
pub fn many_calls_in_a_row(machine: Machine, calls: usize) {
    for world in machine.worlds(&[2, 8]) {
        for op in OPS {
            let w = world as usize;
            let shape = if op == OPS[0] { [16 * w, 8 * w, 16] } else { [16 * w, 16, 8 * w] };
            let cases: Vec<_> =
                (0..5).map(|seed| Case::<f16>::new(op, shape, world, Values::Integers, seed)).map(|case| (case.expected(), case)).collect();
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&cases[0].1, Plan::default(), node);
                for i in 0..calls {
                    let (expected, case) = &cases[i % cases.len()];
                    case.assert_equal(expected, node.rank, &call(&op, case, node).unwrap(), &format!("call {i}"));
                }
                op.status().unwrap();
            });
        }
    }
}

/// Each rank in turn comes late.
pub fn a_late_rank_is_waited_for(machine: Machine) {
    for world in machine.worlds(&[3, 4]) {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(machine, op, world), world, Values::Integers, 17);
            let expected = case.expected();
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                for late in 0..3 * world {
                    if node.rank.get() == late % world {
                        std::thread::sleep(Duration::from_millis(u64::from(7 + 13 * late % 31)));
                    }
                    case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), &format!("rank {} late", late % world));
                }
            });
        }
    }
}

/// Operands inside larger matrices; what lies between the rows of `y` stays.
pub fn row_strides_are_honoured(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3]) {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(machine, op, world), world, Values::Integers, 19);
            let expected = case.expected();
            machine.run(world, defaults, |node| {
                let strided = |s: flux_core::problem::Shape, gap| Layout::strided(s.rows as usize, s.cols as usize, s.cols as usize + gap);
                let (p, mark) = (&case.problem, bf16::from_f32(-77.0));
                let spread = |dense: &[bf16], layout: Layout| {
                    let rows = dense.chunks_exact(layout.cols);
                    rows.flat_map(|row| row.iter().copied().chain((layout.cols..layout.row_stride).map(|_| mark))).collect::<Vec<_>>()
                };
                let (lx, lw, ly) = (strided(p.x_shape(), 8), strided(p.w_shape(), 24), strided(p.y_shape(), 16));
                let x = node.upload(&spread(&case.x(node.rank), lx));
                let w = node.upload(&spread(&case.w(node.rank), lw));
                let mut y = node.upload(&vec![mark; ly.rows * ly.row_stride]);
                let op = AnyOp::of(&case, Plan::default(), node);
                op.forward(&node.view(&x, lx), &node.view(&w, lw), &mut node.view_mut(&mut y, ly), node.stream()).unwrap();
                let y = node.download(&y);
                let dense: Vec<_> = y.chunks_exact(ly.row_stride).flat_map(|row| &row[..ly.cols]).copied().collect();
                case.assert_equal(&expected, node.rank, &dense, "strided");
                assert!(y.chunks_exact(ly.row_stride).all(|row| row[ly.cols..].iter().all(|&e| e == mark)), "written between rows");
            });
        }
    }
}

/// One rank makes every bad call there is, the others none: had one of them been launched, the ranks' epochs would be out of step.
pub fn a_refused_call_launches_nothing(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3]) {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(machine, op, world), world, Values::Integers, 23);
            let expected = case.expected();
            machine.run(world, defaults, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                if node.rank.get() == world - 1 {
                    make_every_bad_call(&op, &case, node);
                }
                case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), "after refused calls");
            });
        }
    }
}

fn make_every_bad_call(op: &AnyOp<bf16>, case: &Case<bf16>, node: &Node) {
    let p = &case.problem;
    let dense = |s: flux_core::problem::Shape| Layout::dense(s.rows as usize, s.cols as usize);
    let (lx, lw, ly) = (dense(p.x_shape()), dense(p.w_shape()), dense(p.y_shape()));
    let smaller = |l: Layout| [Layout::dense(l.rows - 1, l.cols), Layout::strided(l.rows, l.cols - 8, l.cols)];
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let mut y = node.poisoned::<bf16>(ly.rows * ly.cols);
    let mut refused = |lx, lw, ly| {
        let (x, w) = (node.view(&x, lx), node.view(&w, lw));
        op.forward(&x, &w, &mut node.view_mut(&mut y, ly), node.stream()).unwrap_err()
    };
    let named = |error: CallError, name: &str, found: Layout| match error {
        CallError::Shape { operand, found: in_error, .. } => assert_eq!((operand, in_error), (name, found)),
        other => panic!("{other}"),
    };
    for wrong in smaller(lx) {
        named(refused(wrong, lw, ly), "x", wrong);
    }
    for wrong in smaller(lw) {
        named(refused(lx, wrong, ly), "w", wrong);
    }
    for wrong in smaller(ly) {
        named(refused(lx, lw, wrong), "y", wrong);
    }
    assert!(node.download(&y).iter().all(|e| e.is_nan()), "y was written by a refused call");
    make_every_misplaced_call(op, case, node);
}

/// Operands of the right shape in the wrong place: another device, memory shared with `y`, a stream of another kind.
fn make_every_misplaced_call(op: &AnyOp<bf16>, case: &Case<bf16>, node: &Node) {
    let p = &case.problem;
    let dense = |s: flux_core::problem::Shape| Layout::dense(s.rows as usize, s.cols as usize);
    let (lx, lw, ly) = (dense(p.x_shape()), dense(p.w_shape()), dense(p.y_shape()));
    let (at_w, at_y) = (lx.span(), lx.span() + lw.span());
    let memory = node.poisoned::<bf16>(at_y + ly.span());
    let (start, here) = {
        let view = node.view(&memory, (1, at_y + ly.span()));
        (node.address(&memory), view.location())
    };
    let elsewhere = if here == Location::Host { Location::Cuda(0) } else { Location::Host };
    let raw = |layout: Layout, at: usize| RawTensor {
        address: start + 2 * at as u64,
        dtype: DType::Bf16,
        location: here,
        layout,
        available: layout.span(),
    };
    let call = |x: RawTensor, w: RawTensor, y: RawTensor, stream| {
        // SAFETY: all lie inside `memory`, which outlives the call, and what is refused does not access them.
        let (x, w, mut y) =
            unsafe { (TensorRef::<bf16>::from_raw(x).unwrap(), TensorRef::from_raw(w).unwrap(), TensorMut::from_raw(y).unwrap()) };
        op.forward(&x, &w, &mut y, stream).unwrap_err()
    };
    let (x, w, y) = (raw(lx, 0), raw(lw, at_w), raw(ly, at_y));
    let named = |error: CallError, name: &str| match error {
        CallError::Location { operand, found, .. } => assert_eq!((operand, found), (name, elsewhere)),
        other => panic!("{other}"),
    };
    named(call(RawTensor { location: elsewhere, ..x }, w, y, node.stream()), "x");
    named(call(x, RawTensor { location: elsewhere, ..w }, y, node.stream()), "w");
    named(call(x, w, RawTensor { location: elsewhere, ..y }, node.stream()), "y");
    for (at, name) in [(at_y - 8, "w"), (0, "x")] {
        match call(x, w, raw(ly, at), node.stream()) {
            CallError::Overlap { operand, .. } => assert_eq!(operand, name),
            other => panic!("{other}"),
        }
    }
    // SAFETY: never used: a host rank refuses it for its kind.
    let foreign = if here == Location::Host { unsafe { Stream::from_raw(2) } } else { Stream::Host };
    let refused = call(x, w, y, foreign);
    assert!(matches!(refused, CallError::Transport(TransportError::WrongStream { .. })), "{refused}");
}

/// What the ranks were told differs: all of them hear who asked for what, and can still build the right op.
pub fn ranks_that_disagree_are_told_so(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        let case = Case::<bf16>::new(OPS[0], ragged(machine, OPS[0], world), world, Values::Integers, 29);
        let expected = case.expected();
        machine.run(world, defaults, |node| {
            let odd = node.rank.get() == 1;
            let texts = node.comm.exchange(
                AnyOp::<bf16>::build(
                    OPS[0],
                    [if odd { 64 } else { 32 } * world as usize, 8 * world as usize, 8],
                    Plan::default(),
                    &node.comm,
                )
                .map_err(|e| match e {
                    BuildError::Disagreement { .. } => e.to_string(),
                    other => panic!("{other}"),
                })
                .unwrap_err()
                .as_bytes(),
            );
            let texts = texts.unwrap();
            assert!(texts.iter().all(|text| *text == texts[0]), "the ranks were told different things");
            let text = String::from_utf8(texts[0].clone()).unwrap();
            assert!(text.contains(&format!("rank 1 `ag_gemm m={}", 64 * world)), "{text}");

            let op = AnyOp::of(&case, Plan::default(), node);
            case.assert_equal(&expected, node.rank, &call(&op, &case, node).unwrap(), "after a disagreement");
        });
    }
}

/// Shapes and options that cannot be: the same typed error on every rank.
pub fn what_cannot_be_built_is_refused_on_every_rank(machine: Machine) {
    for world in machine.worlds(&[1, 3]) {
        let w = world as usize;
        machine.run(world, defaults, |node| {
            let refused = |op, shape, plan| AnyOp::<bf16>::build(op, shape, plan, &node.comm).unwrap_err().to_string();
            let shape_refused = |op, shape| refused(op, shape, Plan::default());
            assert!(shape_refused(OPS[0], [0, 8 * w, 8]).starts_with("m = 0"));
            assert!(shape_refused(OPS[1], [8 * w, 0, 8 * w]).starts_with("n = 0"));
            assert!(shape_refused(OPS[0], [8 * w, 8 * w, 0]).starts_with("k = 0"));
            assert!(shape_refused(OPS[0], [8 * w, 8 * w, 12]).starts_with("k = 12 per rank is not a multiple of 8"));
            assert!(shape_refused(OPS[1], [8 * w, 20, 8 * w]).starts_with("n = 20 per rank is not a multiple of 8"));
            assert!(shape_refused(OPS[1], [1 << 30, 8, 8 * w]).starts_with("m = 1073741824 is above the limit"));
            if w > 1 {
                assert!(shape_refused(OPS[0], [8 * w + 1, 8 * w, 8]).contains("not divisible by the world size 3: pad m to 27"));
                assert!(shape_refused(OPS[1], [8 * w, 8, 8 * w + 8]).starts_with("k = 32 is not divisible by the world size 3"));
            }
            let good = Schedule { tile: machine.tiles()[0], chunk: Chunk::Shard, raster: Raster::RowsFastest };
            let bad = Schedule { chunk: Chunk::Tiles(0), ..good };
            assert!(refused(OPS[0], [8 * w, 8 * w, 8], Plan { schedule: Some(bad), workers: None }).starts_with("chunk = 0"));
            assert!(refused(OPS[0], [8 * w, 8 * w, 8], Plan { schedule: None, workers: Some(0) }).starts_with("workers = 0"));
            assert!(AnyOp::<bf16>::build(OPS[0], [8 * w, 8 * w, 8], Plan::default(), &node.comm).is_ok());
        });
    }
}

/// One rank fails where the others do not: they are told which, and why.
pub fn a_rank_that_cannot_build_is_named_to_the_others(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        machine.run(world, defaults, |node| {
            let plan = Plan { workers: (node.rank.get() == 1).then_some(0), ..Plan::default() };
            let shape = [8 * world as usize, 8 * world as usize, 8];
            match AnyOp::<bf16>::build(OPS[0], shape, plan, &node.comm).unwrap_err() {
                BuildError::Workers { value: 0, .. } => assert_eq!(node.rank.get(), 1),
                BuildError::Peer { rank, reason } => {
                    assert!(node.rank.get() != 1 && rank == Rank::new(1) && reason.starts_with("workers = 0"), "{reason}");
                }
                other => panic!("{other}"),
            }
            assert!(AnyOp::<bf16>::build(OPS[0], shape, Plan::default(), &node.comm).is_ok());
        });
    }
}

/// A rank never calls: every other gets a timeout that names it, and afterwards the communicator takes no call.
pub fn a_rank_that_never_calls_is_named_by_the_others(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        for op in OPS {
            let case = Case::<bf16>::new(op, ragged(machine, op, world), world, Values::Integers, 31);
            // Ranks stay until all have seen their fault: one that leaves is a fault of another kind.
            let together = Barrier::new(world as usize);
            let short = |options: &mut Options| options.deadline = Duration::from_millis(400);
            machine.run(world, short, |node| {
                let op = AnyOp::of(&case, Plan::default(), node);
                call(&op, &case, node).unwrap();
                together.wait();
                if node.rank.get() != 1 {
                    let fault = match call(&op, &case, node) {
                        Err(CallError::Fault(fault)) => fault,
                        // On CUDA the call returns before the device gives up.
                        Ok(_) => op.status().unwrap_err(),
                        Err(other) => panic!("{other}"),
                    };
                    match fault {
                        Fault::Timeout { rank, peer, .. } => assert_eq!((rank, peer), (node.rank, Rank::new(1)), "{fault}"),
                        other => panic!("{other}"),
                    }
                    assert!(op.status().is_err());
                    let refused = call(&op, &case, node).unwrap_err();
                    assert!(matches!(refused, CallError::Transport(_)), "{refused}");
                }
                together.wait();
            });
        }
    }
}

/// What a builder says before the build is what the op and the communicator then have.
pub fn the_workspace_is_known_before_it_is_taken(machine: Machine) {
    for world in machine.worlds(&[1, 4]) {
        machine.run(world, defaults, |node| {
            let w = world as usize;
            let builder = flux_ops::GemmReduceScatter::<bf16>::builder(256 * w, 512, 64 * w);
            let before = builder.workspace(node.comm.world_size()).unwrap();
            let op = builder.build(&node.comm).unwrap();
            assert_eq!(op.workspace(), before);
            let held = node.comm.workspace_size();
            assert_eq!(held.max(before), held);
            // All peers' partial tiles, in two halves: 128x128 tiles of 2-byte elements.
            assert_eq!(before.half_bytes, (w as u64 - 1) * 256 * 512 * 2);
            let explained = op.explain();
            for part in ["gemm_rs m=", "tile ", "worker", "workspace: ", "bytes"] {
                assert!(explained.contains(part), "`{part}` is missing in: {explained}");
            }
        });
    }
}
