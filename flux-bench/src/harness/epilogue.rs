//! What an op does to its sums before it rounds them.
//!
//! Invariant: reference activations follow the definitions in fp64, not the ops' formulas.

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
        let activations = match op {
            OpKind::AllGatherGemm => &Activation::ALL[..],
            OpKind::GemmReduceScatter | OpKind::GemmAllReduce => &[Activation::None],
        };
        activations.iter().map(|&activation| Self { bias: true, activation })
    }

    /// Whether integers stay integers, so that the result is known to the last bit.
    pub fn is_exact(self) -> bool {
        matches!(self.activation, Activation::None | Activation::Relu)
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

/// `activation` of `v`, by its definition.
pub(super) fn activated(activation: Activation, v: f64) -> f64 {
    match activation {
        Activation::None => v,
        Activation::Gelu => 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044_715 * v.powi(3))).tanh()),
        Activation::Silu => v / (1.0 + (-v).exp()),
        Activation::Relu => v.max(0.0),
    }
}
