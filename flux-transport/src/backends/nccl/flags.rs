//! The flags of what an executor stores for other nodes, and behind them the word that goes with
//! the caller's rows, in pinned host memory.
//!
//! Invariant: stores of the host release every wait for a flag. A call into the driver could block:
//! another thread may wait there for the device, and so for the wait that is to be released.

use flux_cuda::{CudaDevice, CudaError, PinnedBlock};
use std::sync::atomic::Ordering;

/// Words that the device raises, and the host in its place.
#[derive(Debug)]
pub(super) struct Flags {
    block: PinnedBlock,
}

impl Flags {
    /// Makes `bytes` bytes of them, all `value`, before the device knows of them.
    pub(super) fn new(device: &CudaDevice, bytes: usize, value: u32) -> Result<Self, CudaError> {
        let this = Self { block: PinnedBlock::new(device, bytes + size_of::<u32>())? };
        this.set(value);
        Ok(this)
    }

    /// The address for the device.
    pub(super) fn address(&self) -> u64 {
        self.block.address()
    }

    /// The word that goes with rows, for the device: the number of the call that the side stream is
    /// in, as the device has it.
    pub(super) fn number(&self) -> u64 {
        self.address() + self.number_offset() as u64
    }

    /// The same for the host, whose address copies are asked for by.
    pub(super) fn number_on_host(&self) -> u64 {
        (self.block.host().expose_provenance() + self.number_offset()) as u64
    }

    fn number_offset(&self) -> usize {
        self.block.bytes() - size_of::<u32>()
    }

    /// Bytes.
    pub(super) fn bytes(&self) -> usize {
        self.block.bytes()
    }

    /// Sets all to `value`.
    pub(super) fn set(&self, value: u32) {
        for offset in (0..self.block.bytes()).step_by(size_of::<u32>()) {
            self.block.word(offset).store(value, Ordering::Release);
        }
    }
}
