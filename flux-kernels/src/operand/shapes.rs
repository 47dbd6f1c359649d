//! The shapes of a call's operands.

use super::{Extent, Operand};
use crate::weights::{GateLayout, WeightLayout};
use flux_core::numerics::SCALE_BLOCK;
use flux_core::problem::Shape;
use flux_core::{Problem, Rank, Scales};

/// Of one number.
const ONE: Shape = Shape { rows: 1, cols: 1 };

/// What the shapes of a rank's operands follow from.
#[derive(Clone, Copy, Debug)]
pub struct Shapes<'p> {
    /// The problem.
    pub problem: &'p Problem,
    /// The rank.
    pub rank: Rank,
    /// How weights lie.
    pub layout: WeightLayout,
    /// How gates and ups lie in them, where there are any.
    pub gates: Option<GateLayout>,
}

impl Shapes<'_> {
    /// The shape of an operand of a weight, or with 0 of the call.
    ///
    /// ```
    /// use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
    /// use flux_kernels::{Operand, Shapes, WeightLayout};
    /// let world = WorldSize::new(2).unwrap();
    /// let problem = Problem::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16, world)?;
    /// let (rank, layout) = (Rank::new(1), WeightLayout::Kn);
    /// let shapes = Shapes { problem: &problem, rank, layout, gates: None };
    /// let rows = |operand| shapes.of_operand(operand, 0).rows;
    /// assert_eq!([Operand::X, Operand::W, Operand::Bias, Operand::Y].map(rows), [4, 64, 1, 8]);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn of_operand(&self, operand: Operand, weight: usize) -> Shape {
        let Self { problem, rank, layout, gates } = *self;
        let columns = problem.weight_columns(weight, rank).len() as u32;
        match operand.extent() {
            Extent::X => problem.x_shape(rank),
            Extent::W => {
                let (rows, cols) = layout.extents(columns, problem.k_local(rank));
                Shape { rows, cols }
            }
            Extent::ScalesOfX => match problem.numerics().scales {
                Scales::Tensor => ONE,
                scales => {
                    let Shape { rows, cols } = problem.x_shape(rank);
                    Shape { rows, cols: scales.of_row(cols) }
                }
            },
            Extent::ScalesOfW => match problem.numerics().scales {
                Scales::None | Scales::Tensor => ONE,
                Scales::Row => Shape { rows: 1, cols: columns },
                Scales::Block => Shape {
                    rows: columns.div_ceil(SCALE_BLOCK),
                    cols: problem.k_local(rank).div_ceil(SCALE_BLOCK),
                },
            },
            Extent::Columns => Shape { rows: 1, cols: columns },
            Extent::Result => {
                let product = Shape { cols: columns, ..problem.y_shape(rank) };
                GateLayout::result_shape(gates, product)
            }
            Extent::Gathered => Shape { rows: problem.m(), cols: problem.gathered_columns() },
        }
    }
}
