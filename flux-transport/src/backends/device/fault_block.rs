//! The fault block: the record of a kernel's failed wait, and the abort word.
//!
//! Invariant: the host only loads and stores, so it works while a device is stuck.

use flux_core::layout::{ABORT_OFFSET, CLOSED_OFFSET, FAULT_BYTES, FaultRecord};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, PinnedBlock, host_size};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

/// Pinned host memory, mapped for the device.
#[derive(Debug)]
pub(crate) struct FaultBlock {
    block: PinnedBlock,
}

impl FaultBlock {
    pub(crate) fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self { block: PinnedBlock::new(device, host_size(FAULT_BYTES))? })
    }

    pub(crate) fn address(&self) -> u64 {
        self.block.address()
    }

    /// The record, once a wait has failed.
    pub(crate) fn record(&self) -> Option<FaultRecord> {
        // The device stores it with release order after the rest.
        let state = self.block.word(offset_of!(FaultRecord, state)).load(Ordering::Acquire);
        // SAFETY: the block is long enough for a record; this one is plain words, complete and
        // never written again once `state` is not zero.
        (state != 0).then(|| unsafe { self.block.host().cast::<FaultRecord>().read_volatile() })
    }

    /// Ends all waits of this rank's device. `reason` is not zero; the first stays.
    pub(crate) fn abort(&self, reason: u32) {
        // The device only reads this word, so a compare-and-swap among host threads is enough.
        let _ = self.word(ABORT_OFFSET).compare_exchange(
            0,
            reason,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }

    /// Whether calls can no longer succeed.
    pub(crate) fn has_failed(&self) -> bool {
        self.record().is_some() || self.aborted()
    }

    pub(crate) fn aborted(&self) -> bool {
        self.word(ABORT_OFFSET).load(Ordering::Acquire) != 0
    }

    /// The last sequential call that a kernel has closed.
    pub(crate) fn closed(&self) -> Epoch {
        Epoch::new(self.word(CLOSED_OFFSET).load(Ordering::Acquire))
    }

    /// Says that this is call `epoch`, before any kernel knows of the block.
    pub(crate) fn set_closed(&self, epoch: Epoch) {
        self.word(CLOSED_OFFSET).store(epoch.get(), Ordering::Release);
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        self.block.word(host_size(offset))
    }
}
