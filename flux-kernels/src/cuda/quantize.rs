//! The quantising kernel, which makes 8-bit operands of rows.

use super::args::Matrix;
use super::error::LaunchError;
use super::row_wise::{RowKernel, row_wise};
use crate::abi::QuantizeParams;
use flux_core::{DType, Scales};

/// The loaded kernel, for both element types.
#[derive(Debug)]
pub struct Quantize(RowKernel);

/// The operands of one launch.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeArgs {
    /// The rows.
    pub x: Matrix,
    /// Address of the norm's gain, one element for each column, and what is added to the mean of
    /// squares.
    pub norm: Option<(u64, f32)>,
    /// Which scales.
    pub scales: Scales,
    /// Address of the scale of [`Scales::Tensor`].
    pub given: Option<u64>,
    /// Rows of codes, and their scales behind each without `out_scale`.
    pub out: Matrix,
    /// Where scales of rows or blocks go: a row for each group, with one of each row of `x`.
    pub out_scale: Option<Matrix>,
    /// Rows of both.
    pub rows: u32,
    /// Elements of a row: a multiple of 16, with scales of blocks of 128.
    pub cols: u32,
    /// Whether it may begin before the launch ahead on the stream has ended.
    pub programmatic: bool,
    /// The stream.
    pub stream: usize,
}

impl QuantizeArgs {
    fn params(&self) -> QuantizeParams {
        let Self { x, norm, scales, given, out, out_scale, cols, .. } = *self;
        let (gain, eps) = norm.unwrap_or_default();
        let groups = scales.of_row(cols);
        let group = cols.checked_div(groups).unwrap_or(0);
        let step = size_of::<f32>() as u64;
        let (scale, scale_row_bytes, scale_group_bytes, scales_of_row) = match out_scale {
            _ if group == 0 => (given.unwrap_or_default(), 0, 0, 0),
            Some(of) => (of.address, step, of.row_bytes, groups),
            None => {
                let padded = scales.bytes_behind_row(cols) / step as u32;
                (out.address + u64::from(cols), out.row_bytes, step, padded)
            }
        };
        QuantizeParams {
            x: x.address,
            x_row_bytes: x.row_bytes,
            gain,
            scale,
            scale_row_bytes,
            scale_group_bytes,
            out: out.address,
            out_row_bytes: out.row_bytes,
            cols,
            group,
            eps,
            scales_of_row,
        }
    }
}

impl Quantize {
    /// Loads the kernel from its cubin ([`Source::quantize`](crate::Source::quantize)) into the
    /// current context. [`loaded_quantize`](super::loaded_quantize) shares it.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks an entry point.
    pub fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        Ok(Self(RowKernel::load(cubin, [c"flux_quantize_bf16", c"flux_quantize_fp16"])?))
    }

    /// Enqueues what [`quantize`](crate::cpu::quantize) does, with the same bits, for rows of
    /// elements of this type; nothing where there is none. Does not wait for the device and
    /// allocates nothing.
    ///
    /// # Safety
    /// Every address is valid on the current device for these extents, until the launch has
    /// completed. Nothing writes the inputs meanwhile, and outputs overlap neither them nor each
    /// other.
    ///
    /// # Errors
    /// [`LaunchError`], before anything is enqueued.
    pub unsafe fn launch(&self, dtype: DType, args: &QuantizeArgs) -> Result<(), LaunchError> {
        if args.rows == 0 {
            return Ok(());
        }
        let QuantizeArgs { rows, cols, stream, programmatic, .. } = *args;
        let launch = row_wise(rows, cols / dtype.per_vector(), stream, programmatic);
        // SAFETY: the kernel takes `QuantizeParams`; the caller answers for the addresses in it.
        unsafe { self.0.launch(dtype, launch, &args.params()) }
    }
}
