//! Proves once, at connecting, that side streams can do what a call needs.
//!
//! Invariant: afterwards every word is unchanged, and the driver has set up each operation while no
//! kernel waits.

use super::layout::PROOF;
use super::workspace::Workspace;
use crate::backends::device::lane::Lane;
use flux_core::layout::broken_offset;
use flux_core::signal::Epoch;
use flux_cuda::{
    CudaDevice, CudaError, RowCopy, Rows, WordOp, copy_in_async, copy_out_async, words_async,
};
use std::sync::atomic::Ordering;

/// Copies a word of the own pad to the own region, raises a flag behind it, waits for the flag and
/// copies the word back.
pub(super) fn prove(
    device: &CudaDevice,
    out: &Lane,
    back: &Lane,
    at: &Workspace,
    rank: u32,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let initial = epoch.before(1).get();
    let region = at.host_region(rank);
    let flag = at.words().finished_address();
    region.word(PROOF).store(1, Ordering::Release);
    let on_host = Rows { address: region.host() + PROOF, pitch: 4 };
    let on_pad = Rows { address: at.pad() + broken_offset(rank), pitch: 4 };
    let there = RowCopy { to: on_host, from: on_pad, rows: 1, width: 4 };
    let back_again = RowCopy { to: on_pad, from: on_host, ..there };
    let _current = device.enter()?;
    // SAFETY: the words are in the own region, on the own pad and in the pinned block, and stay
    // past the synchronisations below.
    unsafe {
        copy_out_async(device, &there, out.raw())?;
        words_async(device, [WordOp::Write { address: flag, value: initial }], out.raw())?;
    }
    out.synchronize()?;
    let seen = region.word(PROOF).load(Ordering::Acquire);
    // SAFETY: the word of the own region and that of the own pad, which stay past the
    // synchronisation.
    unsafe {
        words_async(device, [WordOp::Await { address: flag, value: initial }], back.raw())?;
        copy_in_async(device, &back_again, back.raw())?;
    }
    back.synchronize()?;
    // As the pad's word is before any call.
    if seen == 0 {
        return Ok(());
    }
    let what = "copies to memory of the host that processes share: what was copied is not there";
    Err(CudaError::Unsupported {
        ordinal: device.ordinal(),
        device: device.info().name.clone(),
        what,
    })
}
