//! What an op does with its fp32 sums before it rounds them, and with the rounded rows.
//!
//! Invariant: the ranks agree on it when they build, and a call that does not fit it is refused.

use crate::error::BuildError;
use crate::tensor::{TensorMut, TensorRef, View};
use flux_core::plan::Plan;
use flux_core::problem::Shape;
use flux_core::tile::GATE_COLUMNS;
use flux_core::{Problem, Rank};
use flux_kernels::{Activation, GateLayout, WeightLayout};
use std::fmt;
use std::marker::PhantomData;

/// Bias, residual, activation, gates and norm; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EpilogueSpec {
    /// Whether calls bring a bias.
    pub(crate) bias: bool,
    /// Whether calls bring a residual, which is added after the bias.
    pub(crate) residual: bool,
    /// Applied after both.
    pub(crate) activation: Activation,
    /// How gates and ups lie in `w` and the bias, where activated gates are multiplied by ups.
    pub(crate) gates: Option<GateLayout>,
    /// Of the rounded rows.
    pub(crate) rms_norm: Option<Epsilon>,
}

/// What is added to the mean of a row's squares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Epsilon {
    bits: u32,
}

impl Epsilon {
    pub(crate) const fn new(eps: f32) -> Self {
        Self { bits: eps.to_bits() }
    }

    pub(crate) const fn get(self) -> f32 {
        f32::from_bits(self.bits)
    }
}

impl EpilogueSpec {
    /// Checks it against any problem of the op, its weights and the caller's plan.
    pub(crate) fn check(
        &self,
        problem: &Problem,
        weights: WeightLayout,
        plan: Option<&Plan>,
    ) -> Result<(), BuildError> {
        if let Some(eps) =
            self.rms_norm.map(Epsilon::get).filter(|eps| !(eps.is_finite() && *eps >= 0.0))
        {
            return Err(BuildError::Epsilon { value: eps });
        }
        if problem.weight_count() > 1 && weights != WeightLayout::Nk {
            return Err(BuildError::SeveralWeights { weights });
        }
        if self.gates.is_none() {
            return Ok(());
        }
        if weights != WeightLayout::Nk {
            return Err(BuildError::GatedWeights { weights });
        }
        if let Some(plan) = plan.filter(|plan| !plan.tile.holds_gates()) {
            return Err(BuildError::GatedTile { tile: plan.tile, multiple: 2 * GATE_COLUMNS });
        }
        Ok(())
    }

    /// The shape of `rank`'s `y`; of several weights that of the first.
    pub(crate) fn y_shape(&self, problem: &Problem, rank: Rank) -> Shape {
        let cols = problem.weight_columns(0, rank).len() as u32;
        GateLayout::result_shape(self.gates, Shape { cols, ..problem.y_shape(rank) })
    }
}

impl fmt::Display for EpilogueSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.bias { "with bias" } else { "no bias" })?;
        if self.residual {
            f.write_str(", with residual")?;
        }
        if self.activation != Activation::None {
            write!(f, ", then {}", self.activation)?;
        }
        if let Some(layout) = self.gates {
            write!(f, ", {layout} gates times ups")?;
        }
        if let Some(eps) = self.rms_norm {
            write!(f, ", then rms_norm({:e})", eps.get())?;
        }
        Ok(())
    }
}

/// The operands of a call besides `x`, `w` and `y`, for
/// [`forward_with`](crate::FusedLinear::forward_with): those that the op was built with.
#[derive(Debug)]
#[must_use = "operands do nothing until they are given to a call"]
pub struct EpilogueArgs<'a, T> {
    pub(crate) bias: Option<View>,
    pub(crate) residual: Option<Residual>,
    pub(crate) norm: Option<Norm>,
    pub(crate) memory: PhantomData<&'a mut [T]>,
}

/// The operands of a norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) gain: View,
    /// The normalised rows.
    pub(crate) y_norm: View,
}

/// Where a residual is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Residual {
    Given(View),
    InY,
}

impl<'a, T> EpilogueArgs<'a, T> {
    /// None.
    pub const fn new() -> Self {
        Self { bias: None, residual: None, norm: None, memory: PhantomData }
    }

    /// Of an op built with [`Builder::bias`](crate::Builder::bias): a view of shape `(cols,)` or
    /// `(1, cols)` for the columns of `y`, with [gates](crate::Builder::gated) for the rows of `w`.
    /// It is added once to every row of the result.
    pub const fn bias(mut self, bias: &'a TensorRef<'_, T>) -> Self {
        self.bias = Some(bias.view());
        self
    }

    /// Of an op built with [`Builder::residual`](crate::Builder::residual): a view of the shape of
    /// `y`, which is added to it. Of a [`GemmAllReduce`](crate::GemmAllReduce) it holds the same on
    /// every rank.
    pub const fn residual(mut self, residual: &'a TensorRef<'_, T>) -> Self {
        self.residual = Some(Residual::Given(residual.view()));
        self
    }

    /// As [`residual`](Self::residual), where `y` itself holds it before the call.
    pub const fn residual_in_y(mut self) -> Self {
        self.residual = Some(Residual::InY);
        self
    }

    /// Of an op built with [`Builder::rms_norm`](crate::Builder::rms_norm): `gain` is a view of
    /// shape `(cols,)` for the columns of `y`, and `y_norm` of the shape of `y`.
    pub const fn norm(
        mut self,
        gain: &'a TensorRef<'_, T>,
        y_norm: &'a mut TensorMut<'_, T>,
    ) -> Self {
        self.norm = Some(Norm { gain: gain.view(), y_norm: y_norm.view() });
        self
    }
}

impl<T> Default for EpilogueArgs<'_, T> {
    fn default() -> Self {
        Self::new()
    }
}
