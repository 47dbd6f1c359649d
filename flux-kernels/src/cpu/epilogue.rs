//! Bias, residual and activation, in fp32, on the accumulators of a tile whose sum is complete.
//!
//! Invariant: an element gets them once, from the worker that stores it, before its rounding.

use super::error::ExecuteError;
use super::operands::{Rows, fits};
use crate::element::Element;
use crate::epilogue::Activation;
use flux_core::problem::Shape;
use flux_core::{OpKind, Problem, Rank};

/// Rows that are added to those of `y`.
#[derive(Clone, Copy, Debug)]
pub enum Residual<'a, T> {
    /// Rows of their own.
    Rows(Rows<'a, T>),
    /// What `y` holds before the call.
    InY,
}

/// The epilogue of a sum, before it is stored: nothing by default.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, T> {
    /// One element for each column of `y`, added to every row.
    pub bias: Option<&'a [T]>,
    /// Of the shape of `y`, added to it; not of AllGather-GEMM.
    pub residual: Option<Residual<'a, T>>,
    /// Applied to the sum with the bias; AllGather-GEMM only.
    pub activation: Activation,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Self { bias: None, residual: None, activation: Activation::None }
    }
}

impl<T: Element> Epilogue<'_, T> {
    /// Checks it against the problem.
    pub(super) fn fits(&self, problem: &Problem, rank: Rank) -> Result<(), ExecuteError> {
        if !Activation::of(problem.op()).contains(&self.activation) {
            return Err(ExecuteError::Activation { op: problem.op(), activation: self.activation });
        }
        if self.residual.is_some() && problem.op() == OpKind::AllGatherGemm {
            return Err(ExecuteError::Residual { op: problem.op() });
        }
        if let Some(Residual::Rows(rows)) = self.residual {
            fits("residual", problem.y_shape(rank), rows.elements.len(), rows.stride)?;
        }
        let shape = Shape { rows: 1, cols: problem.n_local(rank) };
        self.bias.map_or(Ok(()), |bias| fits("bias", shape, bias.len(), shape.cols as usize))
    }

    /// Applies it to columns `col` on of row `at` of `y`, which holds `y` before they are rounded.
    pub(super) fn apply(&self, (at, col): (usize, usize), y: &[T], row: &mut [f32]) {
        if let Some(bias) = self.bias {
            for (v, bias) in row.iter_mut().zip(&bias[col..]) {
                *v += bias.to_f32();
            }
        }
        let residual = self.residual.map(|residual| match residual {
            Residual::Rows(rows) => &rows.row(at, col + row.len())[col..],
            Residual::InY => y,
        });
        if let Some(residual) = residual {
            for (v, residual) in row.iter_mut().zip(residual) {
                *v += residual.to_f32();
            }
        }
        if self.activation != Activation::None {
            for v in row {
                *v = self.activation.apply(*v);
            }
        }
    }
}
