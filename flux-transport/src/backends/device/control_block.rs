//! The control block of a generation of memory, and the rank's own pad before its first call.
//!
//! Invariant: both are whole once the stream that initialises them is past that.

use flux_core::layout::{BROKEN_BYTES, control, pad_bytes};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, fill_words, host_size, read};

/// Words of the device that say which call is next, and chunk counters.
#[derive(Debug)]
pub(crate) struct ControlBlock(DeviceBlock);

impl ControlBlock {
    /// Makes one for calls from `epoch` on, which `stream` initialises.
    pub(crate) fn new(
        device: &CudaDevice,
        stream: usize,
        counters: u32,
        epoch: Epoch,
    ) -> Result<Self, CudaError> {
        let bytes = control::bytes(counters);
        let block = DeviceBlock::new(device, host_size(bytes))?;
        let at = block.address();
        let words = [
            (at, 0, bytes / 4),
            (at + control::EPOCH, epoch.get(), 1),
            (at + control::PUSHED, epoch.before(1).get(), 1),
        ];
        let _current = device.enter()?;
        for (address, value, count) in words {
            // SAFETY: words of the block, for whose stream the driver waits before it frees it.
            unsafe { fill_words(device, address, value, host_size(count), stream) }?;
        }
        Ok(Self(block))
    }

    /// The device address.
    pub(crate) fn address(&self) -> u64 {
        self.0.address()
    }

    /// Bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// The device that it is of.
    pub(crate) fn device(&self) -> &CudaDevice {
        self.0.device()
    }

    /// The epoch of the next call, read from the device, which must be idle.
    pub(crate) fn read_epoch(&self) -> Result<Epoch, CudaError> {
        let mut word = [0; 4];
        // SAFETY: the epoch is a word of the block.
        unsafe { read(self.device(), &mut word, self.address() + control::EPOCH) }?;
        Ok(Epoch::new(u32::from_le_bytes(word)))
    }
}

/// Sets every word of a pad to its value before call `epoch`, by `stream`.
///
/// # Safety
/// The pad of so many signals is memory of `device` until the stream is past this.
pub(crate) unsafe fn clear_pad(
    device: &CudaDevice,
    stream: usize,
    pad: u64,
    signals: u32,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let _current = device.enter()?;
    let words = host_size((pad_bytes(signals) - BROKEN_BYTES) / 4);
    // SAFETY: the caller's promise.
    unsafe {
        fill_words(device, pad, 0, host_size(BROKEN_BYTES / 4), stream)?;
        fill_words(device, pad + BROKEN_BYTES, epoch.before(1).get(), words, stream)
    }
}
