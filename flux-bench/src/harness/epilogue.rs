//! What an op does to its sums before it rounds them, and to the rounded rows.

use flux_core::plan::Plan;
use flux_core::{OpKind, Problem, ProblemError};
use flux_ops::{Activation, GateLayout};
use std::fmt;

/// Bias, residual, activation, gates and norm of an op; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpilogueSpec {
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether a residual is added to a sum over ranks.
    pub residual: bool,
    /// Applied after both.
    pub activation: Activation,
    /// How gates and ups lie in the weights, where activated gates are multiplied by ups.
    pub gates: Option<GateLayout>,
    /// Whether the rows of a sum are also normalised.
    pub norm: bool,
}

/// What is added to the mean of a row's squares.
pub(crate) const EPS: f32 = 1e-5;

impl EpilogueSpec {
    /// A bias with everything that `op` can add to the sum with it, or apply to it.
    pub fn with_bias(op: OpKind) -> impl Iterator<Item = Self> {
        let bias = Self { bias: true, ..Self::default() };
        let with = move |&activation| Self { activation, ..bias };
        let sums = [Self { residual: true, ..bias }, Self { residual: true, norm: true, ..bias }];
        let gated = |(activation, layout)| Self { activation, gates: Some(layout), ..bias };
        let gated = [
            (Activation::Silu, GateLayout::Concatenated),
            (Activation::Gelu, GateLayout::Interleaved),
        ]
        .map(gated);
        let gated = gated.into_iter().filter(move |_| !op.reduces());
        Activation::of(op)
            .iter()
            .map(with)
            .chain(sums.into_iter().filter(move |_| op.reduces()))
            .chain(gated)
    }

    /// The same without gates where the columns of `problem`, or those of a plan's tile, cannot
    /// have them.
    pub(crate) fn for_columns_of(self, problem: &Problem, plan: Option<&Plan>) -> Self {
        let whole = problem.with_gates().is_ok() && plan.is_none_or(|plan| plan.tile.holds_gates());
        if whole { self } else { Self { gates: None, ..self } }
    }

    /// The problem of an op with this epilogue, whose ranks split gates with their ups.
    pub(crate) fn problem(self, problem: Problem) -> Result<Problem, ProblemError> {
        if self.gates.is_some() { problem.with_gates() } else { Ok(problem) }
    }

    /// Whether integers stay integers, so that the result is known to the last bit.
    pub fn is_exact(self) -> bool {
        self.activation.is_exact()
    }
}

/// What follows the name of a case.
impl fmt::Display for EpilogueSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bias {
            f.write_str("+bias")?;
        }
        if self.residual {
            f.write_str("+residual")?;
        }
        if self.activation != Activation::None {
            write!(f, "+{}", self.activation)?;
        }
        if let Some(layout) = self.gates {
            write!(f, "+{layout}-gates")?;
        }
        f.write_str(if self.norm { "+norm" } else { "" })
    }
}
