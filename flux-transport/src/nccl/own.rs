//! The own rows of a program whose tiles span shards: they lie in the own gather buffer beside those that messages bring.
//!
//! Invariant: they are enqueued on the caller's stream, before the call's kernel, so no kernel that waits keeps a copy from a multiprocessor, should the driver make it
//! by one; and they are copied while the messages are on their way.

use super::carry::Memory;
use crate::cuda::{CudaDevice, CudaError, WordOp, copy_async, copy_rows_async, host_size, words_async};
use crate::{Exchange, Source};
use flux_core::layout::signal_offset;
use flux_core::signal::Epoch;

/// Enqueues the transfers to the own rank, with their signals, on `caller`.
///
/// # Safety
/// The exchange was checked against the workspace; its rows are mapped for `device` and stay until the stream has come past them; the device's context is current.
pub(super) unsafe fn keep(
    device: &CudaDevice,
    caller: usize,
    at: Memory<'_>,
    exchange: &Exchange<'_>,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let Source::Rows(push) = &exchange.source else { return Ok(()) };
    let half = at.data + epoch.half() as u64 * at.size.half_stride();
    for t in push.transfers.iter().filter(|t| t.dest == at.rank.get()) {
        let before = u64::from(t.col) * push.element_bytes;
        let to = half + u64::from(t.place) * push.place_bytes + u64::from(t.row) * push.row_bytes + before;
        let from = push.x + u64::from(t.row) * push.row_stride + before;
        let (rows, width) = (t.rows as usize, host_size(u64::from(t.cols) * push.element_bytes));
        let dense = push.row_stride == push.row_bytes && u64::from(t.cols) * push.element_bytes == push.row_bytes;
        // SAFETY: the caller's promise.
        unsafe {
            match rows * width {
                // Nothing to copy; the signal still says so.
                0 => {}
                bytes if dense => copy_async(device, to, from, bytes, caller)?,
                _ => copy_rows_async(device, (to, host_size(push.row_bytes)), (from, host_size(push.row_stride)), (rows, width), caller)?,
            }
            words_async(device, [WordOp::Write { address: at.pad + signal_offset(t.raise, epoch.half()), value: epoch.get() }], caller)?;
        }
    }
    Ok(())
}
