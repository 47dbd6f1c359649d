//! Few rows in many calls.

use super::{call, defaults, layouts};
use crate::common::{
    Case, Check, Machine, Meeting, Memory, Node, OPS, OpOptions, Values, build, build_case, scaled,
};
use flux_core::plan::{Plan, RowMapping};
use flux_core::signal::Epoch;
use flux_core::{OpKind, Partials, TileShape};
use flux_ops::{CallError, FusedLinear, Layout};
use flux_transport::{Fault, Options, Rank, Rebuild, Wait};
use half::f16;
use std::time::Duration;

/// The rows of calls that follow each other.
const ROWS: [usize; 8] = [4, 1, 16, 7, 33, 8, 64, 1100];
/// Operands `x` of each number of rows.
const OPERANDS: usize = 3;
/// Calls after which a set's sums have been added and taken off.
const TURN: usize = 2 * OPERANDS;

/// Every way in which few rows come: of one exchange and of two, in the op's type and in fp32. A
/// Hopper GPU has products of tiles with few rows transposed.
fn ways(machine: Machine) -> [(OpKind, RowMapping, TileShape, Partials); 4] {
    let many = machine.tiles()[0];
    let few =
        if machine == Machine::Host { machine.tiles()[1] } else { TileShape::new(32, 128, 64) };
    [
        (OPS[2], RowMapping::Flattened, few, Partials::Output),
        (OPS[2], RowMapping::FlattenedTwoExchanges, many, Partials::Output),
        (OPS[1], RowMapping::Flattened, many, Partials::Output),
        (OPS[1], RowMapping::Flattened, few, Partials::F32),
    ]
}

fn columns(machine: Machine) -> usize {
    if machine == Machine::Host { 200 } else { 1000 }
}

/// Buffers of one number of rows.
struct Set {
    x: Vec<Memory<f16>>,
    w: Memory<f16>,
    y: Memory<f16>,
    layouts: (Layout, Layout, Layout),
}

impl Set {
    fn new(cases: &[Case<f16>], node: &Node) -> Self {
        let signed = |case: &Case<f16>, sign: f16| {
            let x: Vec<_> = case.x(node.rank).into_iter().map(|value| value * sign).collect();
            node.upload(&x)
        };
        let signs = [f16::ONE, f16::NEG_ONE];
        let x = signs.into_iter().flat_map(|sign| cases.iter().map(move |case| signed(case, sign)));
        let layouts = layouts(&cases[0], node.rank);
        Self {
            x: x.collect(),
            w: node.upload(&cases[0].w(node.rank)),
            y: node.upload(&vec![f16::ZERO; layouts.2.span()]),
            layouts,
        }
    }

    /// Adds the sums of the turn's `call`-th operands to `y`.
    fn call(&mut self, op: &FusedLinear, node: &Node, call: usize) {
        let (lx, lw, ly) = self.layouts;
        let (x, w) = (node.view(&self.x[call % TURN], lx), node.view(&self.w, lw));
        let mut y = node.view_mut(&mut self.y, ly);
        op.call(&x).weight(&w, &mut y).residual_in_y().on(node.stream()).unwrap();
    }
}

/// About so many calls, each of other rows than the one before. Every call adds its sums to `y`,
/// and a later one takes them off, so an element that is wrong in any call is wrong at the end. The
/// epoch wraps, and one rank after another comes late.
pub fn few_rows_leave_no_wrong_element(machine: Machine, calls: usize) {
    let columns = columns(machine);
    for world in machine.worlds(&[2, 4]) {
        let wrap = |options: &mut Options| options.first_epoch = Epoch::new(u32::MAX - 100);
        for (op, rows, tile, partials) in ways(machine) {
            let shape = |m| [m, columns, 32 * world as usize];
            // Sums are integers below 2048, which fp16 has.
            let cases = ROWS.map(|m| {
                [0, 1, 2].map(|seed| Case::<f16>::new(op, shape(m), world, Values::Integers, seed))
            });
            let expected = cases.each_ref().map(|[first, ..]| first.expected_on(machine));
            machine.run(world, wrap, |node| {
                let options = OpOptions {
                    residual: true,
                    workers: node.workers,
                    partials,
                    ..OpOptions::of(Plan { rows, ..Plan::of(tile) })
                };
                let op = build::<f16>(op, shape(ROWS[7]), options, &node.comm).unwrap();
                let mut sets = cases.each_ref().map(|cases| Set::new(cases, node));
                for call in 0..calls.div_ceil(ROWS.len()).next_multiple_of(TURN) {
                    if call % 500 == 499 && call / 500 % world as usize == node.rank.index() {
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    // Large calls are rare.
                    let large = (call / TURN).is_multiple_of(16);
                    for set in &mut sets[..ROWS.len() - usize::from(!large)] {
                        set.call(&op, node, call);
                    }
                    for ((set, cases), expected) in sets.iter().zip(&cases).zip(&expected) {
                        if call == 0 {
                            let y = node.download(&set.y);
                            cases[0].assert_equal(expected, &op, node.rank, &y, "the first call");
                        }
                    }
                }
                for (set, rows) in sets.iter().zip(ROWS) {
                    let wrong = node.download(&set.y).iter().filter(|y| **y != f16::ZERO).count();
                    assert_eq!(wrong, 0, "rank {}: wrong elements of {rows} rows", node.rank);
                }
                op.status().unwrap();
            });
        }
    }
}

/// A rank does not call: the others report its signal, and the rebuilt communicator computes the
/// exact result.
pub fn few_rows_that_do_not_come_are_named(machine: Machine) {
    let deadline = scaled(Duration::from_millis(if machine == Machine::Host { 300 } else { 3000 }));
    let late = Rank::new(1);
    for world in machine.worlds(&[2]) {
        for (kind, rows, tile, partials) in ways(machine) {
            let shape = [5, columns(machine), 32 * world as usize];
            let case =
                Case::<f16>::new(kind, shape, world, Values::Integers, 3).with_partials(partials);
            let expected = case.expected_on(machine);
            let options = OpOptions { partials, ..OpOptions::of(Plan { rows, ..Plan::of(tile) }) };
            let together = Meeting::new(world as usize);
            // Builds have the same deadline, and on a device load a kernel.
            machine.run(world, defaults, |node| drop(build_case(&case, options, node)));
            let short = |options: &mut Options| options.deadline = deadline;
            machine.run(world, short, |node| {
                let op = build_case(&case, options, node);
                call(&op, &case, node).unwrap();
                together.wait();
                if node.rank != late {
                    let fault = match call(&op, &case, node) {
                        Err(CallError::Fault(failure)) => failure.fault,
                        // On CUDA the call returns before the device gives up.
                        Ok(_) => op.status().unwrap_err(),
                        Err(other) => panic!("{other}"),
                    };
                    let Fault::Timeout { wait, late: ref named, .. } = fault else {
                        panic!("{fault}")
                    };
                    assert_eq!(
                        (wait, named.as_slice()),
                        (Wait::Signal, [late].as_slice()),
                        "{fault}"
                    );
                }
                // Ranks stay until all have seen their fault.
                together.wait();
                drop(op);
                let comm = node.comm.rebuild_blocking(Rebuild::Whole).unwrap();
                let options = OpOptions { workers: node.workers, ..options };
                let op = build::<f16>(kind, shape, options, &comm).unwrap();
                let y = call(&op, &case, node).unwrap();
                case.assert_equal(&expected, &op, node.rank, &y, "after the rebuild");
            });
        }
    }
}
