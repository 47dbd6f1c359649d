//! Bias and activation, in fp32, on the accumulators of a tile whose sum is complete.
//!
//! Invariant: an element gets them once, from the worker that stores it, before its rounding.

use super::error::ExecuteError;
use super::operands::fits;
use crate::element::Element;
use crate::epilogue::Activation;
use flux_core::Problem;
use flux_core::problem::Shape;

/// The epilogue of a sum, before it is stored: nothing by default.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, T> {
    /// One element for each column of `y`, added to every row.
    pub bias: Option<&'a [T]>,
    /// Applied to the sum with the bias; AllGather-GEMM only.
    pub activation: Activation,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Self { bias: None, activation: Activation::None }
    }
}

impl<T: Element> Epilogue<'_, T> {
    /// Checks it against the problem.
    pub(super) fn fits(&self, problem: &Problem) -> Result<(), ExecuteError> {
        if !Activation::of(problem.op()).contains(&self.activation) {
            return Err(ExecuteError::Activation { op: problem.op(), activation: self.activation });
        }
        let shape = Shape { rows: 1, cols: problem.n_local() };
        self.bias.map_or(Ok(()), |bias| fits("bias", shape, bias.len(), shape.cols as usize))
    }

    /// Applies it to one row of a tile whose first column is `col` of `y`.
    pub(super) fn apply(&self, col: usize, row: &mut [f32]) {
        if let Some(bias) = self.bias {
            for (v, bias) in row.iter_mut().zip(&bias[col..]) {
                *v += bias.to_f32();
            }
        }
        if self.activation != Activation::None {
            for v in row {
                *v = self.activation.apply(*v);
            }
        }
    }
}
