//! What an op does with its fp32 sums before it rounds them.
//!
//! Invariant: the ranks agree on it when they build, and a call that does not fit it is refused.

use flux_kernels::Activation;
use std::fmt;

/// Bias and activation; neither by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EpilogueSpec {
    /// Whether calls bring a bias.
    pub(crate) bias: bool,
    /// Applied after the bias.
    pub(crate) activation: Activation,
}

impl fmt::Display for EpilogueSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bias = if self.bias { "with bias" } else { "no bias" };
        match self.activation {
            Activation::None => f.write_str(bias),
            activation => write!(f, "{bias}, then {activation}"),
        }
    }
}
