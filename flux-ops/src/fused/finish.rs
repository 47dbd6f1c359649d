//! What an op was built to do with its sums before it rounds them.
//!
//! Invariant: it is part of what the ranks agree on when they build, and a call fits it or is
//! refused.

use flux_kernels::Activation;
use std::fmt;

/// Bias and activation, as a builder was told; neither by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Finish {
    /// Whether calls bring a bias.
    pub(crate) bias: bool,
    /// Applied after it.
    pub(crate) activation: Activation,
}

impl fmt::Display for Finish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bias = if self.bias { "with bias" } else { "no bias" };
        match self.activation {
            Activation::None => f.write_str(bias),
            activation => write!(f, "{bias}, then {activation}"),
        }
    }
}
