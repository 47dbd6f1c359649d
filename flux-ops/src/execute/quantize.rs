//! Quantises rows, by a launch or on the host.

use super::cuda::matrix;
use super::host::{rows, rows_mut};
use crate::operands::QuantizeOperands;
use crate::tensor::View;
use flux_kernels::cuda::QuantizeArgs;
use flux_kernels::{Element, cpu};

impl QuantizeOperands<View> {
    /// The operands of a launch.
    pub(crate) fn args(&self, programmatic: bool, stream: usize) -> QuantizeArgs {
        let Self { x, norm, scales, scale, out, out_scale } = self;
        QuantizeArgs {
            x: matrix(x),
            norm: norm.map(|(gain, eps)| (gain.address, eps.get())),
            scales: *scales,
            given: scale.as_ref().map(|scale| scale.address),
            out: matrix(out),
            out_scale: out_scale.as_ref().map(matrix),
            rows: x.layout.rows as u32,
            cols: x.layout.cols as u32,
            programmatic,
            stream,
        }
    }

    /// Writes codes and scales of rows of `T` in host memory.
    ///
    /// # Safety
    /// As of [`rows`] and [`rows_mut`], for checked operands.
    pub(crate) unsafe fn write_on_host<T: Element>(&self) {
        let Self { x, norm, scales, scale, out, out_scale } = self;
        // SAFETY: the caller's promise.
        let norm = norm.as_ref().map(|(gain, eps)| unsafe {
            cpu::Norm { gain: rows::<T>(gain).elements, eps: eps.get() }
        });
        // SAFETY: the caller's promise.
        let given = scale.as_ref().map(|scale| unsafe { rows::<f32>(scale).elements[0] });
        let extents = (x.layout.rows, x.layout.cols);
        // SAFETY: the caller's promise.
        let (x, out) = unsafe { (rows::<T>(x), rows_mut(out)) };
        // SAFETY: the caller's promise.
        let out_scale = out_scale.as_ref().map(|scale| unsafe { rows_mut(scale) });
        cpu::quantize(x, extents, norm, (*scales, given), out, out_scale);
    }
}
