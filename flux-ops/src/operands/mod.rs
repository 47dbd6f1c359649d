//! The operands of one call.
//!
//! Invariant: this is the one form between a caller's tensors and an executor's arguments. `x` is
//! there, and `w` and `y` of each weight.

mod check;
mod quantize;

pub use quantize::QuantizeOperands;

use crate::error::CallError;
use crate::tensor::{RawTensor, View};
use flux_core::problem::MAX_WEIGHTS;
use flux_kernels::{Operand, OperandList};

/// The operands of one call: of [`RawTensor`]s as a caller of
/// [`FusedLinear::run`](crate::FusedLinear::run) describes them.
///
/// ```
/// use flux_ops::{Operand, Operands};
/// let mut operands = Operands::new("x");
/// operands.add_weight("w", "y");
/// operands.set(Operand::Bias, 0, "bias");
/// assert_eq!(operands.get(Operand::Bias, 0), Some(&"bias"));
/// assert_eq!(operands.get(Operand::Residual, 0), None);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Operands<V> {
    list: OperandList<V>,
    /// Those that were added, beyond the most, too.
    weights: usize,
    /// Whether the weights are there before the work ahead of the call on its stream begins, as
    /// [`Call::constant_weights`](crate::Call::constant_weights) says.
    pub constant_weights: bool,
}

impl<V> Operands<V> {
    /// Those of a call with this rank's part of `x`, without weights.
    pub fn new(x: V) -> Self {
        let mut list = OperandList::new();
        list.set(Operand::X, 0, x);
        Self { list, weights: 0, constant_weights: false }
    }

    /// Adds a weight with its result. A call with more than [`MAX_WEIGHTS`] is refused.
    pub fn add_weight(&mut self, w: V, y: V) {
        if self.weights < MAX_WEIGHTS {
            self.list.set(Operand::W, self.weights, w);
            self.list.set(Operand::Y, self.weights, y);
        }
        self.weights += 1;
    }

    /// Sets an operand of a weight that was added, or with 0 of the call.
    ///
    /// # Panics
    /// If there is no such operand of the weight.
    pub fn set(&mut self, operand: Operand, weight: usize, value: V) {
        assert!(!operand.is_of_weight() || weight < self.weights, "weight {weight} was not added");
        self.list.set(operand, weight, value);
    }

    /// The operand of a weight, or with 0 of the call.
    pub fn get(&self, operand: Operand, weight: usize) -> Option<&V> {
        self.list.get(operand, weight)
    }

    /// Weights that were added.
    pub(crate) const fn weight_count(&self) -> usize {
        self.weights
    }

    /// All of them.
    pub(crate) const fn list(&self) -> &OperandList<V> {
        &self.list
    }

    /// `x`, or `w` or `y` of a weight that was added.
    pub(crate) fn expect(&self, operand: Operand, weight: usize) -> &V {
        self.get(operand, weight).expect("an operand of every call")
    }

    /// Each operand with its name, inputs before outputs.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &V)> {
        self.list.iter().map(|(operand, weight, value)| (operand.name(weight), value))
    }
}

impl Operands<RawTensor> {
    /// Views of the described memory.
    pub(crate) fn views(&self) -> Result<Operands<View>, CallError> {
        let Self { list, weights, constant_weights } = self;
        let list = list.try_map(|operand, weight, &raw| {
            let operand = operand.name(weight);
            View::from_raw(raw).map_err(|source| CallError::View { operand, source })
        })?;
        Ok(Operands { list, weights: *weights, constant_weights: *constant_weights })
    }
}
