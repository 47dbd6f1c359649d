//! What an op does to its sums before it rounds them.

use flux_core::OpKind;
use flux_ops::Activation;
use std::fmt;

/// Bias, residual and activation of an op; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpilogueSpec {
    /// Whether a bias is added.
    pub bias: bool,
    /// Whether a residual is added to a sum over ranks.
    pub residual: bool,
    /// Applied after both.
    pub activation: Activation,
}

impl EpilogueSpec {
    /// A bias with everything that `op` can add to the sum with it, or apply to it.
    pub fn with_bias(op: OpKind) -> impl Iterator<Item = Self> {
        let with = |&activation| Self { bias: true, residual: false, activation };
        let residual = op.reduces().then_some(Self { bias: true, residual: true, activation: Activation::None });
        Activation::of(op).iter().map(with).chain(residual)
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
        match self.activation {
            Activation::None => Ok(()),
            activation => write!(f, "+{activation}"),
        }
    }
}
