//! The operands of one call.
//!
//! Invariant: this is the one form between a caller's tensors and an executor's arguments. It names
//! each operand as errors do.

mod check;

use crate::error::CallError;
use crate::tensor::{RawTensor, View};
use flux_core::problem::{MAX_WEIGHTS, WeightList};

/// The operands of one call: of [`RawTensor`]s as a caller of
/// [`FusedLinear::run`](crate::FusedLinear::run) describes them.
///
/// | operand | of |
/// |---|---|
/// | `x`, `weights` | every op |
/// | `residual`, `norm` | GEMM-ReduceScatter and GEMM-AllReduce that were built with them |
/// | `gathered` | AllGather-GEMM, where a rank wants all rows of `x` |
#[derive(Clone, Copy, Debug)]
pub struct Operands<V> {
    /// This rank's part of `x`.
    pub x: V,
    /// One, or those of an op with several.
    pub weights: WeightList<Weight<V>>,
    /// Added to `y`, which it may be itself.
    pub residual: Option<V>,
    /// Of the rows of `y`.
    pub norm: Option<Norm<V>>,
    /// Where all rows of `x` go.
    pub gathered: Option<V>,
    /// Whether the weights are there before the work ahead of the call on its stream begins, as
    /// [`Call::constant_weights`](crate::Call::constant_weights) says.
    pub constant_weights: bool,
}

/// A weight of a call, with its bias and its result.
#[derive(Clone, Copy, Debug)]
pub struct Weight<V> {
    /// This rank's part of the weight.
    pub w: V,
    /// One row, added to every row of the result.
    pub bias: Option<V>,
    /// The result.
    pub y: V,
}

/// The operands of a norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm<V> {
    /// One row.
    pub gain: V,
    /// The normalised rows.
    pub y_norm: V,
}

/// Names of a weight's operands.
struct WeightNames {
    w: &'static str,
    bias: &'static str,
    y: &'static str,
}

/// The names of each weight's operands: the first has those of an op with one weight.
const NAMES: [WeightNames; MAX_WEIGHTS] = [
    WeightNames { w: "w", bias: "bias", y: "y" },
    WeightNames { w: "w[1]", bias: "bias[1]", y: "y[1]" },
    WeightNames { w: "w[2]", bias: "bias[2]", y: "y[2]" },
    WeightNames { w: "w[3]", bias: "bias[3]", y: "y[3]" },
];

impl<V> Operands<V> {
    /// Each weight with the names of its operands.
    fn named_weights(&self) -> impl Iterator<Item = (&WeightNames, &Weight<V>)> + Clone {
        NAMES.iter().zip(self.weights.iter())
    }

    fn inputs(&self) -> impl Iterator<Item = (&'static str, &V)> {
        let of_weights = self.named_weights().flat_map(|(names, weight)| {
            [Some((names.w, &weight.w)), weight.bias.as_ref().map(|bias| (names.bias, bias))]
        });
        let gain = self.norm.as_ref().map(|norm| ("gain", &norm.gain));
        std::iter::once(Some(("x", &self.x)))
            .chain(of_weights)
            .chain([self.residual.as_ref().map(|view| ("residual", view)), gain])
            .flatten()
    }

    fn outputs(&self) -> impl Iterator<Item = (&'static str, &V)> {
        let results = self.named_weights().map(|(names, weight)| (names.y, &weight.y));
        let y_norm = self.norm.as_ref().map(|norm| ("y_norm", &norm.y_norm));
        let gathered = self.gathered.as_ref().map(|view| ("x_full", view));
        results.chain(y_norm).chain(gathered)
    }

    /// Each operand with its name, inputs before outputs.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &V)> {
        self.inputs().chain(self.outputs())
    }
}

impl Operands<RawTensor> {
    /// Views of the described memory.
    pub(crate) fn views(&self) -> Result<Operands<View>, CallError> {
        let view = |operand, &raw: &RawTensor| {
            View::from_raw(raw).map_err(|source| CallError::View { operand, source })
        };
        let optional = |operand, raw: &Option<RawTensor>| {
            raw.as_ref().map(|raw| view(operand, raw)).transpose()
        };
        let mut weights = WeightList::new();
        for (names, Weight { w, bias, y }) in self.named_weights() {
            let (w, bias) = (view(names.w, w)?, optional(names.bias, bias)?);
            // There is room for as many.
            let _ = weights.push(Weight { w, bias, y: view(names.y, y)? });
        }
        let norm = |norm: &Norm<RawTensor>| {
            let (gain, y_norm) = (view("gain", &norm.gain)?, view("y_norm", &norm.y_norm)?);
            Ok::<_, CallError>(Norm { gain, y_norm })
        };
        Ok(Operands {
            x: view("x", &self.x)?,
            weights,
            residual: optional("residual", &self.residual)?,
            norm: self.norm.as_ref().map(norm).transpose()?,
            gathered: optional("x_full", &self.gathered)?,
            constant_weights: self.constant_weights,
        })
    }
}
