//! The RMSNorm kernel, which follows an op's kernel on its stream.

use super::args::Matrix;
use super::error::LaunchError;
use super::row_wise::{RowKernel, row_wise};
use crate::abi::RmsNormParams;
use flux_core::DType;
use flux_cuda::Launch;

/// The loaded kernel, for both element types.
#[derive(Debug)]
pub struct RmsNorm(RowKernel);

/// The operands of one launch.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormArgs {
    /// The rows.
    pub y: Matrix,
    /// Address of the gain, one element for each column; a multiple of 16.
    pub gain: u64,
    /// The normalised rows.
    pub out: Matrix,
    /// Rows of both.
    pub rows: u32,
    /// Columns of both, a multiple of 8.
    pub cols: u32,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Whether it may begin before the launch ahead on the stream has ended.
    pub programmatic: bool,
    /// The stream.
    pub stream: usize,
}

impl RmsNormArgs {
    pub(crate) fn params(&self) -> RmsNormParams {
        let Self { y, gain, out, cols, eps, .. } = *self;
        RmsNormParams {
            y: y.address,
            y_row_bytes: y.row_bytes,
            gain,
            out: out.address,
            out_row_bytes: out.row_bytes,
            cols,
            eps,
        }
    }

    /// A CTA for each row of such elements.
    pub(crate) fn launch(&self, dtype: DType) -> Launch {
        let Self { rows, cols, stream, programmatic, .. } = *self;
        row_wise(rows, cols / dtype.per_vector(), stream, programmatic)
    }
}

impl RmsNorm {
    /// Loads the kernel from its cubin ([`Source::rms_norm`](crate::Source::rms_norm)) into the
    /// current context. [`loaded_rms_norm`](super::loaded_rms_norm) shares it.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks an entry point.
    pub fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        Ok(Self(RowKernel::load(cubin, [c"flux_rms_norm_bf16", c"flux_rms_norm_fp16"])?))
    }

    /// Enqueues `out = y / sqrt(mean(y^2) + eps) * gain` for each row of elements of
    /// this type; nothing where there is none.
    /// Does not wait for the device and allocates nothing.
    ///
    /// # Safety
    /// Every address is valid on the current device for these extents, until the launch has
    /// completed. Nothing writes `y` and `gain` meanwhile, and `out` overlaps neither.
    ///
    /// # Errors
    /// [`LaunchError`], before anything is enqueued.
    pub unsafe fn launch(&self, dtype: DType, args: &RmsNormArgs) -> Result<(), LaunchError> {
        if args.rows == 0 {
            return Ok(());
        }
        // SAFETY: the kernel takes `RmsNormParams`; the caller answers for the addresses in it.
        unsafe { self.0.launch(dtype, args.launch(dtype), &args.params()) }
    }
}
