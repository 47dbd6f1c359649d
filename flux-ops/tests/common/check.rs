//! Comparing what an op has computed with what it must compute.

use super::Machine;
use flux_core::Rank;
use flux_core::plan::CommMode;
use flux_ops::{Element, FusedLinear};
use flux_testkit::{Case, Expected, Sums};

pub trait Check<T> {
    /// What the ops must compute on this machine.
    fn expected_on(&self, machine: Machine) -> Expected;

    /// Compares a rank's output with the modelled one, bit for bit. A library's collective adds in
    /// an order of its own: its sums of more than two addends are compared within the bound.
    fn assert_equal(
        &self,
        expected: &Expected,
        op: &FusedLinear,
        rank: Rank,
        y: &[T],
        context: &str,
    );

    /// Compares a rank's output with the exact result, within the derived bound.
    fn assert_close(
        &self,
        expected: &Expected,
        op: &FusedLinear,
        rank: Rank,
        y: &[T],
        context: &str,
    );
}

impl<T: Element> Check<T> for Case<T> {
    fn expected_on(&self, machine: Machine) -> Expected {
        self.expected_across(machine.nodes(self.problem.world().get()))
    }

    fn assert_equal(
        &self,
        expected: &Expected,
        op: &FusedLinear,
        rank: Rank,
        y: &[T],
        context: &str,
    ) {
        if is_collective(op) && (self.problem.world().get() > 2 || self.has_bias()) {
            return self.assert_close(expected, op, rank, y, context);
        }
        let m = self.problem.m() as usize;
        self.equals(expected, sums(op, m), rank, y)
            .unwrap_or_else(|wrong| panic!("{context}: {wrong}: {}", op.explain()));
    }

    fn assert_close(
        &self,
        expected: &Expected,
        op: &FusedLinear,
        rank: Rank,
        y: &[T],
        context: &str,
    ) {
        let m = self.problem.m() as usize;
        let sums = if is_collective(op) { Sums::Collective } else { sums(op, m) };
        self.is_close(expected, sums, rank, y)
            .unwrap_or_else(|wrong| panic!("{context}: {wrong}: {}", op.explain()));
    }
}

/// How the op's plan for `m` rows adds partial sums.
fn sums(op: &FusedLinear, m: usize) -> Sums {
    if op.plan(m).unwrap().is_flattened() { Sums::Flattened } else { Sums::PerShard }
}

/// Whether the transport's library adds the partial sums.
fn is_collective(op: &FusedLinear) -> bool {
    op.largest().op().reduces() && op.plan(op.max_m()).unwrap().comm == CommMode::Sequential
}
