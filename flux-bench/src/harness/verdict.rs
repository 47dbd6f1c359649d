//! What a comparison with the reference finds.

use super::told;
use flux_core::plan::{CommMode, Plan};
use flux_core::{Nodes, OpKind};
use flux_testkit::reference::Finished;
use flux_transport::Communicator;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a verification found in one rank's output, or, merged, in all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Verdict {
    /// Largest `|y - reference|`, over elements that are numbers.
    pub max_error: f64,
    /// Largest `|reference|`.
    pub max_reference: f64,
    /// Elements beyond their bound, or not exact for integers; a NaN is beyond any bound.
    pub violations: u64,
    /// The first of them.
    pub first: Option<Violation>,
}

/// Where an element is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Whose output it is in.
    pub rank: u32,
    /// The weight of that output, of several.
    pub weight: u32,
    /// Row of that rank's `y`.
    pub row: u32,
    /// Column of that rank's `y`.
    pub col: u32,
}

/// Which sums are rounded before the last rounding: this follows from what made a result.
#[derive(Clone, Copy, Debug)]
pub struct MadeBy {
    /// Whether tiles were flattened: a rank then rounds its own partial sums too.
    pub flattened: bool,
    /// Whether a library's collective added rounded partial sums, in an order that is not known, or
    /// a product was rounded before the rest of the epilogue.
    pub unfused: bool,
    /// Whose sums go to other nodes.
    pub nodes: Nodes,
}

impl MadeBy {
    /// An op on these nodes.
    pub(crate) fn plan(plan: &Plan, op: OpKind, nodes: Nodes) -> Self {
        let unfused = plan.comm == CommMode::Sequential && op.reduces();
        Self { flattened: plan.is_flattened(), unfused, nodes }
    }
}

impl Verdict {
    /// Merges two verdicts.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        Self {
            max_error: self.max_error.max(other.max_error),
            max_reference: self.max_reference.max(other.max_reference),
            violations: self.violations + other.violations,
            first: self.first.or(other.first),
        }
    }

    /// Takes in one element.
    pub(super) fn judge(&mut self, expected: &Finished, found: f32, at: Violation) {
        let error = (f64::from(found) - expected.exact).abs();
        if !expected.is_near(found) {
            self.violations += 1;
            self.first.get_or_insert(at);
        }
        // `max` passes over a NaN.
        self.max_error = self.max_error.max(error);
        self.max_reference = self.max_reference.max(expected.exact.abs());
    }

    /// The same of the output of one of several weights.
    #[must_use]
    pub(crate) fn of_weight(self, weight: u32) -> Self {
        Self { first: self.first.map(|first| Violation { weight, ..first }), ..self }
    }

    /// What all ranks found. Collective.
    pub(crate) fn of_all_ranks(self, comm: &Communicator) -> anyhow::Result<Self> {
        let all = told(comm, self.words())?;
        Ok(all.into_iter().map(Self::of_words).fold(Self::default(), Self::merge))
    }

    /// To send to other ranks.
    fn words(self) -> [u64; 7] {
        let [rank, weight, row, col] = self
            .first
            .map_or([u64::MAX; 4], |at| [at.rank, at.weight, at.row, at.col].map(u64::from));
        let [error, reference] = [self.max_error, self.max_reference].map(f64::to_bits);
        [error, reference, self.violations, rank, weight, row, col]
    }

    /// What another rank has sent.
    fn of_words([error, reference, violations, at @ ..]: [u64; 7]) -> Self {
        let [rank, weight, row, col] = at.map(|number| number as u32);
        let first = (at[0] != u64::MAX).then_some(Violation { rank, weight, row, col });
        let [max_error, max_reference] = [error, reference].map(f64::from_bits);
        Self { max_error, max_reference, violations, first }
    }

    /// Keeps the violations alone: errors of integers say nothing of random data.
    #[must_use]
    pub(crate) fn of_wrong_elements(self) -> Self {
        Self { violations: self.violations, first: self.first, ..Self::default() }
    }

    /// Whether every element was right.
    pub const fn ok(&self) -> bool {
        self.violations == 0
    }

    /// Largest error in units of the largest reference.
    pub fn max_rel_err(&self) -> f64 {
        if self.max_reference > 0.0 { self.max_error / self.max_reference } else { self.max_error }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, weight, row, col } = self;
        write!(f, "row {row}, column {col} of rank {rank}")?;
        if *weight > 0 { write!(f, ", of weight {weight}") } else { Ok(()) }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first {
            None => write!(
                f,
                "all elements right, largest error {:.2e} of the largest element",
                self.max_rel_err()
            ),
            Some(first) => write!(f, "{} wrong elements, the first at {first}", self.violations),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_survives_the_trip_to_another_rank() {
        let right = Verdict { max_error: 0.5, max_reference: f64::INFINITY, ..Verdict::default() };
        let wrong = Verdict {
            violations: 1 << 40,
            first: Some(Violation { rank: 1, weight: 2, row: 3, col: 4 }),
            ..right
        };
        for verdict in [right, wrong] {
            assert_eq!(Verdict::of_words(verdict.words()), verdict);
        }
    }
}
