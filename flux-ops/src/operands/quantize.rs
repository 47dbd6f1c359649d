//! The operands of what quantises rows: a [`Quantizer`](crate::Quantizer), or an op with its norm.
//!
//! Invariant: checked operands fit each other, and outputs overlap nothing.

use super::Operands;
use crate::error::CallError;
use crate::spec::{Epsilon, NormSpec};
use crate::tensor::{Layout, Location, TensorError, View};
use flux_core::{DType, ElementType, Numerics, Scales};
use flux_kernels::{Operand, QuantizedRows};
use flux_transport::Stream;

/// What a [`Quantizer`](crate::Quantizer) reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOperands<V> {
    /// `[rows, k]` of bf16 or fp16.
    pub x: V,
    /// `[k]` of the same type, for an RMSNorm before.
    pub norm: Option<(V, Epsilon)>,
    /// Which scales.
    pub scales: Scales,
    /// `[1, 1]` of fp32, of [`Scales::Tensor`] alone.
    pub scale: Option<V>,
    /// Of E4M3: `[rows, k + scale bytes]`, or `[rows, k]` with `out_scale`.
    pub out: V,
    /// `[1, rows]` of fp32 with [`Scales::Row`], `[k / 128, rows]` with [`Scales::Block`]; of no
    /// rows with a column.
    pub out_scale: Option<V>,
}

impl Operands<View> {
    /// Of a call that was checked, whose op quantises its normalised rows: what does it.
    pub(crate) fn of_norm(&self, norm: NormSpec) -> QuantizeOperands<View> {
        let [x, gain, out] =
            [Operand::Y, Operand::Gain, Operand::YNorm].map(|operand| *self.expect(operand, 0));
        let [scale, out_scale] =
            [Operand::NormScale, Operand::YNormScale].map(|operand| self.get(operand, 0).copied());
        let (norm, scales) = (Some((gain, norm.eps)), norm.scales);
        QuantizeOperands { x, norm, scales, scale, out, out_scale }
    }
}

impl QuantizeOperands<View> {
    /// The element type of `x`, of operands that fit each other.
    pub(crate) fn check(&self, location: Location, stream: Stream<'_>) -> Result<DType, CallError> {
        let Self { x, norm, scales, scale, out, out_scale } = self;
        let (rows, k) = (x.layout.rows, x.layout.cols);
        let dtype = match x.dtype {
            ElementType::Matrix(dtype) if DType::OUTPUTS.contains(&dtype) => dtype,
            found => {
                let source = TensorError::DType { expected: DType::Bf16.into(), found };
                return Err(CallError::View { operand: "x", source });
            }
        };
        let numerics = Numerics::e4m3(*scales, dtype);
        let multiple = numerics.row_multiple() as usize;
        let elements = u32::try_from(k).ok().filter(|k| k.is_multiple_of(multiple as u32));
        let (Some(elements), true) = (elements, numerics.is_supported()) else {
            return Err(CallError::QuantizedColumns { k, scales: *scales, multiple });
        };
        let form = QuantizedRows { scales: *scales, apart: out_scale.is_some() };
        let apart = Layout::from(form.scales_apart(rows as u32, elements));
        let apart = (form.apart && apart.rows > 0).then_some(apart);
        let one = (*scales == Scales::Tensor).then_some(Layout::dense(1, 1));
        let wanted = [
            ("x", Some(x), Some((x.layout, x.dtype))),
            ("gain", norm.as_ref().map(|(gain, _)| gain), {
                norm.as_ref().map(|_| (Layout::dense(1, k), x.dtype))
            }),
            ("scale", scale.as_ref(), one.map(|one| (one, ElementType::F32))),
            ("out_scale", out_scale.as_ref(), apart.map(|of| (of, ElementType::F32))),
            ("out", Some(out), {
                Some((Layout::dense(rows, form.columns(elements) as usize), DType::E4m3.into()))
            }),
        ];
        for (operand, given, expected) in wanted {
            let extents = |of: Layout| (of.rows, of.cols);
            let (found, expected) = match (given, expected) {
                (None, None) => continue,
                (Some(found), Some(expected)) if extents(found.layout) == extents(expected.0) => {
                    (found, expected)
                }
                (found, expected) => {
                    let found = found.map(|view| view.layout);
                    let (scales, expected) = (*scales, expected.map(|(layout, _)| layout));
                    return Err(CallError::Quantized { operand, scales, expected, found });
                }
            };
            if found.dtype != expected.1 {
                let source = TensorError::DType { expected: expected.1, found: found.dtype };
                return Err(CallError::View { operand, source });
            }
            if found.location != location {
                let (expected, found) = (location, found.location);
                return Err(CallError::Location { operand, expected, found });
            }
            if let (Some(view), Some(call)) = (found.ordered_on, stream.raw())
                && view != call
            {
                return Err(CallError::ViewStream { operand, view, call });
            }
            for (output, of) in [("out", Some(out)), ("out_scale", out_scale.as_ref())] {
                let Some(written) = of.map(View::bytes).filter(|_| operand != output) else {
                    continue;
                };
                let other = found.bytes();
                let overlaps = written.start < other.end && other.start < written.end;
                if overlaps && !written.is_empty() && !other.is_empty() {
                    return Err(CallError::Overlap { output, operand, written, other });
                }
            }
        }
        match norm.map(|(_, eps)| eps.get()).filter(|eps| !(eps.is_finite() && *eps >= 0.0)) {
            Some(value) => Err(CallError::Epsilon { value }),
            None => Ok(dtype),
        }
    }
}
