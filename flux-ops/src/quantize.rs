//! Rows of 16-bit elements as 8-bit operands.
//!
//! Invariant: one launch a call, which takes no part in the order of the communicator's calls. The
//! host and a device write the same bits.

use crate::error::{BuildError, CallError};
use crate::execute::{kernels, location};
use crate::operands::QuantizeOperands;
use crate::spec::Epsilon;
use crate::tensor::{Location, RawTensor, TensorMut, TensorRef, View};
use flux_core::Scales;
use flux_cuda::CudaDevice;
use flux_kernels::cuda::Quantize;
use flux_kernels::{Element, F8E4M3, with_element};
use flux_transport::{Communicator, Stream, TransportError};
use std::sync::Arc;

/// Makes 8-bit operands on a communicator's device.
///
/// Rows `[rows, k]` of bf16 or fp16 become longer rows of E4M3. Each has its `k` codes, its fp32
/// scales behind them, and zeros up to a multiple of 128 bytes. An
/// [`AllGatherGemm`](crate::AllGatherGemm) takes them so ([`TensorRef::with_scales`]). Or they
/// become codes `[rows, k]`, and scales of their own ([`QuantizeCall::scales_to`]).
///
/// | scales | of | scale | `k` is a multiple of | scale bytes |
/// |---|---|---|---|---|
/// | [`Scales::Row`] | a row | `max(most / 448, 2^-126)` | 16 | 4 |
/// | [`Scales::Block`] | 128 elements of a row | the same | 128 | `k / 32` |
/// | [`Scales::Tensor`] | all | given | 16 | 0 |
///
/// `most` is the largest magnitude, without NaN. A code is the element times `1 / scale` in fp32,
/// rounded to nearest even, 448 at most. Zeros stay zeros. A NaN stays one. An infinity makes its
/// scale infinite and all that share it NaN; with a given scale it alone becomes NaN.
///
/// ```
/// use flux_ops::{Epsilon, F8E4M3, Quantizer, Scales, TensorMut, TensorRef, bf16};
/// use flux_transport::{Communicator, Select, Stream, World};
///
/// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
/// let quantizer = Quantizer::new(&comm)?;
/// let (rows, k) = (4, 64);
/// let (x, gain) = (vec![bf16::ONE; rows * k], vec![bf16::ONE; k]);
/// let mut out = vec![F8E4M3::from_bits(0); rows * 128];
/// quantizer
///     .rows(&TensorRef::host(&x, (rows, k))?, Scales::Row)
///     .rms_norm(&TensorRef::host(&gain, (k,))?, Epsilon::from(1e-5))
///     .write(&mut TensorMut::host(&mut out, (rows, 128))?, Stream::Host)?;
/// // The largest of a row is 448 times its scale.
/// assert!(out[..k].iter().all(|code| code.to_f32() == 448.0));
/// let (x, scale) = TensorRef::host(&out, (rows, 128))?.with_scales(k, Scales::Row)?;
/// # let _ = (x, scale);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Quantizer {
    location: Location,
    /// On a device.
    kernel: Option<(CudaDevice, Arc<Quantize>)>,
}

/// A call of a [`Quantizer`], of which [`write`](Self::write) is the last method.
#[derive(Debug)]
#[must_use = "nothing is written until `write`"]
pub struct QuantizeCall<'a> {
    quantizer: &'a Quantizer,
    x: View,
    norm: Option<(View, Epsilon)>,
    scales: Scales,
    scale: Option<View>,
    out_scale: Option<View>,
}

impl<'a> QuantizeCall<'a> {
    /// Normalises rows first, as `x / sqrt(mean(x^2) + eps) * gain` in fp32, not rounded between.
    pub const fn rms_norm<T: Element>(self, gain: &'a TensorRef<'_, T>, eps: Epsilon) -> Self {
        Self { norm: Some((gain.view(), eps)), ..self }
    }

    /// Writes scales here, and none behind the codes: `[1, rows]` of rows, `[k / 128, rows]` of
    /// blocks, with any row stride. So the scales of a column of blocks are contiguous.
    pub const fn scales_to(self, out: &'a mut TensorMut<'_, f32>) -> Self {
        Self { out_scale: Some(out.view()), ..self }
    }

    /// Writes codes and scales, on a device when the stream comes to it. Bytes behind scales are 0.
    ///
    /// # Errors
    /// [`CallError`] for operands that do not fit, before anything is launched.
    pub fn write<'s>(
        self,
        out: &mut TensorMut<'_, F8E4M3>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        let Self { quantizer, x, norm, scales, scale, out_scale } = self;
        let operands = QuantizeOperands { x, norm, scales, scale, out: out.view(), out_scale };
        quantizer.run_checked(&operands, stream.into())
    }
}

impl Quantizer {
    /// Loads the kernel of the communicator's device. Not collective.
    ///
    /// # Errors
    /// [`BuildError::NoQuantizedRows`] on a device without 8-bit operands, or what kept the kernel
    /// from being loaded.
    pub fn new(comm: &Communicator) -> Result<Self, BuildError> {
        let location = location(comm);
        let Location::Cuda(ordinal) = location else { return Ok(Self { location, kernel: None }) };
        let device = CudaDevice::open(ordinal)?;
        let kernel = {
            let _current = device.enter()?;
            kernels::quantize(device.info())?
        };
        Ok(Self { location, kernel: Some((device, kernel)) })
    }

    /// Begins a call with scales of rows or of blocks.
    pub const fn rows<'a, T: Element>(
        &'a self,
        x: &'a TensorRef<'_, T>,
        scales: Scales,
    ) -> QuantizeCall<'a> {
        let (norm, scale, out_scale) = (None, None, None);
        QuantizeCall { quantizer: self, x: x.view(), norm, scales, scale, out_scale }
    }

    /// Begins a call with the scale of a tensor, `[1, 1]`, which is read when the stream comes to
    /// it.
    pub const fn tensor<'a, T: Element>(
        &'a self,
        x: &'a TensorRef<'_, T>,
        scale: &'a TensorRef<'_, f32>,
    ) -> QuantizeCall<'a> {
        let (scales, scale) = (Scales::Tensor, Some(scale.view()));
        QuantizeCall { scale, ..self.rows(x, scales) }
    }

    /// A call with operands that another framework describes.
    ///
    /// # Safety
    /// The operands are as [`TensorRef::from_raw`] and [`TensorMut::from_raw`] ask.
    ///
    /// # Errors
    /// As [`QuantizeCall::write`], and [`CallError::View`] for a description of no operand.
    pub unsafe fn run<'s>(
        &self,
        operands: &QuantizeOperands<RawTensor>,
        stream: impl Into<Stream<'s>>,
    ) -> Result<(), CallError> {
        let QuantizeOperands { x, norm, scales, scale, out, out_scale } = *operands;
        let view = |operand, raw| {
            View::from_raw(raw).map_err(|source| CallError::View { operand, source })
        };
        let operands = QuantizeOperands {
            x: view("x", x)?,
            norm: norm.map(|(gain, eps)| view("gain", gain).map(|gain| (gain, eps))).transpose()?,
            scales,
            scale: scale.map(|scale| view("scale", scale)).transpose()?,
            out: view("out", out)?,
            out_scale: out_scale.map(|scale| view("out_scale", scale)).transpose()?,
        };
        self.run_checked(&operands, stream.into())
    }

    fn run_checked(
        &self,
        operands: &QuantizeOperands<View>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let dtype = operands.check(self.location, stream)?;
        let Some((device, kernel)) = &self.kernel else {
            // SAFETY: views of host memory that is readable, and of outputs, which are writable
            // and overlap none.
            unsafe { with_element!(dtype, T, operands.write_on_host::<T>()) };
            return Ok(());
        };
        let stream = stream.raw().ok_or(CallError::NoStream { location: self.location })?;
        let args = operands.args(false, stream);
        let _current = device.enter().map_err(TransportError::from)?;
        // SAFETY: checked views of memory that the caller keeps until the stream has come here.
        unsafe { kernel.launch(dtype, &args) }.map_err(CallError::Launch)
    }
}
