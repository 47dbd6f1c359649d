//! The shapes and element types of a call's operands.

use super::{Extent, Operand, QuantizedRows};
use crate::weights::{GateLayout, WeightLayout};
use flux_core::numerics::SCALE_BLOCK;
use flux_core::problem::Shape;
use flux_core::{ElementType, Problem, Rank, Scales};

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
    /// The form of normalised rows.
    pub norm: QuantizedRows,
}

impl<'p> Shapes<'p> {
    /// Of weights `[n, k]` without gates, and normalised rows of 16 bits.
    pub fn new(problem: &'p Problem, rank: Rank) -> Self {
        let (layout, norm) = (WeightLayout::Nk, QuantizedRows::default());
        Self { problem, rank, layout, gates: None, norm }
    }

    /// The element type of an operand.
    pub fn element(&self, operand: Operand) -> ElementType {
        (operand.described().element)(self)
    }

    /// The shape of an operand of a weight, or with 0 of the call.
    ///
    /// ```
    /// use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
    /// use flux_kernels::{Operand, Shapes, WeightLayout};
    /// let world = WorldSize::new(2).unwrap();
    /// let problem = Problem::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16, world)?;
    /// let shapes = Shapes { layout: WeightLayout::Kn, ..Shapes::new(&problem, Rank::new(1)) };
    /// let rows = |operand| shapes.of_operand(operand, 0).rows;
    /// assert_eq!([Operand::X, Operand::W, Operand::Bias, Operand::Y].map(rows), [4, 64, 1, 8]);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn of_operand(&self, operand: Operand, weight: usize) -> Shape {
        let Self { problem, rank, layout, gates, norm } = *self;
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
            Extent::Normalised => {
                let Shape { rows, cols } = problem.y_shape(rank);
                Shape { rows, cols: norm.columns(cols) }
            }
            Extent::One => ONE,
            Extent::ScalesOfNormalised => {
                let Shape { rows, cols } = problem.y_shape(rank);
                norm.scales_apart(rows, cols)
            }
            Extent::Gathered => Shape { rows: problem.m(), cols: problem.gathered_columns() },
        }
    }
}
