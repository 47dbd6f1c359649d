//! Calls after one another: several ops, changing data, late ranks, operands inside larger
//! matrices, a rank that never comes.

use super::{Case, Check, Machine, at_once, build_case, call, defaults, unaligned};
use crate::common::lateness::assert_soon;
use crate::common::{Meeting, OPS, OpOptions, Values, scaled};
use flux_core::problem::Shape;
use flux_core::{OpKind, Rank};
use flux_ops::{CallError, Layout};
use flux_transport::{Fault, Options, TransportError};
use half::{bf16, f16};
use std::time::{Duration, Instant};

/// Two ops of different kind and size, call by call, on one communicator and so in one workspace.
pub fn ops_share_a_communicator_and_its_workspace(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3]) {
        let shapes = |op| match op {
            OpKind::AllGatherGemm => [40 * world as usize, 24 * world as usize, 64],
            OpKind::GemmReduceScatter | OpKind::GemmAllReduce => {
                [136 * world as usize, 144, 24 * world as usize]
            }
        };
        let cases = |op| -> Vec<_> {
            let case = |seed| Case::<bf16>::new(op, shapes(op), world, Values::Integers, seed);
            (0..4).map(case).map(|case| (case.expected_on(machine), case)).collect()
        };
        let (ag, rs) = (cases(OPS[0]), cases(OPS[1]));
        machine.run(world, defaults, |node| {
            let small = build_case(&ag[0].1, OpOptions::default(), node);
            let first = call(&small, &ag[0].1, node).unwrap();
            ag[0].1.assert_equal(&ag[0].0, &small, node.rank, &first, "before the workspace grew");
            // Growing it moves it.
            let large = build_case(&rs[0].1, OpOptions::default(), node);
            for round in 0..12 {
                for (op, cases) in [(&small, &ag), (&large, &rs), (&large, &rs)] {
                    let (expected, case) = &cases[round % cases.len()];
                    case.assert_equal(
                        expected,
                        op,
                        node.rank,
                        &call(op, case, node).unwrap(),
                        &format!("round {round}"),
                    );
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
            let cases: Vec<_> = (0..5)
                .map(|seed| Case::<f16>::new(op, shape, world, Values::Integers, seed))
                .map(|case| (case.expected_on(machine), case))
                .collect();
            machine.run(world, defaults, |node| {
                let op = build_case(&cases[0].1, OpOptions::default(), node);
                for i in 0..calls {
                    let (expected, case) = &cases[i % cases.len()];
                    case.assert_equal(
                        expected,
                        &op,
                        node.rank,
                        &call(&op, case, node).unwrap(),
                        &format!("call {i}"),
                    );
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
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 17);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = build_case(&case, OpOptions::default(), node);
                for late in 0..3 * world {
                    if node.rank.get() == late % world {
                        std::thread::sleep(Duration::from_millis(u64::from(7 + 13 * late % 31)));
                    }
                    case.assert_equal(
                        &expected,
                        &op,
                        node.rank,
                        &call(&op, &case, node).unwrap(),
                        &format!("rank {} late", late % world),
                    );
                }
            });
        }
    }
}

/// Operands inside larger matrices; what lies between the rows of `y` stays.
pub fn row_strides_are_honoured(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3]) {
        for op in OPS {
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 19);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let strided = |s: Shape, gap| {
                    Layout::strided(s.rows as usize, s.cols as usize, s.cols as usize + gap)
                };
                let (p, mark) = (&case.problem, bf16::from_f32(-77.0));
                let spread = |dense: &[bf16], layout: Layout| {
                    let rows = dense.chunks_exact(layout.cols);
                    rows.flat_map(|row| {
                        row.iter().copied().chain((layout.cols..layout.row_stride).map(|_| mark))
                    })
                    .collect::<Vec<_>>()
                };
                let (lx, lw, ly) = (
                    strided(p.x_shape(node.rank), 8),
                    strided(p.w_shape(node.rank), 24),
                    strided(p.y_shape(node.rank), 16),
                );
                let x = node.upload(&spread(&case.x(node.rank), lx));
                let w = node.upload(&spread(&case.w(node.rank), lw));
                let mut y = node.upload(&vec![mark; ly.rows * ly.row_stride]);
                let op = build_case(&case, OpOptions::default(), node);
                op.forward(
                    &node.view(&x, lx),
                    &node.view(&w, lw),
                    &mut node.view_mut(&mut y, ly),
                    node.stream(),
                )
                .unwrap();
                let y = node.download(&y);
                let dense: Vec<_> = y
                    .chunks_exact(ly.row_stride)
                    .flat_map(|row| &row[..ly.cols])
                    .copied()
                    .collect();
                case.assert_equal(&expected, &op, node.rank, &dense, "strided");
                assert!(
                    y.chunks_exact(ly.row_stride)
                        .all(|row| row[ly.cols..].iter().all(|&e| e == mark)),
                    "written between rows"
                );
            });
        }
    }
}

/// A rank never calls: every other gets a timeout that names it, and afterwards the communicator
/// takes no call.
pub fn a_rank_that_never_calls_is_named_by_the_others(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        for op in OPS {
            let case =
                Case::<bf16>::new(op, unaligned(machine, op, world), world, Values::Integers, 31);
            // Ranks stay until all have seen their fault: one that leaves is a fault of another
            // kind.
            let together = Meeting::new(world as usize);
            // Builds have the same deadline, and on a device load a kernel.
            let deadline =
                scaled(Duration::from_millis(if machine == Machine::Host { 800 } else { 3000 }));
            machine
                .run(world, defaults, |node| drop(build_case(&case, OpOptions::default(), node)));
            machine.run(
                world,
                |options: &mut Options| options.deadline = deadline,
                |node| {
                    let op = build_case(&case, OpOptions::default(), node);
                    call(&op, &case, node).unwrap();
                    together.wait();
                    if node.rank.get() != 1 {
                        let fault = match call(&op, &case, node) {
                            Err(CallError::Fault(failure)) => {
                                let text = failure.to_string();
                                assert!(
                                    text.contains(&format!("({} ", case.problem.op()))
                                        && text.contains("; rank 1: "),
                                    "{text}"
                                );
                                failure.fault
                            }
                            // On CUDA the call returns before the device gives up.
                            Ok(_) => op.status().unwrap_err(),
                            Err(other) => panic!("{other}"),
                        };
                        // With what every rank was doing.
                        let why = node.comm.failure().map_or_else(String::new, ToString::to_string);
                        match fault {
                            Fault::Timeout { rank, peer, ref late, .. } => {
                                assert_eq!(
                                    (rank, late.as_slice()),
                                    (node.rank, [Rank::new(1)].as_slice()),
                                    "{why}"
                                );
                                // What copy engines fetch of one peer stands behind what another
                                // has not sent.
                                assert!(
                                    peer == Rank::new(1) || matches!(machine, Machine::Staged(_)),
                                    "{fault}"
                                );
                            }
                            other => panic!("{other}; {why}"),
                        }
                        assert!(op.status().is_err());
                        let refused = call(&op, &case, node).unwrap_err();
                        assert!(matches!(refused, CallError::Transport(_)), "{refused}");
                    }
                    together.wait();
                },
            );
        }
    }
}

/// One rank calls two ops in another order: every rank's first call fails, long before the
/// deadline, though as many signals come as each op awaits.
pub fn calls_in_different_orders_fail_on_every_rank(machine: Machine) {
    for world in machine.worlds(&[2, 3, 4]) {
        let (w, k) = (world as usize, if machine == Machine::Host { 24 } else { 64 });
        let case = |op, [m, n, k]: [usize; 3]| {
            Case::<bf16>::new(op, [m * w, n * w, k * w], world, Values::Integers, 37)
        };
        let (ag, rs) = (case(OPS[0], [40, 24, k]), case(OPS[1], [40, 24, k]));
        let [other, other_rs] = [OPS[0], OPS[1]].map(|op| case(op, [48, 24, k]));
        // A GEMM-AllReduce has operands of the same shapes as the GEMM-ReduceScatter. NCCL's
        // AllReduce meets no messages, so there the deadline ends such calls.
        let ar = case(OPS[2], [40, 24, k]);
        let compares = machine.ops().contains(&OPS[2]) && !matches!(machine, Machine::Messages(_));
        let with_all_reduce = [[&ar, &rs], [&rs, &ar]].into_iter().filter(|_| compares);
        for cases in [[&ag, &rs], [&ag, &other], [&rs, &ag], [&rs, &other_rs]]
            .into_iter()
            .chain(with_all_reduce)
        {
            let together = Meeting::new(w);
            let deadline = scaled(Duration::from_mins(1));
            machine.run(
                world,
                |options: &mut Options| options.deadline = deadline,
                |node| {
                    let ops = cases.map(|case| build_case(case, OpOptions::default(), node));
                    together.wait();
                    let begun = Instant::now();
                    let first = usize::from(node.rank.get() == 1);
                    let found = match call(&ops[first], cases[first], node) {
                        Err(CallError::Fault(failure)) => Ok(failure.fault),
                        // Another's fault came first.
                        Err(CallError::Transport(TransportError::Broken { fault })) => Ok(fault),
                        // On CUDA the call returns before the device gives up.
                        Ok(_) => ops[first].status().err().ok_or("no fault".to_owned()),
                        Err(other) => Err(other.to_string()),
                    };
                    let took = begun.elapsed();
                    // Before anything is asserted: a rank that failed here would leave the others
                    // waiting.
                    together.wait();
                    let fault = found.unwrap();
                    let text = fault.to_string();
                    // Who hears first of another's failure says whose it is.
                    assert!(
                        matches!(fault, Fault::Disagreed { .. } | Fault::Aborted { .. })
                            && text.contains("other calls"),
                        "rank {}: {text}",
                        node.rank
                    );
                    assert_soon(took, at_once(machine));
                },
            );
        }
    }
}
