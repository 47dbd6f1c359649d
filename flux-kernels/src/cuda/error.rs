//! Why something could not be enqueued.

use flux_cuda::CudaError;

/// A driver call was refused.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The driver returned an error.
    #[error(transparent)]
    Driver(#[from] CudaError),
    /// A tensor map could not be encoded.
    #[error(
        "the tensor map of {operand} was refused ({code}): address {address:#x}, row stride \
         {row_bytes} bytes"
    )]
    TensorMap {
        /// `x`, `w`, `y` or the gather buffer.
        operand: &'static str,
        /// The driver's error code.
        code: i32,
        /// Address of the operand.
        address: u64,
        /// Bytes between rows.
        row_bytes: u64,
    },
    /// The program is not one for this kernel.
    #[error("a program of {program} does not run on the kernel {kernel}")]
    Mismatch {
        /// What the program is for.
        program: String,
        /// The kernel.
        kernel: String,
    },
    /// There are no CTAs, or more than may be resident at once.
    #[error(
        "{ctas} CTAs were asked for: at least 1 and at most {limit} run at once on this device"
    )]
    Grid {
        /// CTAs asked for.
        ctas: u32,
        /// Multiprocessors of the device.
        limit: u32,
    },
    /// The trace buffer is smaller than the launch.
    #[error("the trace buffer must have room for {items} items and {ctas} CTAs: make a larger one")]
    Trace {
        /// Items of the program.
        items: usize,
        /// CTAs of the launch.
        ctas: u32,
    },
}

flux_core::debug_is_text!(LaunchError);
