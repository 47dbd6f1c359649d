//! The push of an AllGather-GEMM by copy engines.
//!
//! Invariant: every raised word is this call's epoch, read on the device, and follows its rows;
//! after a failed call peers have been told (`broken_offset`). The buffer index comes from the
//! host's count of calls, so this works until a capture; then the kernel's movers push.

use super::copies::copies;
use crate::backends::device::lane::Lane;
use crate::backends::jobs::RowTransfers;
use flux_core::layout::WorkspaceSize;
use flux_core::program::Transfer;
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, RowCopy, Rows, copy_async, copy_rows_async, host_size};

/// Where things are, for a push.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses<'a> {
    pub(crate) data: &'a [u64],
    pub(crate) pads: &'a [u64],
    /// A word that is the epoch when the lane gets there.
    pub(crate) word: u64,
    pub(crate) size: &'a WorkspaceSize,
}

/// Enqueues transfers of a push on `lane`, for call `epoch`.
///
/// A transfer within one device may be a kernel of the driver: leave it an SM.
///
/// # Safety
/// The push was checked; `lane` is forked from the caller's stream; the shard stays mapped until
/// the lane is joined; the addresses are the current workspace's, whose word is `epoch` when the
/// lane gets there.
pub(crate) unsafe fn by_copy_engine<'a>(
    device: &CudaDevice,
    lane: &Lane,
    push: &RowTransfers<'_>,
    transfers: impl Iterator<Item = &'a Transfer>,
    at: Addresses<'_>,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let _current = device.enter()?;
    for copy in copies(push, transfers, epoch, at.size.half_stride(), at.data, at.pads) {
        let (rows, width) = (host_size(copy.rows), host_size(copy.width));
        if copy.rows == 0 || copy.width == 0 {
            // Nothing to carry; the signal still says so.
        } else if copy.dense() {
            // SAFETY: the push was checked against the workspace; the caller promised the source.
            unsafe { copy_async(device, copy.to, copy.from, rows * width, lane.raw()) }?;
        } else {
            let rows = RowCopy {
                to: Rows { address: copy.to, pitch: copy.to_pitch },
                from: Rows { address: copy.from, pitch: copy.from_pitch },
                rows: copy.rows,
                width: copy.width,
            };
            // SAFETY: the push was checked against the workspace; the caller promised the source.
            unsafe { copy_rows_async(device, &rows, lane.raw()) }?;
        }
        // A copy, which is faster here than a stream's write of a value. SAFETY: both words are in
        // the workspace.
        unsafe { copy_async(device, copy.signal, at.word, 4, lane.raw()) }?;
    }
    Ok(())
}
