//! What an op does to its sums before it rounds them.

use flux_core::OpKind;
use flux_ops::Activation;
use std::fmt;

/// Bias and activation of an op; neither by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpilogueSpec {
    /// Whether a bias is added.
    pub bias: bool,
    /// Applied after it.
    pub activation: Activation,
}

impl EpilogueSpec {
    /// A bias with everything that `op` can apply to the sum with it.
    pub fn with_bias(op: OpKind) -> impl Iterator<Item = Self> {
        Activation::of(op).iter().map(|&activation| Self { bias: true, activation })
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
        match self.activation {
            Activation::None => Ok(()),
            activation => write!(f, "+{activation}"),
        }
    }
}
