//! What an op does to its sums before it rounds them, and to the rounded rows.

use flux_core::OpKind;
use flux_ops::Activation;
use std::fmt;

/// Bias, residual, activation and norm of an op; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpilogueSpec {
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether a residual is added to a sum over ranks.
    pub residual: bool,
    /// Applied after both.
    pub activation: Activation,
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
        Activation::of(op).iter().map(with).chain(sums.into_iter().filter(move |_| op.reduces()))
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
        f.write_str(if self.norm { "+norm" } else { "" })
    }
}
