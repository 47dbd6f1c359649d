//! Ops whose rows change from call to call: results, agreement, refusals, and what the ops of a
//! communicator share.

use super::{Case, Check, Machine, Node, at_once, build, call, defaults, layouts};
use crate::common::lateness::assert_soon;
use crate::common::{Meeting, OPS, OpOptions, Values, scaled};
use flux_core::OpKind;
use flux_ops::internal::limit_programs;
use flux_ops::{BuildError, CallError, FusedLinear, Layout};
use flux_transport::{Fault, HeldBytes, Options, TransportError};
use half::bf16;
use std::time::{Duration, Instant};

/// Most rows of a call.
const MOST: usize = 211;

/// Global extents with so many rows.
fn shape(machine: Machine, op: OpKind, world: u32, m: usize) -> [usize; 3] {
    // From three ranks on the first third of them has 8 columns or elements of `k` more.
    let (w, more) = (world as usize, world as usize / 3 * 8);
    match (op, machine) {
        (OpKind::AllGatherGemm, Machine::Host) => [m, 24 * w + more, 40],
        (_, Machine::Host) => [m, 40, 24 * w + more],
        (OpKind::AllGatherGemm, _) => [m, 264 * w + more, 456],
        (_, _) => [m, 520, 200 * w + more],
    }
}

/// Cases of one layer, each with its expected result, by rows.
fn cases(
    machine: Machine,
    op: OpKind,
    world: u32,
    rows: &[usize],
) -> Vec<(Case<bf16>, flux_testkit::Expected)> {
    let case = |&rows: &usize| {
        Case::<bf16>::new(op, shape(machine, op, world, rows), world, Values::Integers, 71)
    };
    rows.iter().map(case).map(|case| (case.clone(), case.expected_on(machine))).collect()
}

/// A call without rows.
fn empty_call(op: &FusedLinear, case: &Case<bf16>, node: &Node) -> Result<(), CallError> {
    let (lx, lw, ly) = layouts(case, node.rank);
    let without = |layout: Layout| Layout::dense(0, layout.cols);
    let (x, w, mut y) =
        (node.poisoned::<bf16>(8), node.upload(&case.w(node.rank)), node.poisoned::<bf16>(8));
    op.forward(
        &node.view(&x, without(lx)),
        &node.view(&w, lw),
        &mut node.view_mut(&mut y, without(ly)),
        node.stream(),
    )?;
    assert!(node.download(&y).iter().all(|e| e.is_nan()), "a call without rows wrote to y");
    Ok(())
}

/// Each call has other rows than the one before, alternating between two ops, and some have none.
pub fn rows_change_with_every_call(machine: Machine) {
    for world in machine.worlds(&[1, 2, 3, 4]) {
        let rows = [1, MOST, 7, 99, 2, 128, 48, 17, 5, 160];
        let layers = OPS.map(|op| cases(machine, op, world, &rows));
        machine.run(world, defaults, |node| {
            let build = |op| {
                build::<bf16>(
                    op,
                    shape(machine, op, world, MOST),
                    OpOptions { workers: node.workers, ..Default::default() },
                    &node.comm,
                )
            };
            let ops = OPS.map(|op| build(op).unwrap());
            for turn in 0..4 * rows.len() {
                for (op, cases) in ops.iter().zip(&layers) {
                    let (case, expected) = &cases[(turn * 7 + turn / rows.len()) % rows.len()];
                    if turn % 5 == 3 {
                        empty_call(op, case, node).unwrap();
                    }
                    case.assert_equal(
                        expected,
                        op,
                        node.rank,
                        &call(op, case, node).unwrap(),
                        &format!("turn {turn}"),
                    );
                }
            }
            ops[0].status().unwrap();
        });
    }
}

/// Programs have room for two or three at once: others are evicted, and made again when their turn
/// comes.
pub fn evicted_programs_are_made_again(machine: Machine) {
    const ROOM: u64 = 12 << 10;
    for world in machine.worlds(&[1, 2, 3]) {
        let rows = [3, 120, 27, MOST, 64];
        let plan = OpOptions::of(flux_core::Plan::of(machine.tiles()[0]));
        let layers = OPS.map(|op| cases(machine, op, world, &rows));
        machine.run(world, defaults, |node| {
            limit_programs(&node.comm, ROOM);
            let options = OpOptions { workers: node.workers, ..plan };
            let ops = OPS.map(|op| {
                build::<bf16>(op, shape(machine, op, world, MOST), options, &node.comm).unwrap()
            });
            for turn in 0..60 {
                for (op, cases) in ops.iter().zip(&layers) {
                    let (case, expected) = &cases[turn % rows.len()];
                    case.assert_equal(
                        expected,
                        op,
                        node.rank,
                        &call(op, case, node).unwrap(),
                        &format!("turn {turn}"),
                    );
                }
            }
            // What never has room is refused when it is built.
            let many = shape(machine, OPS[0], world, 100_000);
            match build::<bf16>(OPS[0], many, options, &node.comm).unwrap_err() {
                BuildError::ProgramMemory { bytes, limit, .. } => {
                    assert!(bytes > limit && limit == ROOM);
                }
                other => panic!("{other}"),
            }
            let (case, expected) = &layers[0][0];
            case.assert_equal(
                expected,
                &ops[0],
                node.rank,
                &call(&ops[0], case, node).unwrap(),
                "after a refused build",
            );
        });
    }
}

/// Prepared programs stay; one more that does not fit beside them is an error, and changes nothing.
pub fn prepared_programs_stay(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        let cases = cases(machine, OPS[1], world, &[16, 1]);
        machine.run(world, defaults, |node| {
            limit_programs(&node.comm, 8192);
            let options = OpOptions {
                workers: node.workers,
                ..OpOptions::of(flux_core::Plan::of(machine.tiles()[0]))
            };
            let op =
                build::<bf16>(OPS[1], shape(machine, OPS[1], world, MOST), options, &node.comm)
                    .unwrap();
            op.prepare(&[16, 0]).unwrap();
            let refused = (1..=MOST).find_map(|rows| op.prepare(&[rows]).err());
            assert!(
                matches!(&refused, Some(CallError::Program { source, .. })
                    if matches!(**source, BuildError::ProgramMemory { .. })),
                "{refused:?}"
            );
            let (case, expected) = &cases[0];
            case.assert_equal(
                expected,
                &op,
                node.rank,
                &call(&op, case, node).unwrap(),
                "a prepared call",
            );
        });
    }
}

/// Of other rows than the peers', or none where they have some: all ranks fail, long before the
/// deadline.
pub fn calls_with_other_rows_fail_on_every_rank(machine: Machine) {
    for world in machine.worlds(&[2, 3]) {
        for op in OPS {
            let cases = cases(machine, op, world, &[16, 17]);
            // Rows of rank 1's first two calls, where the others make two of 16.
            for calls in [&[17, 16][..], &[0, 16]] {
                let (together, deadline) =
                    (Meeting::new(world as usize), scaled(Duration::from_mins(1)));
                machine.run(
                    world,
                    |options: &mut Options| options.deadline = deadline,
                    |node| {
                        let options = OpOptions { workers: node.workers, ..OpOptions::default() };
                        let built =
                            build::<bf16>(op, shape(machine, op, world, MOST), options, &node.comm)
                                .unwrap();
                        together.wait();
                        let begun = Instant::now();
                        let mut fault = None;
                        for &rows in if node.rank.get() == 1 { calls } else { &[16, 16] } {
                            let made = match rows {
                                0 => empty_call(&built, &cases[0].0, node),
                                rows => {
                                    call(&built, &cases[usize::from(rows == 17)].0, node).map(drop)
                                }
                            };
                            fault = fault.or(match made {
                                Err(CallError::Fault(failure)) => Some(failure.fault),
                                Err(CallError::Transport(TransportError::Broken { fault })) => {
                                    Some(fault)
                                }
                                Err(other) => panic!("{other}"),
                                // On CUDA a call returns before the device gives up.
                                Ok(()) => built.status().err(),
                            });
                        }
                        let took = begun.elapsed();
                        together.wait();
                        let text = fault.as_ref().map_or_else(String::new, ToString::to_string);
                        assert!(
                            matches!(fault, Some(Fault::Disagreed { .. } | Fault::Aborted { .. }))
                                && text.contains("other calls"),
                            "rank {}, {calls:?}: {text}",
                            node.rank
                        );
                        assert_soon(took, at_once(machine));
                    },
                );
            }
        }
    }
}

/// Rows that are too many or do not agree: typed, and nothing is launched or lost.
pub fn rows_that_do_not_fit_are_refused(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        for op in OPS {
            let cases = cases(machine, op, world, &[16, 32, MOST + 1]);
            machine.run(world, defaults, |node| {
                let options = OpOptions { workers: node.workers, ..OpOptions::default() };
                let built = build::<bf16>(op, shape(machine, op, world, MOST), options, &node.comm)
                    .unwrap();
                if node.rank.get() == world - 1 {
                    match call(&built, &cases[2].0, node).unwrap_err() {
                        CallError::TooManyRows { m, max_m } => {
                            assert_eq!((m, max_m), (MOST + 1, MOST));
                        }
                        other => panic!("{other}"),
                    }
                    assert!(matches!(
                        built.prepare(&[MOST + 1]),
                        Err(CallError::TooManyRows { .. })
                    ));
                    // The operand with a shard's rows is of another m.
                    let [(lx, lw, ly), (other_x, _, other_y)] =
                        [&cases[0].0, &cases[1].0].map(|case| layouts(case, node.rank));
                    let (lx, ly, name) = if op == OpKind::AllGatherGemm {
                        (other_x, ly, "x")
                    } else {
                        (lx, other_y, "y")
                    };
                    let (x, w, mut y) = (
                        node.poisoned::<bf16>(lx.span()),
                        node.poisoned(lw.span()),
                        node.poisoned::<bf16>(ly.span()),
                    );
                    let refused = built.forward(
                        &node.view(&x, lx),
                        &node.view(&w, lw),
                        &mut node.view_mut(&mut y, ly),
                        node.stream(),
                    );
                    match refused.unwrap_err() {
                        CallError::Shape { operand, m, .. } => assert_eq!((operand, m), (name, 16)),
                        other => panic!("{other}"),
                    }
                }
                let (case, expected) = &cases[1];
                case.assert_equal(
                    expected,
                    &built,
                    node.rank,
                    &call(&built, case, node).unwrap(),
                    "after refused calls",
                );
            });
        }
    }
}

/// Many ops with many numbers of rows hold what one does.
pub fn ops_hold_no_memory_of_their_own(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        let cases = OPS.map(|op| cases(machine, op, world, &[MOST, 4]));
        machine.run(world, defaults, |node| {
            let options = OpOptions { workers: node.workers, ..OpOptions::default() };
            let build = |op| {
                build::<bf16>(op, shape(machine, op, world, MOST), options, &node.comm).unwrap()
            };
            let use_all = |ops: &[FusedLinear]| {
                for (op, cases) in ops.iter().zip(&cases) {
                    for (case, _) in cases {
                        call(op, case, node).unwrap();
                    }
                }
            };
            let first = OPS.map(build);
            use_all(&first);
            let held = node.comm.memory();
            assert_ne!(held.besides_workspace(), HeldBytes::default(), "{held}");
            assert!(held.besides_workspace().device < 64 << 20, "{held}");
            let more: Vec<_> = (0..20).map(|_| OPS.map(build)).collect();
            for ops in &more {
                use_all(ops);
            }
            assert_eq!(node.comm.memory(), held, "more is held by more ops");
        });
    }
}
