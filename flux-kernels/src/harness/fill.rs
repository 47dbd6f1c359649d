//! Operands as functions of position, written on the device.

use super::Harness;
use crate::abi::{Fill, FillParams, InterleaveParams};
use crate::cuda::LaunchError;
use flux_core::DType;
use flux_cuda::current::fill_bytes_async;
use flux_cuda::{Function, Launch};

/// A window of a global matrix and where it lies on the device.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// First element.
    pub address: u64,
    /// Elements between rows, or columns that lie in their place.
    pub row_stride: u64,
    /// First global row.
    pub row0: u32,
    /// First global column.
    pub col0: u32,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Whether columns lie one after the other in place of rows.
    pub transposed: bool,
}

/// The launch of a kernel that goes over elements in strides.
const fn element_wise(stream: usize) -> Launch {
    Launch { grid: (1056, 1), threads: 256, shared_bytes: 0, stream, programmatic: false }
}

impl Harness {
    /// Fills a window of a matrix with the elements of `seed`.
    ///
    /// # Safety
    /// The window's memory is valid and nothing else uses it before the stream has passed this
    /// point.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn fill(
        &self,
        to: Window,
        seed: u64,
        fill: Fill,
        dtype: DType,
        stream: usize,
    ) -> Result<(), LaunchError> {
        // SAFETY: the caller answers for the window.
        unsafe { self.fill_by(self.fill, to, seed, fill, dtype as u32, stream) }
    }

    /// Fills a window of the scales of an operand with this seed, of one row for each of its rows
    /// or blocks of rows. A column is one of the ranks', or one for each block along `k`.
    ///
    /// # Safety
    /// As for [`Self::fill`].
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn fill_scales(
        &self,
        to: Window,
        seed: u64,
        fill: Fill,
        stream: usize,
    ) -> Result<(), LaunchError> {
        // SAFETY: the caller answers for the window.
        unsafe { self.fill_by(self.fill_scales, to, seed, fill, 0, stream) }
    }

    /// # Safety
    /// As for [`Self::fill`]; the function takes `FillParams`.
    unsafe fn fill_by(
        &self,
        function: Function,
        to: Window,
        seed: u64,
        fill: Fill,
        dtype: u32,
        stream: usize,
    ) -> Result<(), LaunchError> {
        let params = FillParams {
            dst: to.address,
            row_stride: to.row_stride,
            seed,
            row0: to.row0,
            col0: to.col0,
            rows: to.rows,
            cols: to.cols,
            fill: fill as u32,
            dtype,
            transposed: u32::from(to.transposed),
        };
        // SAFETY: the caller answers for the function and the window.
        Ok(unsafe { self.module.launch(function, element_wise(stream), &params) }?)
    }

    /// Puts lines of `cols` fp32 elements, `lines` of each shard, side by side by their numbers:
    /// `from` of `[shards, lines, cols]` becomes `to` of `[lines, shards, cols]`.
    ///
    /// # Safety
    /// As for [`Self::fill`], of both; they do not overlap.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn interleave_shards(
        &self,
        (from, to): (u64, u64),
        [shards, lines, cols]: [u32; 3],
        stream: usize,
    ) -> Result<(), LaunchError> {
        let params = InterleaveParams { from, to, shards, lines, cols };
        // SAFETY: the kernel takes `InterleaveParams`; the caller answers for the memory.
        let launched =
            unsafe { self.module.launch(self.interleave_shards, element_wise(stream), &params) };
        Ok(launched?)
    }

    /// Fills memory with NaN, in either element type.
    ///
    /// # Safety
    /// As for [`Self::fill`].
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the call is refused.
    pub unsafe fn poison(
        &self,
        address: u64,
        bytes: u64,
        stream: usize,
    ) -> Result<(), LaunchError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller answers for the memory.
        Ok(unsafe { fill_bytes_async(address, 0xFF, bytes as usize, stream) }?)
    }
}
