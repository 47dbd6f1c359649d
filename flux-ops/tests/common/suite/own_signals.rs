//! Few rows, which over peer memory are their own signals, in many calls.

use super::layouts;
use crate::common::{Case, Check, Machine, Memory, Node, OPS, OpOptions, Values, build};
use flux_core::plan::{Plan, RowMapping};
use flux_core::signal::Epoch;
use flux_ops::{FusedLinear, Layout};
use flux_transport::Options;
use half::f16;
use std::time::Duration;

/// The rows of calls that follow each other. The last are more than are their own signals: they
/// take the other memory, and the same halves.
const ROWS: [usize; 8] = [4, 1, 16, 7, 33, 8, 64, 1100];
/// Operands `x` of each number of rows.
const OPERANDS: usize = 3;
/// Calls after which a set's sums have been added and taken off.
const TURN: usize = 2 * OPERANDS;

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
    let columns = if machine == Machine::Host { 200 } else { 1000 };
    for world in machine.worlds(&[2, 4]) {
        let wrap = |options: &mut Options| options.first_epoch = Epoch::new(u32::MAX - 100);
        for (op, rows) in [
            (OPS[2], RowMapping::Flattened),
            (OPS[2], RowMapping::FlattenedTwoExchanges),
            (OPS[1], RowMapping::Flattened),
        ] {
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
                    ..OpOptions::of(Plan { rows, ..Plan::of(machine.tiles()[0]) })
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
