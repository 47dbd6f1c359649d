//! The checks of a call's operands, before anything is launched.
//!
//! Invariant: operands that passed have the problem's shapes, lie where the communicator works, and
//! an output shares no byte with another operand, unless `y` is the residual itself.

use crate::epilogue::{EpilogueSpec, Norm};
use crate::error::CallError;
use crate::tensor::{Location, View};
use flux_core::problem::{MAX_WEIGHTS, Shape};
use flux_core::{OpKind, Problem, Rank};
use flux_kernels::WeightLayout;

/// The operands of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) x: View,
    pub(crate) w: View,
    pub(crate) bias: Option<View>,
    pub(crate) residual: Option<View>,
    pub(crate) y: View,
    pub(crate) norm: Option<Norm>,
    /// Where all rows of `x` go.
    pub(crate) x_full: Option<View>,
    /// The further weights, in their order.
    pub(crate) more: [Option<MoreOperands>; MAX_WEIGHTS - 1],
}

/// A further weight of an AllGather-GEMM, with its result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MoreOperands {
    pub(crate) w: View,
    pub(crate) bias: Option<View>,
    pub(crate) y: View,
}

/// Names of the further weights' operands.
pub(crate) const MORE: [[&str; 3]; MAX_WEIGHTS - 1] =
    [["w[1]", "bias[1]", "y[1]"], ["w[2]", "bias[2]", "y[2]"], ["w[3]", "bias[3]", "y[3]"]];

impl Operands {
    /// Each operand with its name, in the order of the call.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &View)> {
        self.inputs().chain(self.outputs())
    }

    fn inputs(&self) -> impl Iterator<Item = (&'static str, &View)> {
        let (bias, residual, gain) =
            (self.bias.as_ref(), self.residual.as_ref(), self.norm.as_ref().map(|norm| &norm.gain));
        let optional = [
            bias.map(|view| ("bias", view)),
            residual.map(|view| ("residual", view)),
            gain.map(|view| ("gain", view)),
        ];
        let more = self.more().flat_map(|(more, [w, bias, _])| {
            [Some((w, &more.w)), more.bias.as_ref().map(|view| (bias, view))]
        });
        [("x", &self.x), ("w", &self.w)]
            .into_iter()
            .chain(optional.into_iter().chain(more).flatten())
    }

    fn outputs(&self) -> impl Iterator<Item = (&'static str, &View)> {
        let y_norm = self.norm.as_ref().map(|norm| ("y_norm", &norm.y_norm));
        let more = self.more().map(|(more, [.., y])| (y, &more.y));
        [("y", &self.y)]
            .into_iter()
            .chain(y_norm)
            .chain(self.x_full.as_ref().map(|view| ("x_full", view)))
            .chain(more)
    }

    /// The further weights with their operands' names.
    fn more(&self) -> impl Iterator<Item = (&MoreOperands, [&'static str; 3])> {
        self.more.iter().flatten().zip(MORE)
    }

    /// Whether the residual is what `y` holds.
    pub(crate) fn residual_is_y(&self) -> bool {
        self.residual.is_some_and(|residual| {
            (residual.address, residual.layout) == (self.y.address, self.y.layout)
        })
    }

    /// Rows of the call, by its operand with all rows.
    pub(crate) const fn rows(&self, op: OpKind) -> usize {
        if op.gathers() { self.y.layout.rows } else { self.x.layout.rows }
    }

    /// Checks presence, shapes, locations and overlap of operands of type `T`, of a call with `m`
    /// rows. `problem` is that of any number of rows but 0.
    pub(crate) fn check<T>(
        &self,
        (problem, rank, m): (&Problem, Rank, usize),
        (epilogue, weights): (EpilogueSpec, WeightLayout),
        location: Location,
    ) -> Result<(), CallError> {
        let rows = |shape: Shape| if m == 0 { Shape { rows: 0, ..shape } } else { shape };
        let (takes, given) = (problem.weight_count(), self.more().count() + 1);
        if takes != given {
            return Err(CallError::Weights { takes, given });
        }
        let columns = |weight| problem.weight_columns(weight, rank).len() as u32;
        let vector = Shape { rows: 1, cols: columns(0) };
        let output = rows(epilogue.y_shape(problem, rank));
        let (w_rows, w_cols) = weights.extents(columns(0), problem.k_local(rank));
        let weights_shape = Shape { rows: w_rows, cols: w_cols };
        let optional = [
            ("bias", self.bias, epilogue.bias, vector),
            ("residual", self.residual, epilogue.residual, output),
            ("gain", self.norm.map(|norm| norm.gain), epilogue.rms_norm.is_some(), vector),
        ];
        let more_biases = (1..).zip(self.more()).map(|(weight, (more, [_, bias, _]))| {
            (bias, more.bias, epilogue.bias, Shape { rows: 1, cols: columns(weight) })
        });
        for (operand, given, wanted, expected) in optional.into_iter().chain(more_biases) {
            match given {
                None if wanted => return Err(CallError::NotGiven { operand, expected }),
                Some(view) if !wanted => {
                    return Err(CallError::Unwanted { operand, found: view.layout });
                }
                _ => {}
            }
        }
        if self.x_full.is_some() && problem.op().reduces() {
            return Err(CallError::NotGathered { op: problem.op() });
        }
        let all_rows = rows(Shape { rows: problem.m(), cols: problem.k() });
        let more = || (1..).zip(self.more()).map(|(weight, (more, _))| (more, columns(weight)));
        let more_inputs = more().flat_map(|(more, cols)| {
            [
                Some(Shape { rows: cols, cols: problem.k() }),
                more.bias.map(|_| Shape { rows: 1, cols }),
            ]
            .into_iter()
            .flatten()
        });
        let more_outputs = more().map(|(_, cols)| rows(Shape { rows: problem.m(), cols }));
        let outputs = [Some(output), self.norm.map(|_| output), self.x_full.map(|_| all_rows)]
            .into_iter()
            .flatten()
            .chain(more_outputs);
        let given = optional
            .into_iter()
            .filter_map(|(_, given, _, shape)| given.map(|_| shape))
            .chain(more_inputs);
        let shapes =
            [rows(problem.x_shape(rank)), weights_shape].into_iter().chain(given).chain(outputs);
        for ((operand, view), expected) in self.named().zip(shapes) {
            let found = view.layout;
            if (found.rows, found.cols) != (expected.rows as usize, expected.cols as usize) {
                return Err(CallError::Shape {
                    operand,
                    op: problem.op(),
                    m,
                    rank,
                    world: problem.world(),
                    expected,
                    found,
                });
            }
            if view.location != location {
                return Err(CallError::Location {
                    operand,
                    expected: location,
                    found: view.location,
                });
            }
        }
        for (at, (output, view)) in self.outputs().enumerate() {
            let written = view.bytes::<T>();
            let others = self.inputs().chain(self.outputs().skip(at + 1));
            for (operand, other) in others
                .filter(|other| (output, other.0) != ("y", "residual") || !self.residual_is_y())
            {
                let other = other.bytes::<T>();
                if written.start < other.end
                    && other.start < written.end
                    && !written.is_empty()
                    && !other.is_empty()
                {
                    return Err(CallError::Overlap { output, operand, written, other });
                }
            }
        }
        Ok(())
    }

    /// Checks that views that track their memory's uses do so on the call's stream.
    pub(crate) fn check_stream(&self, call: usize) -> Result<(), CallError> {
        for (operand, view) in self.named() {
            if let Some(view) = view.ordered_on.filter(|&view| view != call) {
                return Err(CallError::ViewStream { operand, view, call });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[expect(clippy::large_types_passed_by_value, reason = "operands are made where they are checked")]
mod tests {
    use super::*;
    use crate::tensor::Layout;
    use flux_core::{DType, OpKind, WorldSize};
    use half::bf16;

    const HERE: Location = Location::Cuda(1);

    fn view(address: u64, rows: usize, cols: usize) -> View {
        View {
            address,
            layout: Layout::dense(rows, cols),
            location: HERE,
            ordered_on: None,
            claimed: false,
        }
    }

    fn problem() -> Problem {
        let world = WorldSize::new(2).unwrap();
        Problem::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16, world).unwrap()
    }

    fn good() -> Operands {
        Operands {
            x: view(0x1000, 4, 64),
            w: view(0x2000, 16, 64),
            bias: None,
            residual: None,
            y: view(0x3000, 8, 16),
            norm: None,
            x_full: None,
            more: [None; MAX_WEIGHTS - 1],
        }
    }

    fn refused(operands: Operands) -> String {
        let (bias, residual) = (operands.bias.is_some(), operands.residual.is_some());
        let epilogue = EpilogueSpec { bias, residual, ..EpilogueSpec::default() };
        operands
            .check::<bf16>((&problem(), Rank::new(1), 8), (epilogue, WeightLayout::Nk), HERE)
            .unwrap_err()
            .to_string()
    }

    fn passes(operands: Operands, bias: bool) -> Result<(), CallError> {
        operands.check::<bf16>(
            (&problem(), Rank::new(1), 8),
            (EpilogueSpec { bias, ..EpilogueSpec::default() }, WeightLayout::Nk),
            HERE,
        )
    }

    #[test]
    fn operands_of_the_problem_pass() {
        passes(good(), false).unwrap();
        passes(Operands { bias: Some(view(0x5000, 1, 16)), ..good() }, true).unwrap();
        // Back to back: y begins where w ends.
        let w_end = good().w.bytes::<bf16>().end;
        passes(Operands { y: view(w_end, 8, 16), ..good() }, false).unwrap();
    }

    #[test]
    fn a_wrong_shape_names_operand_and_shapes() {
        assert_eq!(
            refused(Operands { x: view(0x1000, 8, 64), ..good() }),
            "x is [8, 64], but ag_gemm with m = 8 takes [4, 64] on rank 1 of 2: all operands have \
             the rows of one m"
        );
        assert!(
            refused(Operands { w: view(0x2000, 16, 56), ..good() }).starts_with("w is [16, 56]")
        );
        assert!(refused(Operands { y: view(0x3000, 4, 16), ..good() }).starts_with("y is [4, 16]"));
    }

    #[test]
    fn a_call_without_rows_takes_operands_without_rows() {
        let without = Operands { x: view(0, 0, 64), y: view(0, 0, 16), ..good() };
        let check = |operands: Operands| {
            operands.check::<bf16>(
                (&problem(), Rank::new(0), 0),
                (EpilogueSpec::default(), WeightLayout::Nk),
                HERE,
            )
        };
        check(without).unwrap();
        let refused =
            check(Operands { x: view(0x1000, 4, 64), ..without }).unwrap_err().to_string();
        assert!(
            refused.starts_with("x is [4, 64], but ag_gemm with m = 0 takes [0, 64]"),
            "{refused}"
        );
    }

    #[test]
    fn a_bias_is_given_where_one_was_built_and_nowhere_else() {
        let bias = |rows, cols| Operands { bias: Some(view(0x5000, rows, cols)), ..good() };
        assert_eq!(
            passes(good(), true).unwrap_err().to_string(),
            "the op was built with a bias and none was given: call forward_with with one of [1, 16]"
        );
        assert_eq!(
            passes(bias(1, 16), false).unwrap_err().to_string(),
            "a bias of [1, 16] was given to an op that was built without: leave it out, or build \
             the op with bias(true)"
        );
        // The whole op's columns, a column vector, a bias for each row.
        for (rows, cols) in [(1, 32), (16, 1), (8, 16)] {
            let text = format!(
                "bias is [{rows}, {cols}], but ag_gemm with m = 8 takes [1, 16] on rank 1 of 2: \
                 give one row of 16 values"
            );
            assert_eq!(refused(bias(rows, cols)), text);
        }
        let elsewhere = View { location: Location::Cuda(0), ..view(0x5000, 1, 16) };
        assert!(
            refused(Operands { bias: Some(elsewhere), ..good() })
                .starts_with("bias is in CUDA device 0")
        );
        assert!(
            refused(Operands { bias: Some(view(0x3010, 1, 16)), ..good() })
                .contains("overlaps bias")
        );
    }

    #[test]
    fn weights_of_k_and_n_are_the_transpose() {
        let check = |w, layout| {
            let spec = (EpilogueSpec::default(), layout);
            Operands { w, ..good() }.check::<bf16>((&problem(), Rank::new(1), 8), spec, HERE)
        };
        check(view(0x2000, 64, 16), WeightLayout::Kn).unwrap();
        let refused = check(good().w, WeightLayout::Kn).unwrap_err().to_string();
        assert!(
            refused.starts_with("w is [16, 64], but ag_gemm with m = 8 takes [64, 16]"),
            "{refused}"
        );
        assert!(check(view(0x2000, 64, 16), WeightLayout::Nk).is_err());
    }

    #[test]
    fn a_residual_has_the_shape_of_y_and_may_be_y_itself() {
        let residual =
            |address, rows, cols| Operands { residual: Some(view(address, rows, cols)), ..good() };
        let check = |operands: Operands, residual| {
            let epilogue = EpilogueSpec { residual, ..EpilogueSpec::default() };
            operands.check::<bf16>(
                (&problem(), Rank::new(1), 8),
                (epilogue, WeightLayout::Nk),
                HERE,
            )
        };
        check(residual(0x5000, 8, 16), true).unwrap();
        check(residual(0x3000, 8, 16), true).unwrap();
        assert!(
            residual(0x3000, 8, 16).residual_is_y() && !residual(0x5000, 8, 16).residual_is_y()
        );
        let refused_of = |operands, built| check(operands, built).unwrap_err().to_string();
        assert_eq!(
            refused_of(good(), true),
            "the op was built with a residual and none was given: call forward_with with one of \
             [8, 16]"
        );
        assert!(
            refused_of(residual(0x5000, 8, 16), false)
                .ends_with("leave it out, or build the op with residual(true)")
        );
        for (rows, cols) in [(4, 16), (1, 16), (8, 8)] {
            assert!(
                refused_of(residual(0x5000, rows, cols), true)
                    .starts_with(&format!("residual is [{rows}, {cols}], but ag_gemm"))
            );
        }
        // A row off, and the same first element with other rows.
        let wide = View { layout: Layout::strided(8, 16, 24), ..view(0x3000, 8, 16) };
        for residual in [view(0x3020, 8, 16), wide] {
            let text = refused_of(Operands { residual: Some(residual), ..good() }, true);
            assert!(
                text.contains("overlaps residual")
                    && text.ends_with("or is the residual itself with the same rows"),
                "{text}"
            );
        }
    }

    #[test]
    fn gathered_rows_have_the_columns_of_x_and_memory_of_their_own() {
        let gathered =
            |address, rows, cols| Operands { x_full: Some(view(address, rows, cols)), ..good() };
        passes(gathered(0x5000, 8, 64), false).unwrap();
        let text = "x_full is [4, 64], but ag_gemm with m = 8 takes [8, 64] on rank 1 of 2: all \
                    operands have the rows of one m";
        assert_eq!(refused(gathered(0x5000, 4, 64)), text);
        assert!(refused(gathered(0x5000, 8, 16)).starts_with("x_full is [8, 16]"));
        for (address, operand) in [(0x1000, "x "), (0x2000, "w ")] {
            let text = refused(gathered(address, 8, 64));
            assert!(
                text.starts_with("x_full") && text.contains(&format!("overlaps {operand}")),
                "{text}"
            );
            assert!(text.ends_with("x_full needs memory of its own"), "{text}");
        }
        assert!(refused(gathered(0x3010, 8, 64)).contains("overlaps x_full"));
        let elsewhere = View { location: Location::Host, ..view(0x5000, 8, 64) };
        assert!(
            refused(Operands { x_full: Some(elsewhere), ..good() })
                .starts_with("x_full is in host memory")
        );
        let sums = Problem::new(
            OpKind::GemmReduceScatter,
            8,
            16,
            128,
            DType::Bf16,
            WorldSize::new(2).unwrap(),
        )
        .unwrap();
        let spec = (EpilogueSpec::default(), WeightLayout::Nk);
        let refused = gathered(0x5000, 8, 64)
            .check::<bf16>((&sums, Rank::new(1), 8), spec, HERE)
            .unwrap_err();
        assert_eq!(
            refused.to_string(),
            "gemm_rs gathers no rows, and an x_full was given: leave it out, or use ag_gemm"
        );
    }

    #[test]
    fn memory_of_another_device_is_refused() {
        let w = View { location: Location::Cuda(0), ..good().w };
        let text = refused(Operands { w, ..good() });
        assert_eq!(
            text,
            "w is in CUDA device 0, but this rank's communicator works on CUDA device 1: copy it \
             there"
        );
        let y = View { location: Location::Host, ..good().y };
        assert!(refused(Operands { y, ..good() }).starts_with("y is in host memory"));
    }

    #[test]
    fn an_output_that_shares_one_byte_with_an_input_is_refused() {
        let w_end = good().w.bytes::<bf16>().end;
        assert!(refused(Operands { y: view(w_end - 2, 8, 16), ..good() }).contains("overlaps w"));
        assert!(refused(Operands { y: view(0x1000, 8, 16), ..good() }).contains("overlaps x"));
    }

    #[test]
    fn a_view_ordered_on_another_stream_is_refused() {
        let x = View { ordered_on: Some(0x10), ..good().x };
        let operands = Operands { x, ..good() };
        operands.check_stream(0x10).unwrap();
        let text = operands.check_stream(0x20).unwrap_err().to_string();
        assert_eq!(
            text,
            "the view of x was made for stream 0x10, the call is on stream 0x20: make the view for \
             the call's stream"
        );
    }
}
