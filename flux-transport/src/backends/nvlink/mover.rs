//! The push of an AllGather-GEMM by copy engines.
//!
//! Invariant: every word raised is this call's epoch, read on the device, and follows the rows that
//! it announces; after a call that failed, whose epoch stands still, it is that one's, and peers
//! have been told by then (`broken_offset`). The half that rows go to is the epoch's, which the
//! host knows as long as nothing but its own calls advances the epoch, so only until a call of the
//! communicator is captured: a replay advances the epoch unseen, and reading it back would be a
//! synchronisation. From then on the movers of the fused kernel push, which read the epoch on the
//! device.

use super::lane::Lane;
use super::plan::copies;
use crate::MoverJob;
use crate::cuda::{CudaDevice, CudaError, copy_async, copy_rows_async, host_size};
use flux_core::layout::WorkspaceSize;
use flux_core::program::Transfer;
use flux_core::signal::Epoch;

/// Where things are, for a push.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses<'a> {
    pub(crate) data: &'a [u64],
    pub(crate) pads: &'a [u64],
    /// A word that is the epoch when the lane gets there.
    pub(crate) word: u64,
    pub(crate) size: &'a WorkspaceSize,
}

/// Enqueues these transfers of a push by copy engines on `lane`, for the call with number `epoch`.
///
/// A transfer to the own rank is a copy within one device, which the driver may make by a kernel:
/// whoever pushes such a program here leaves it an SM, or has the fused kernel push.
///
/// # Safety
/// The push was checked; `lane` is forked from the caller's stream; the shard's rows are mapped for
/// `device` and stay so until the lane is joined; the addresses are those of the current workspace;
/// the word at hand is `epoch` when the lane gets there.
pub(crate) unsafe fn by_copy_engine<'a>(
    device: &CudaDevice,
    lane: &Lane,
    push: &MoverJob<'_>,
    transfers: impl Iterator<Item = &'a Transfer>,
    at: Addresses<'_>,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let _current = device.enter()?;
    for copy in copies(push, transfers, (epoch, at.size.half_stride()), at.data, at.pads) {
        let (rows, width) = (host_size(copy.rows), host_size(copy.width));
        if copy.rows == 0 || copy.width == 0 {
            // Nothing to carry; the signal still says so.
        } else if copy.dense() {
            // SAFETY: the push was checked against the workspace; the caller promised the source.
            unsafe { copy_async(device, copy.to, copy.from, rows * width, lane.raw()) }?;
        } else {
            let (to, from) = ((copy.to, host_size(copy.to_pitch)), (copy.from, host_size(copy.from_pitch)));
            // SAFETY: as above.
            unsafe { copy_rows_async(device, to, from, (rows, width), lane.raw()) }?;
        }
        // A copy like those of the rows, which takes less time here than a stream's write of a
        // value. SAFETY: both words are in the workspace.
        unsafe { copy_async(device, copy.signal, at.word, 4, lane.raw()) }?;
    }
    Ok(())
}
