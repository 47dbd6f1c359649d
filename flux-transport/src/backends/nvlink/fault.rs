//! The fault block: the record of a kernel's failed wait, and the abort word.
//!
//! Invariant: the host only loads and stores, so it works while a device is stuck.

use crate::cuda::{CudaDevice, CudaError, PinnedBlock, host_size};
use flux_core::layout::{ABORT_OFFSET, FAULT_BYTES, FaultRecord};
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
        let record = self.block.host().cast::<FaultRecord>();
        // SAFETY: the block is `FAULT_BYTES` long, page-aligned and lives as long as `self`; the
        // device stores its first word, `state`, with release order after the rest.
        let state =
            unsafe { AtomicU32::from_ptr(&raw mut (*record).state) }.load(Ordering::Acquire);
        // SAFETY: as above; the record is plain words, complete and never written again once
        // `state` is not zero.
        (state != 0).then(|| unsafe { record.read_volatile() })
    }

    /// Ends all waits of this rank's device. `reason` is not zero; the first stays.
    pub(crate) fn abort(&self, reason: u32) {
        // The device only reads this word, so a compare-and-swap among host threads is enough.
        let _ = self.word().compare_exchange(0, reason, Ordering::Release, Ordering::Relaxed);
    }

    /// Whether calls can no longer succeed.
    pub(crate) fn has_failed(&self) -> bool {
        self.record().is_some() || self.aborted()
    }

    pub(crate) fn aborted(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: in bounds and aligned; on the host this word is only touched through here.
        unsafe { AtomicU32::from_ptr(self.block.host().byte_add(host_size(ABORT_OFFSET)).cast()) }
    }
}
