//! Which part of the global operands is whose.
//!
//! Invariant: the ranks' windows of `x`, `w` and `y` tile the global matrices.

use crate::harness::EpilogueSpec;
use crate::harness::data::{self, Fill, Window};
use flux_core::{OpKind, Problem, Rank};

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
    /// Distribution of all.
    pub fill: Fill,
    /// What becomes of the product.
    pub epilogue: EpilogueSpec,
}

impl Operands {
    /// The operands of call number `call`, without bias and activation.
    pub fn new(problem: Problem, base_seed: u64, call: u64, fill: Fill) -> Self {
        let seed = |operand| data::seed(base_seed, operand, call);
        Self { problem, seed_x: seed(0), seed_w: seed(1), seed_bias: seed(2), fill, epilogue: EpilogueSpec::default() }
    }

    /// The same operands of an op with this epilogue.
    #[must_use]
    pub fn with_epilogue(self, epilogue: EpilogueSpec) -> Self {
        Self { epilogue, ..self }
    }
}

/// What of the global `[m, k]` matrix is `rank`'s `x`.
pub fn x_window(problem: &Problem, rank: Rank) -> Window {
    let shape = problem.x_shape();
    let (row0, col0) = match problem.op() {
        OpKind::AllGatherGemm => (rank.get() * shape.rows, 0),
        OpKind::GemmReduceScatter => (0, rank.get() * shape.cols),
    };
    Window { row0, col0, rows: shape.rows, cols: shape.cols }
}

/// What of the global `[n, k]` matrix is `rank`'s `w`.
pub fn w_window(problem: &Problem, rank: Rank) -> Window {
    let shape = problem.w_shape();
    let (row0, col0) = match problem.op() {
        OpKind::AllGatherGemm => (rank.get() * shape.rows, 0),
        OpKind::GemmReduceScatter => (0, rank.get() * shape.cols),
    };
    Window { row0, col0, rows: shape.rows, cols: shape.cols }
}

/// What of the global `[m, n]` matrix is `rank`'s `y`.
pub(crate) fn y_window(problem: &Problem, rank: Rank) -> Window {
    let shape = problem.y_shape();
    let (row0, col0) = match problem.op() {
        OpKind::AllGatherGemm => (0, rank.get() * shape.cols),
        OpKind::GemmReduceScatter => (rank.get() * shape.rows, 0),
    };
    Window { row0, col0, rows: shape.rows, cols: shape.cols }
}

/// What of the global `[1, n]` bias is `rank`'s: the columns of its `y`.
pub(crate) fn bias_window(problem: &Problem, rank: Rank) -> Window {
    Window { row0: 0, rows: 1, ..y_window(problem, rank) }
}

/// Elements of a window.
pub(crate) const fn elements(window: Window) -> usize {
    window.rows as usize * window.cols as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{DType, WorldSize};

    type Part = (fn(&Problem, Rank) -> Window, u32, u32);

    #[test]
    fn windows_of_all_ranks_tile_the_global_matrices() {
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            let problem = Problem::new(op, 12, 48, 72, DType::Bf16, WorldSize::new(3).unwrap()).unwrap();
            let parts: [Part; 3] = [(x_window, 12, 72), (w_window, 48, 72), (y_window, 12, 48)];
            for (window, rows, cols) in parts {
                let mut seen = vec![0; rows as usize * cols as usize];
                for w in problem.world().ranks().map(|r| window(&problem, r)) {
                    for row in w.row0..w.row0 + w.rows {
                        for col in w.col0..w.col0 + w.cols {
                            seen[row as usize * cols as usize + col as usize] += 1;
                        }
                    }
                }
                assert!(seen.iter().all(|&n| n == 1), "{op} {rows} x {cols}");
            }
        }
    }
}
