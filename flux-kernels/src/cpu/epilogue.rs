//! Bias, residual, activation and gates, in fp32, on the accumulators of a tile whose sum is
//! complete.
//!
//! Invariant: an element gets them once, from the worker that stores it, before its rounding.

use super::error::ExecuteError;
use super::operands::{Rows, fits};
use crate::element::Element;
use crate::epilogue::Activation;
use crate::weights::{GateLayout, WeightLayout};
use flux_core::program::TileProgram;
use flux_core::tile::GATE_COLUMNS;

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
    /// Of the shape of `y`, added to it; not of AllGather-GEMM.
    pub residual: Option<Residual<'a, T>>,
    /// Applied to the sum with the bias; AllGather-GEMM only.
    pub activation: Activation,
    /// How gates and ups lie in `w` and the bias: the activated gates are then multiplied by their
    /// ups, and `y` has half as many columns. AllGather-GEMM only.
    pub gates: Option<GateLayout>,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Self { residual: None, activation: Activation::None, gates: None }
    }
}

impl<T: Element> Epilogue<'_, T> {
    /// Checks it against the program and the weights.
    pub(super) fn fits(
        &self,
        program: &TileProgram,
        weights: WeightLayout,
    ) -> Result<(), ExecuteError> {
        let (problem, rank, tile) = (&program.problem, program.rank, program.tile);
        let n = problem.n_local(rank);
        let splits = !n.is_multiple_of(problem.numerics().gated_multiple()) || !tile.holds_gates();
        if self.gates.is_some() && (problem.op().reduces() || weights != WeightLayout::Nk || splits)
        {
            return Err(ExecuteError::Gates { op: problem.op(), weights, tile, n });
        }
        if !Activation::of(problem.op()).contains(&self.activation) {
            return Err(ExecuteError::Activation { op: problem.op(), activation: self.activation });
        }
        if self.residual.is_some() && problem.op().gathers() {
            return Err(ExecuteError::Residual { op: problem.op() });
        }
        let Some(Residual::Rows(rows)) = self.residual else { return Ok(()) };
        fits("residual", problem.y_shape(rank), rows.elements.len(), rows.stride)
    }

    /// Applies it, behind the weight's bias, to columns `col` on of row `at` of the tiles. `y` is
    /// the place of the result and holds what it held before the call. The result is at the
    /// beginning of `row`.
    pub(super) fn apply(
        &self,
        bias: Option<&[T]>,
        at: usize,
        col: usize,
        y: &[T],
        row: &mut [f32],
    ) {
        if let (Some(bias), Some(layout)) = (bias, self.gates) {
            for (v, col) in row.iter_mut().zip(col as u32..) {
                *v += bias[layout.row_in_tiles(col, bias.len() as u32) as usize].to_f32();
            }
        } else if let Some(bias) = bias {
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
        if self.gates.is_some() {
            // In place: a product is never behind its gate.
            let gates = GATE_COLUMNS as usize;
            for to in 0..row.len() / 2 {
                let gate = to / gates * 2 * gates + to % gates;
                row[to] = self.activation.apply(row[gate]) * row[gate + gates];
            }
        } else if self.activation != Activation::None {
            for v in row {
                *v = self.activation.apply(*v);
            }
        }
    }
}
