//! The checks of a call's operands, before anything is launched.
//!
//! Invariant: operands that passed have the problem's shapes and element types, lie where the
//! communicator works, and an output shares no byte with another operand, unless `y` is the
//! residual itself.

use super::Operands;
use crate::error::CallError;
use crate::spec::{EpilogueSpec, OpSpec};
use crate::tensor::{Location, TensorError, View};
use flux_core::problem::Shape;
use flux_core::{OpKind, Problem, Rank, Scales};
use flux_kernels::{Extent, Operand, Presence, QuantizedRows, Shapes};

impl Operands<View> {
    /// Whether the residual is what `y` holds.
    pub(crate) fn residual_is_y(&self) -> bool {
        let place = |view: &View| (view.address, view.layout);
        let [residual, y] =
            [Operand::Residual, Operand::Y].map(|operand| self.get(operand, 0).map(place));
        residual.is_some() && residual == y
    }

    /// Rows of the call, by its operand with all rows.
    pub(crate) fn rows(&self, op: OpKind) -> usize {
        match self.get(Operand::Y, 0) {
            Some(y) if op.gathers() => y.layout.rows,
            _ => self.expect(Operand::X, 0).layout.rows,
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
        let (op, takes, given) = (problem.op(), problem.weight_count(), self.weight_count());
        if takes != given {
            return Err(CallError::Weights { takes, given });
        }
        let EpilogueSpec { gates, rms_norm, .. } = spec.epilogue;
        let scales = rms_norm.map_or(Scales::None, |norm| norm.scales);
        let apart = self.get(Operand::YNormScale, 0).is_some();
        let norm = QuantizedRows { scales, apart };
        let shapes = Shapes { problem, rank, layout: spec.weights, gates, norm };
        let shape = |operand: Operand, weight| {
            let shape = shapes.of_operand(operand, weight);
            match operand.extent() {
                _ if m > 0 => shape,
                Extent::ScalesOfNormalised => Shape { cols: 1, ..shape },
                extent if extent.has_rows_of_call(problem.numerics()) => Shape { rows: 0, ..shape },
                _ => shape,
            }
        };
        let slots = Operand::ALL.into_iter().flat_map(|operand| {
            let weights = if operand.is_of_weight() { takes } else { 1 };
            (0..weights).map(move |weight| (operand, weight))
        });
        for (operand, weight) in slots {
            let (name, given) = (operand.name(weight), self.get(operand, weight));
            let wanted = match operand.presence() {
                Presence::Always => true,
                Presence::Scales => problem.numerics().scales != Scales::None,
                Presence::Option => spec.epilogue.operands.has(operand),
                Presence::Norm => rms_norm.is_some(),
                Presence::NormScale => scales == Scales::Tensor,
                Presence::NormScales => given.is_some() && scales.of_row(1) > 0,
                Presence::Wanted if given.is_some() && !operand.is_of(op) => {
                    return Err(CallError::NotGathered { op });
                }
                Presence::Wanted if given.is_some() && problem.rows_carry_scales() => {
                    let scales = problem.numerics().scales;
                    return Err(CallError::GatheredScales { scales });
                }
                Presence::Wanted => given.is_some(),
            };
            match given {
                None if wanted => {
                    let expected = shape(operand, weight);
                    return Err(CallError::NotGiven { operand: name, expected });
                }
                Some(view) if !wanted => {
                    return Err(CallError::Unwanted { operand: name, found: view.layout });
                }
                _ => {}
            }
        }
        for (operand, weight, view) in self.list().iter() {
            let (name, expected, found) =
                (operand.name(weight), shape(operand, weight), view.layout);
            if (found.rows, found.cols) != (expected.rows as usize, expected.cols as usize) {
                let (operand, world) = (name, problem.world());
                return Err(CallError::Shape { operand, op, m, rank, world, expected, found });
            }
            let expected = shapes.element(operand);
            if view.dtype != expected {
                let source = TensorError::DType { expected, found: view.dtype };
                return Err(CallError::View { operand: name, source });
            }
            if view.location != location {
                let (expected, found) = (location, view.location);
                return Err(CallError::Location { operand: name, expected, found });
            }
        }
        self.check_scales(problem)?;
        self.check_overlap()
    }

    /// Checks that scales of gathered rows lie behind them, since they travel together, with all
    /// that fills a row.
    fn check_scales(&self, problem: &Problem) -> Result<(), CallError> {
        let (op, [x, scale]) =
            (problem.op(), [Operand::X, Operand::ScaleX].map(|operand| self.get(operand, 0)));
        let (Some(x), Some(scale)) = (x, scale) else { return Ok(()) };
        let travels = op.gathers() && problem.rows_carry_scales() && x.layout.rows > 0;
        let place = (x.address + u64::from(problem.k()), x.row_bytes());
        let found = (scale.address, scale.row_bytes());
        // A single row has no other to be apart from.
        let is_behind = place.0 == found.0 && (place.1 == found.1 || x.layout.rows == 1);
        let row_bytes = problem.gathered_row_bytes();
        let end = x.row_bytes() * (x.layout.rows as u64).saturating_sub(1) + row_bytes;
        let has_room =
            x.row_bytes() >= row_bytes && x.borrowed_bytes.is_none_or(|bytes| bytes >= end);
        if travels && !(is_behind && has_room) {
            return Err(CallError::ScalesApart { op, k: problem.k(), needed: row_bytes });
        }
        Ok(())
    }

    /// Checks that no output shares memory with another operand.
    fn check_overlap(&self) -> Result<(), CallError> {
        let all = || self.list().iter().enumerate();
        for (at, (output, weight, view)) in all().filter(|(_, (operand, ..))| operand.is_output()) {
            let written = view.bytes();
            // Two outputs are compared once.
            let others = all().filter(|(other, (operand, ..))| !operand.is_output() || *other > at);
            for (_, (operand, of_weight, other)) in others {
                let is_itself = (output, operand) == (Operand::Y, Operand::Residual);
                let other = other.bytes();
                if written.start < other.end
                    && other.start < written.end
                    && !written.is_empty()
                    && !other.is_empty()
                    && !(is_itself && self.residual_is_y())
                {
                    let (output, operand) = (output.name(weight), operand.name(of_weight));
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
    use flux_core::{DType, ElementType, Numerics, WorldSize};
    use flux_kernels::{OperandSet, WeightLayout};

    const HERE: Location = Location::Cuda(1);

    const fn view(address: u64, rows: usize, cols: usize) -> View {
        View {
            address,
            layout: Layout::dense(rows, cols),
            dtype: ElementType::Matrix(DType::Bf16),
            location: HERE,
            ordered_on: None,
            claimed: false,
            borrowed_bytes: None,
        }
    }

    fn problem() -> Problem {
        let world = WorldSize::new(2).unwrap();
        Problem::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16, world).unwrap()
    }

    type Views = Operands<View>;

    const X: View = view(0x1000, 4, 64);
    const W: View = view(0x2000, 16, 64);
    const Y: View = view(0x3000, 8, 16);

    fn good() -> Views {
        let mut operands = Operands::new(X);
        operands.add_weight(W, Y);
        operands
    }

    /// The same with another view.
    fn with(operand: Operand, view: View) -> Views {
        let mut operands = good();
        operands.set(operand, 0, view);
        operands
    }

    fn spec(epilogue: EpilogueSpec) -> OpSpec {
        OpSpec { epilogue, ..OpSpec::new(OpKind::AllGatherGemm, 8, 32, 64, DType::Bf16) }
    }

    fn refused(operands: Views) -> String {
        let given = Operand::optional().filter(|&operand| operands.get(operand, 0).is_some());
        let spec = spec(EpilogueSpec { operands: given.collect(), ..EpilogueSpec::default() });
        operands.check(&spec, &problem(), Rank::new(1), 8, HERE).unwrap_err().to_string()
    }

    fn passes(operands: Views, bias: bool) -> Result<(), CallError> {
        let of_epilogue = OperandSet::EMPTY.with(Operand::Bias, bias);
        let spec = spec(EpilogueSpec { operands: of_epilogue, ..EpilogueSpec::default() });
        operands.check(&spec, &problem(), Rank::new(1), 8, HERE)
    }

    /// Rows of 64 codes in 128 bytes: the last, too, is read as a whole.
    #[test]
    fn the_last_row_has_memory_for_what_is_behind_its_codes() {
        let (numerics, world) =
            (Numerics::e4m3(Scales::Row, DType::Bf16), WorldSize::new(2).unwrap());
        let problem = Problem::new(OpKind::AllGatherGemm, 8, 32, 64, numerics, world).unwrap();
        let check = |borrowed_bytes| {
            let layout = Layout::strided(4, 64, 128);
            let x =
                View { layout, dtype: DType::E4m3.into(), borrowed_bytes, ..view(0x1000, 4, 64) };
            let layout = Layout::strided(4, 1, 32);
            let scale = View { layout, dtype: ElementType::F32, ..view(0x1040, 4, 1) };
            let mut operands = with(Operand::X, x);
            operands.set(Operand::ScaleX, 0, scale);
            operands.check_scales(&problem)
        };
        check(None).unwrap();
        check(Some(512)).unwrap();
        let error = check(Some(3 * 128 + 68)).unwrap_err();
        assert!(matches!(error, CallError::ScalesApart { k: 64, needed: 128, .. }), "{error}");
    }

    #[test]
    fn operands_of_the_problem_pass() {
        passes(good(), false).unwrap();
        passes(with(Operand::Bias, view(0x5000, 1, 16)), true).unwrap();
        // Back to back: y begins where w ends.
        let w_end = W.bytes().end;
        passes(with(Operand::Y, view(w_end, 8, 16)), false).unwrap();
    }

    #[test]
    fn a_wrong_shape_names_operand_and_shapes() {
        assert_eq!(
            refused(with(Operand::X, view(0x1000, 8, 64))),
            "x is [8, 64], but ag_gemm with m = 8 takes [4, 64] on rank 1 of 2: all operands have \
             the rows of one m"
        );
        assert!(refused(with(Operand::W, view(0x2000, 16, 56))).starts_with("w is [16, 56]"));
        assert!(refused(with(Operand::Y, view(0x3000, 4, 16))).starts_with("y is [4, 16]"));
    }

    #[test]
    fn a_call_without_rows_takes_operands_without_rows() {
        let mut without = with(Operand::Y, view(0, 0, 16));
        without.set(Operand::X, 0, view(0, 0, 64));
        let check = |operands: Views| {
            let spec = spec(EpilogueSpec::default());
            operands.check(&spec, &problem(), Rank::new(0), 0, HERE)
        };
        check(without).unwrap();
        without.set(Operand::X, 0, X);
        let refused = check(without).unwrap_err().to_string();
        assert!(
            refused.starts_with("x is [4, 64], but ag_gemm with m = 0 takes [0, 64]"),
            "{refused}"
        );
    }

    #[test]
    fn a_bias_is_given_where_one_was_built_and_nowhere_else() {
        let bias = |rows, cols| with(Operand::Bias, view(0x5000, rows, cols));
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
        assert!(refused(with(Operand::Bias, elsewhere)).starts_with("bias is in CUDA device 0"));
        assert!(refused(with(Operand::Bias, view(0x3010, 1, 16))).contains("overlaps bias"));
    }

    #[test]
    fn weights_of_k_and_n_are_the_transpose() {
        let check = |w, layout| {
            let spec = OpSpec { weights: layout, ..spec(EpilogueSpec::default()) };
            with(Operand::W, w).check(&spec, &problem(), Rank::new(1), 8, HERE)
        };
        check(view(0x2000, 64, 16), WeightLayout::Kn).unwrap();
        let refused = check(W, WeightLayout::Kn).unwrap_err().to_string();
        assert!(
            refused.starts_with("w is [16, 64], but ag_gemm with m = 8 takes [64, 16]"),
            "{refused}"
        );
        let refused = check(view(0x2000, 64, 16), WeightLayout::Nk).unwrap_err().to_string();
        assert!(refused.ends_with("built with weights(WeightLayout::Kn)"), "{refused}");
    }

    #[test]
    fn a_residual_has_the_shape_of_y_and_may_be_y_itself() {
        let residual = |address, rows, cols| with(Operand::Residual, view(address, rows, cols));
        let check = |operands: Views, residual| {
            let of_epilogue = OperandSet::EMPTY.with(Operand::Residual, residual);
            let spec = spec(EpilogueSpec { operands: of_epilogue, ..EpilogueSpec::default() });
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
            let text = refused_of(with(Operand::Residual, residual), true);
            assert!(
                text.contains("overlaps residual")
                    && text.ends_with("or is the residual itself with the same rows"),
                "{text}"
            );
        }
    }

    #[test]
    fn gathered_rows_have_the_columns_of_x_and_memory_of_their_own() {
        let gathered = |address, rows, cols| with(Operand::XFull, view(address, rows, cols));
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
        assert!(refused(with(Operand::XFull, elsewhere)).starts_with("x_full is in host memory"));
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
        let w = View { dtype: DType::F16.into(), ..W };
        let text = refused(with(Operand::W, w));
        assert!(
            text.starts_with("w: ") && text.contains("fp16") && text.contains("bf16"),
            "{text}"
        );
        let y = View { dtype: DType::F16.into(), ..Y };
        assert!(refused(with(Operand::Y, y)).starts_with("y: "));
    }

    #[test]
    fn memory_of_another_device_is_refused() {
        let w = View { location: Location::Cuda(0), ..W };
        let text = refused(with(Operand::W, w));
        assert_eq!(
            text,
            "w is in CUDA device 0, but this rank's communicator works on CUDA device 1: copy it \
             there"
        );
        let y = View { location: Location::Host, ..Y };
        assert!(refused(with(Operand::Y, y)).starts_with("y is in host memory"));
    }

    #[test]
    fn an_output_that_shares_one_byte_with_an_input_is_refused() {
        let w_end = W.bytes().end;
        assert!(refused(with(Operand::Y, view(w_end - 2, 8, 16))).contains("overlaps w"));
        assert!(refused(with(Operand::Y, view(0x1000, 8, 16))).contains("overlaps x"));
    }

    #[test]
    fn a_view_ordered_on_another_stream_is_refused() {
        let operands = with(Operand::X, View { ordered_on: Some(0x10), ..X });
        operands.check_stream(0x10).unwrap();
        let text = operands.check_stream(0x20).unwrap_err().to_string();
        assert_eq!(
            text,
            "the view of x was made for stream 0x10, the call is on stream 0x20: make the view for \
             the call's stream"
        );
    }
}
