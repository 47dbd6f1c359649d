//! The flags of what an executor stores for other nodes, in pinned host memory.
//!
//! Invariant: whoever waits for a flag can be let go by stores of the host. A call into the driver
//! would do it as well, but waits where another thread waits in the driver for the device, and so
//! for what is to be let go.

use crate::cuda::{CudaDevice, CudaError, PinnedBlock};
use std::sync::atomic::{AtomicU32, Ordering};

/// Words that the device raises, and the host in its place.
#[derive(Debug)]
pub(super) struct Flags {
    block: PinnedBlock,
}

impl Flags {
    /// Makes `bytes` bytes of them, all `value`, before the device knows of them.
    pub(super) fn new(device: &CudaDevice, bytes: usize, value: u32) -> Result<Self, CudaError> {
        let this = Self { block: PinnedBlock::new(device, bytes)? };
        this.set(value);
        Ok(this)
    }

    /// The address for the device.
    pub(super) fn address(&self) -> u64 {
        self.block.address()
    }

    /// Bytes.
    pub(super) fn bytes(&self) -> usize {
        self.block.bytes()
    }

    /// Sets all to `value`.
    pub(super) fn set(&self, value: u32) {
        for at in 0..self.block.bytes() / size_of::<u32>() {
            // SAFETY: in bounds and aligned, as the block begins at a page; it lives as long as
            // `self`, and is only accessed by whole words.
            let word = unsafe { AtomicU32::from_ptr(self.block.host().cast::<u32>().add(at)) };
            word.store(value, Ordering::Release);
        }
    }
}
