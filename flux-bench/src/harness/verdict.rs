//! What a comparison with the reference finds.

use anyhow::Context;
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
        let all = comm.exchange(&self.to_bytes())?;
        let verdict = all.iter().try_fold(Self::default(), |sum, said| {
            Self::from_bytes(said).map(|verdict| sum.merge(verdict))
        });
        verdict.context("a rank is of another version of this program")
    }

    /// To send to other ranks.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let first = self
            .first
            .map_or([u32::MAX; 4], |Violation { rank, weight, row, col }| [rank, weight, row, col]);
        let [error, reference] = [self.max_error, self.max_reference].map(f64::to_bits);
        let words = [error, reference, self.violations].map(u64::to_le_bytes);
        [words.as_flattened(), first.map(u32::to_le_bytes).as_flattened()].concat()
    }

    /// What another rank has sent; `None` for what is none.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, first) = bytes.split_at_checked(24).filter(|(_, first)| first.len() == 16)?;
        let [error, reference, violations] =
            <[[u8; 8]; 3]>::try_from(words.as_chunks().0).ok()?.map(u64::from_le_bytes);
        let [rank, weight, row, col] =
            <[[u8; 4]; 4]>::try_from(first.as_chunks().0).ok()?.map(u32::from_le_bytes);
        let first = (rank != u32::MAX).then_some(Violation { rank, weight, row, col });
        Some(Self {
            max_error: f64::from_bits(error),
            max_reference: f64::from_bits(reference),
            violations,
            first,
        })
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
    fn a_verdict_survives_the_trip_as_bytes() {
        let right = Verdict { max_error: 0.5, max_reference: f64::INFINITY, ..Verdict::default() };
        let wrong = Verdict {
            violations: 1 << 40,
            first: Some(Violation { rank: 1, weight: 2, row: 3, col: 4 }),
            ..right
        };
        for verdict in [right, wrong] {
            assert_eq!(Verdict::from_bytes(&verdict.to_bytes()), Some(verdict));
        }
        let bytes = wrong.to_bytes();
        assert_eq!((Verdict::from_bytes(&bytes[1..]), Verdict::from_bytes(&[])), (None, None));
    }
}
