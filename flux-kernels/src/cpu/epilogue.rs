//! Operands of the epilogue, activation and gates, in fp32, on the accumulators of a tile whose sum
//! is complete.
//!
//! Invariant: an element gets them once, from the worker that stores it, before its rounding.

use super::error::ExecuteError;
use super::operands::{Rows, fits};
use crate::element::Element;
use crate::epilogue::Activation;
use crate::operand::{Extent, Operand, OperandList, Presence, Shapes};
use crate::weights::{GateLayout, WeightLayout};
use flux_core::program::TileProgram;
use flux_core::tile::GATE_COLUMNS;

/// An operand that the epilogue reads.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a, T> {
    /// Rows of their own.
    Rows(Rows<'a, T>),
    /// What `y` holds before the call.
    InY,
}

/// The epilogue of a sum, before it is stored: nothing by default.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, T> {
    /// What it reads; all weights of a call have a bias, or none.
    pub operands: OperandList<Input<'a, T>>,
    /// Applied to the sum with the bias; AllGather-GEMM only.
    pub activation: Activation,
    /// How gates and ups lie in `w` and the bias: the activated gates are then multiplied by their
    /// ups, and `y` has half as many columns. AllGather-GEMM only.
    pub gates: Option<GateLayout>,
}

impl<T> Default for Epilogue<'_, T> {
    fn default() -> Self {
        Self { operands: OperandList::new(), activation: Activation::None, gates: None }
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
        let (layout, gates) = (weights, self.gates);
        let shapes = Shapes { layout, gates, ..Shapes::new(problem, rank) };
        for (operand, weight, input) in self.operands.iter() {
            // What `y` holds has its extents.
            let is_its = match input {
                Input::Rows(_) => true,
                Input::InY => operand.extent() == Extent::Result,
            };
            let is_read = operand.presence() == Presence::Option && operand.is_of(problem.op());
            if !is_its || !is_read {
                return Err(ExecuteError::NoSuchOperand {
                    op: problem.op(),
                    operand: operand.name(weight),
                });
            }
            if let Input::Rows(rows) = input {
                let shape = shapes.of_operand(operand, weight);
                fits(operand.name(weight), shape, rows.elements.len(), rows.stride)?;
            }
        }
        Ok(())
    }

    /// Applies it to columns `col` on of row `at` of the tiles of a weight. `y` is the place of the
    /// result and holds what it held before the call. The result is at the beginning of `row`.
    pub(super) fn apply(&self, weight: usize, at: usize, col: usize, y: &[T], row: &mut [f32]) {
        let bias = self.rows(Operand::Bias, weight).map(|rows| rows.elements);
        if let (Some(bias), Some(layout)) = (bias, self.gates) {
            for (v, col) in row.iter_mut().zip(col as u32..) {
                *v += bias[layout.row_in_tiles(col, bias.len() as u32) as usize].to_f32();
            }
        } else if let Some(bias) = bias {
            for (v, bias) in row.iter_mut().zip(&bias[col..]) {
                *v += bias.to_f32();
            }
        }
        let residual = self.operands.get(Operand::Residual, 0).map(|input| match input {
            Input::Rows(rows) => &rows.row(at, col + row.len())[col..],
            Input::InY => y,
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

    /// An operand with rows of its own.
    fn rows(&self, operand: Operand, weight: usize) -> Option<Rows<'_, T>> {
        match self.operands.get(operand, weight)? {
            Input::Rows(rows) => Some(*rows),
            Input::InY => None,
        }
    }
}
