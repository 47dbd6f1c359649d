//! The checks of a call's operands, before anything is launched.
//!
//! Invariant: operands that passed have the problem's shapes and element types, lie where the
//! communicator works, and an output shares no byte with another operand, unless `y` is the
//! residual itself.

use super::Operands;
use crate::error::CallError;
use crate::spec::OpSpec;
use crate::tensor::{Location, TensorError, View};
use flux_core::problem::Shape;
use flux_core::{DType, Numerics, OpKind, Problem, Rank};

impl Operands<View> {
    /// Whether the residual is what `y` holds.
    pub(crate) fn residual_is_y(&self) -> bool {
        let is_it = |weight: &super::Weight<View>, residual: &View| {
            (residual.address, residual.layout) == (weight.y.address, weight.y.layout)
        };
        self.weights.iter().next().zip(self.residual.as_ref()).is_some_and(|(y, of)| is_it(y, of))
    }

    /// Rows of the call, by its operand with all rows.
    pub(crate) fn rows(&self, op: OpKind) -> usize {
        match self.weights.iter().next() {
            Some(first) if op.gathers() => first.y.layout.rows,
            _ => self.x.layout.rows,
        }
    }

    /// Checks presence, shapes, element types, locations and overlap of the operands of a call with
    /// `m` rows. `problem` is that of any number of rows but 0.
    pub(crate) fn check(
        &self,
        spec: &OpSpec,
        problem: &Problem,
        rank: Rank,
        m: usize,
        location: Location,
    ) -> Result<(), CallError> {
        let (takes, given) = (problem.weight_count(), self.weights.len());
        if takes != given {
            return Err(CallError::Weights { takes, given });
        }
        let rows = |shape: Shape| if m == 0 { Shape { rows: 0, ..shape } } else { shape };
        let columns = |weight| problem.weight_columns(weight, rank).len() as u32;
        let vector = |weight| Shape { rows: 1, cols: columns(weight) };
        let result = |weight| {
            rows(spec.epilogue.result(Shape { cols: columns(weight), ..problem.y_shape(rank) }))
        };
        for (weight, (names, given)) in self.named_weights().enumerate() {
            present(names.bias, given.bias, spec.epilogue.bias, vector(weight))?;
        }
        present("residual", self.residual, spec.epilogue.residual, result(0))?;
        let gain = self.norm.map(|norm| norm.gain);
        present("gain", gain, spec.epilogue.rms_norm.is_some(), vector(0))?;
        if self.gathered.is_some() && problem.op().reduces() {
            return Err(CallError::NotGathered { op: problem.op() });
        }
        let fits = |operand, view: &View, shape: Shape, dtype: DType| {
            let found = view.layout;
            if (found.rows, found.cols) != (shape.rows as usize, shape.cols as usize) {
                let (op, world, expected) = (problem.op(), problem.world(), shape);
                return Err(CallError::Shape { operand, op, m, rank, world, expected, found });
            }
            if view.dtype != dtype {
                let source = TensorError::DType { expected: dtype, found: view.dtype };
                return Err(CallError::View { operand, source });
            }
            if view.location != location {
                let (expected, found) = (location, view.location);
                return Err(CallError::Location { operand, expected, found });
            }
            Ok(())
        };
        let Numerics { operand, output, .. } = problem.numerics();
        fits("x", &self.x, rows(problem.x_shape(rank)), operand)?;
        for (weight, (names, given)) in self.named_weights().enumerate() {
            let (rows, cols) = spec.weights.extents(columns(weight), problem.k_local(rank));
            fits(names.w, &given.w, Shape { rows, cols }, operand)?;
            given.bias.map_or(Ok(()), |bias| fits(names.bias, &bias, vector(weight), output))?;
            fits(names.y, &given.y, result(weight), output)?;
        }
        self.residual.map_or(Ok(()), |residual| fits("residual", &residual, result(0), output))?;
        if let Some(norm) = &self.norm {
            fits("gain", &norm.gain, vector(0), output)?;
            fits("y_norm", &norm.y_norm, result(0), output)?;
        }
        let all_rows = rows(Shape { rows: problem.m(), cols: problem.k() });
        self.gathered.map_or(Ok(()), |out| fits("x_full", &out, all_rows, operand))?;
        self.check_overlap()
    }

    /// Checks that no output shares memory with another operand.
    fn check_overlap(&self) -> Result<(), CallError> {
        for (at, (output, view)) in self.outputs().enumerate() {
            let written = view.bytes();
            let others = self.inputs().chain(self.outputs().skip(at + 1));
            for (operand, other) in others
                .filter(|other| (output, other.0) != ("y", "residual") || !self.residual_is_y())
            {
                let other = other.bytes();
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

/// Checks that an operand is given exactly where the op was built with it.
fn present(
    operand: &'static str,
    given: Option<View>,
    wanted: bool,
    expected: Shape,
) -> Result<(), CallError> {
    match given {
        None if wanted => Err(CallError::NotGiven { operand, expected }),
        Some(view) if !wanted => Err(CallError::Unwanted { operand, found: view.layout }),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[expect(clippy::large_types_passed_by_value, reason = "operands are made where they are checked")]
mod tests {
    use super::*;
    use crate::operands::Weight;
    use crate::spec::EpilogueSpec;
    use crate::tensor::Layout;
    use flux_core::WorldSize;
    use flux_core::problem::WeightList;
    use flux_kernels::WeightLayout;

    const HERE: Location = Location::Cuda(1);

    const fn view(address: u64, rows: usize, cols: usize) -> View {
        View {
            address,
            layout: Layout::dense(rows, cols),
            dtype: DType::Bf16,
            location: HERE,
            ordered_on: None,
            claimed: false,
        }
    }

    fn problem() -> Problem {
        let world = WorldSize::new(2).unwrap();
        Problem::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16, world).unwrap()
    }

    type Views = Operands<View>;

    const WEIGHT: Weight<View> =
        Weight { w: view(0x2000, 16, 64), bias: None, y: view(0x3000, 8, 16) };

    /// The operands of a call with one weight.
    fn of(weight: Weight<View>) -> Views {
        Operands {
            x: view(0x1000, 4, 64),
            weights: WeightList::one(weight),
            residual: None,
            norm: None,
            gathered: None,
            constant_weights: false,
        }
    }

    fn good() -> Views {
        of(WEIGHT)
    }

    fn spec(epilogue: EpilogueSpec) -> OpSpec {
        OpSpec { epilogue, ..OpSpec::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16) }
    }

    fn refused(operands: Views) -> String {
        let bias = operands.weights[0].bias.is_some();
        let residual = operands.residual.is_some();
        let spec = spec(EpilogueSpec { bias, residual, ..EpilogueSpec::default() });
        operands.check(&spec, &problem(), Rank::new(1), 8, HERE).unwrap_err().to_string()
    }

    fn passes(operands: Views, bias: bool) -> Result<(), CallError> {
        let spec = spec(EpilogueSpec { bias, ..EpilogueSpec::default() });
        operands.check(&spec, &problem(), Rank::new(1), 8, HERE)
    }

    #[test]
    fn operands_of_the_problem_pass() {
        passes(good(), false).unwrap();
        passes(of(Weight { bias: Some(view(0x5000, 1, 16)), ..WEIGHT }), true).unwrap();
        // Back to back: y begins where w ends.
        let w_end = WEIGHT.w.bytes().end;
        passes(of(Weight { y: view(w_end, 8, 16), ..WEIGHT }), false).unwrap();
    }

    #[test]
    fn a_wrong_shape_names_operand_and_shapes() {
        assert_eq!(
            refused(Operands { x: view(0x1000, 8, 64), ..good() }),
            "x is [8, 64], but ag_gemm with m = 8 takes [4, 64] on rank 1 of 2: all operands have \
             the rows of one m"
        );
        assert!(
            refused(of(Weight { w: view(0x2000, 16, 56), ..WEIGHT })).starts_with("w is [16, 56]")
        );
        assert!(
            refused(of(Weight { y: view(0x3000, 4, 16), ..WEIGHT })).starts_with("y is [4, 16]")
        );
    }

    #[test]
    fn a_call_without_rows_takes_operands_without_rows() {
        let without = Operands { x: view(0, 0, 64), ..of(Weight { y: view(0, 0, 16), ..WEIGHT }) };
        let check = |operands: Views| {
            let spec = spec(EpilogueSpec::default());
            operands.check(&spec, &problem(), Rank::new(0), 0, HERE)
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
        let bias = |rows, cols| of(Weight { bias: Some(view(0x5000, rows, cols)), ..WEIGHT });
        assert_eq!(
            passes(good(), true).unwrap_err().to_string(),
            "the op was built with bias(true), and the call brings no bias: make it as \
             op.call(&x).weight(&w, &mut y).bias(&bias).on(stream), with a view of shape (1, 16)"
        );
        assert_eq!(
            passes(bias(1, 16), false).unwrap_err().to_string(),
            "the call brings a bias of shape (1, 16), and the op was built without: leave it out, \
             or build the op with bias(true)"
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
            refused(of(Weight { bias: Some(elsewhere), ..WEIGHT }))
                .starts_with("bias is in CUDA device 0")
        );
        assert!(
            refused(of(Weight { bias: Some(view(0x3010, 1, 16)), ..WEIGHT }))
                .contains("overlaps bias")
        );
    }

    #[test]
    fn weights_of_k_and_n_are_the_transpose() {
        let check = |w, layout| {
            let spec = OpSpec { weights: layout, ..spec(EpilogueSpec::default()) };
            of(Weight { w, ..WEIGHT }).check(&spec, &problem(), Rank::new(1), 8, HERE)
        };
        check(view(0x2000, 64, 16), WeightLayout::Kn).unwrap();
        let refused = check(WEIGHT.w, WeightLayout::Kn).unwrap_err().to_string();
        assert!(
            refused.starts_with("w is [16, 64], but ag_gemm with m = 8 takes [64, 16]"),
            "{refused}"
        );
        let refused = check(view(0x2000, 64, 16), WeightLayout::Nk).unwrap_err().to_string();
        assert!(refused.ends_with("built with weights(WeightLayout::Kn)"), "{refused}");
    }

    #[test]
    fn a_residual_has_the_shape_of_y_and_may_be_y_itself() {
        let residual =
            |address, rows, cols| Operands { residual: Some(view(address, rows, cols)), ..good() };
        let check = |operands: Views, residual| {
            let spec = spec(EpilogueSpec { residual, ..EpilogueSpec::default() });
            operands.check(&spec, &problem(), Rank::new(1), 8, HERE)
        };
        check(residual(0x5000, 8, 16), true).unwrap();
        check(residual(0x3000, 8, 16), true).unwrap();
        assert!(
            residual(0x3000, 8, 16).residual_is_y() && !residual(0x5000, 8, 16).residual_is_y()
        );
        let refused_of = |operands, built| check(operands, built).unwrap_err().to_string();
        assert_eq!(
            refused_of(good(), true),
            "the op was built with residual(true), and the call brings no residual: make it as \
             op.call(&x).weight(&w, &mut y).residual(&residual).on(stream), with a view of shape \
             (8, 16)"
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
            |address, rows, cols| Operands { gathered: Some(view(address, rows, cols)), ..good() };
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
            refused(Operands { gathered: Some(elsewhere), ..good() })
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
        let spec = spec(EpilogueSpec::default());
        let refused =
            gathered(0x5000, 8, 64).check(&spec, &sums, Rank::new(1), 8, HERE).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "gemm_rs gathers no rows, and an x_full was given: leave it out, or use ag_gemm"
        );
    }

    #[test]
    fn an_operand_of_another_element_type_is_refused() {
        let w = View { dtype: DType::F16, ..WEIGHT.w };
        let text = refused(of(Weight { w, ..WEIGHT }));
        assert!(
            text.starts_with("w: ") && text.contains("fp16") && text.contains("bf16"),
            "{text}"
        );
        let y = View { dtype: DType::F16, ..WEIGHT.y };
        assert!(refused(of(Weight { y, ..WEIGHT })).starts_with("y: "));
    }

    #[test]
    fn memory_of_another_device_is_refused() {
        let w = View { location: Location::Cuda(0), ..WEIGHT.w };
        let text = refused(of(Weight { w, ..WEIGHT }));
        assert_eq!(
            text,
            "w is in CUDA device 0, but this rank's communicator works on CUDA device 1: copy it \
             there"
        );
        let y = View { location: Location::Host, ..WEIGHT.y };
        assert!(refused(of(Weight { y, ..WEIGHT })).starts_with("y is in host memory"));
    }

    #[test]
    fn an_output_that_shares_one_byte_with_an_input_is_refused() {
        let w_end = WEIGHT.w.bytes().end;
        assert!(refused(of(Weight { y: view(w_end - 2, 8, 16), ..WEIGHT })).contains("overlaps w"));
        assert!(refused(of(Weight { y: view(0x1000, 8, 16), ..WEIGHT })).contains("overlaps x"));
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
