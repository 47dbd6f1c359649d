//! The operands of a call, as functions of seed and position.
//!
//! Invariant: what is generated depends on nothing but these.

use crate::harness::data::{self, Window, y_window};
use crate::harness::scaled::{Generator, Part};
use crate::harness::{EpilogueSpec, Fill, w_window, x_window};
use flux_core::{Problem, Rank};
use flux_ops::{GateLayout, Operand};

/// The operands of one call of a problem, as their generators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operands {
    /// The problem.
    pub problem: Problem,
    /// Seed of `x`, see [`data::raw`].
    pub seed_x: u64,
    /// Seed of `w`.
    pub seed_w: u64,
    /// Seed of the bias, a matrix `[1, n]`; used where there is one.
    pub seed_bias: u64,
    /// Of the residual, `[m, n]`.
    pub seed_residual: u64,
    /// Of the norm's gain, `[1, n]`.
    pub seed_gain: u64,
    /// Distribution of all.
    pub fill: Fill,
    /// What becomes of the product.
    pub epilogue: EpilogueSpec,
}

impl Operands {
    /// The operands of call number `call`, without bias and activation.
    pub fn new(problem: Problem, base_seed: u64, call: u64, fill: Fill) -> Self {
        let seed = |operand| data::seed(base_seed, operand, call);
        Self {
            problem,
            seed_x: seed(0),
            seed_w: seed(1),
            seed_bias: seed(2),
            seed_residual: seed(3),
            seed_gain: seed(4),
            fill,
            epilogue: EpilogueSpec::default(),
        }
    }

    /// The same operands of an op with this epilogue.
    #[must_use]
    pub fn with_epilogue(self, epilogue: EpilogueSpec) -> Self {
        Self { epilogue, ..self }
    }

    /// The operands of the weight with this number alone: the same `x`, and a weight and bias of
    /// its own.
    pub(crate) fn of_weight(&self, weight: usize) -> Self {
        let own = |seed| if weight == 0 { seed } else { data::seed(seed, 0, weight as u64) };
        Self {
            problem: self.problem.weight_alone(weight),
            seed_w: own(self.seed_w),
            seed_bias: own(self.seed_bias),
            ..*self
        }
    }

    /// Whether the epilogue has this operand.
    pub(crate) fn has(&self, operand: Operand) -> bool {
        self.epilogue.operands.has(operand)
    }

    pub(crate) const fn generator_of_x(&self) -> Generator {
        Generator { fill: self.fill, seed: self.seed_x }
    }

    pub(crate) const fn generator_of_w(&self) -> Generator {
        Generator { fill: self.fill, seed: self.seed_w }
    }

    /// Windows of `x` and `w`, of a rank's part along `k`, with their scales.
    pub(crate) const fn parts(&self, [x, w]: [Window; 2], source: Rank) -> [Part; 2] {
        let problem = &self.problem;
        [
            Part::of_x(problem, self.generator_of_x(), x, source),
            Part::of_w(problem, self.generator_of_w(), w, source),
        ]
    }

    /// The parts of `x` and `w` that are a rank's.
    pub(crate) fn own_parts(&self, rank: Rank) -> [Part; 2] {
        self.parts([x_window(&self.problem, rank), w_window(&self.problem, rank)], rank)
    }

    /// What of all ranks' results is `rank`'s `y`: of `[m, n]`, or with gates of `[m, n/2]`.
    pub(crate) fn y_window(&self, rank: Rank) -> Window {
        result_window(&self.problem, self.epilogue.gates, rank)
    }
}

/// What of all ranks' results is `rank`'s `y`, with gates half of the product's columns.
pub(crate) fn result_window(problem: &Problem, gates: Option<GateLayout>, rank: Rank) -> Window {
    let window = y_window(problem, rank);
    let of_product = |cols| GateLayout::result_cols(gates, cols);
    Window { col0: of_product(window.col0), cols: of_product(window.cols), ..window }
}

/// What of the global `[1, n]` bias is `rank`'s: the columns of its product.
pub(crate) fn bias_window(problem: &Problem, rank: Rank) -> Window {
    Window { row0: 0, rows: 1, ..y_window(problem, rank) }
}
