//! The time stamps of a traced call, in device memory and read back.

use super::error::LaunchError;
use crate::abi::{ItemStamps, Stamps, WorkerStamps};
use bytemuck::Zeroable;
use flux_cuda::current::{ContextMemory, download, fill_bytes_async, synchronize};

/// Device memory for the stamps of one launch at a time; the next one overwrites them.
#[derive(Debug)]
pub struct TraceBuffer {
    memory: ContextMemory,
    items: usize,
    workers: usize,
}

impl TraceBuffer {
    /// A zeroed buffer on the current device, for launches of at most `items` items by at most
    /// `workers` CTAs.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when memory is short.
    pub fn new(items: usize, workers: u32) -> Result<Self, LaunchError> {
        let workers = workers as usize;
        let bytes = items * size_of::<ItemStamps>() + workers * size_of::<WorkerStamps>();
        let memory = ContextMemory::new(bytes)?;
        // SAFETY: the range was just allocated with this size.
        unsafe { fill_bytes_async(memory.address(), 0, bytes, 0) }?;
        synchronize(0)?;
        Ok(Self { memory, items, workers })
    }

    /// Zeroes the stamps on `stream`, for a launch of another program.
    ///
    /// # Errors
    /// [`LaunchError::Driver`].
    pub fn clear(&self, stream: usize) -> Result<(), LaunchError> {
        let bytes = self.items * size_of::<ItemStamps>() + self.workers * size_of::<WorkerStamps>();
        // SAFETY: the buffer has this length.
        Ok(unsafe { fill_bytes_async(self.memory.address(), 0, bytes, stream) }?)
    }

    /// Waits for `stream`, on which the launches are, and reads the stamps of the last launch, of
    /// so many items and CTAs.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the stream has failed.
    pub fn read(&self, stream: usize, items: usize, workers: u32) -> Result<Stamps, LaunchError> {
        let (items, workers) = (items.min(self.items), (workers as usize).min(self.workers));
        let mut stamps = Stamps {
            items: vec![Zeroable::zeroed(); items],
            workers: vec![Zeroable::zeroed(); workers],
        };
        for (to, from) in [
            (bytemuck::cast_slice_mut(&mut stamps.items), self.item_stamps()),
            (bytemuck::cast_slice_mut(&mut stamps.workers), self.worker_stamps()),
        ] {
            // SAFETY: the buffer has room for at least so many items and CTAs.
            unsafe { download(from, to, stream) }?;
        }
        Ok(stamps)
    }

    /// Whether a launch of so many items by so many CTAs has room.
    pub(super) fn fits(&self, items: usize, workers: u32) -> bool {
        self.items >= items && self.workers >= workers as usize
    }

    pub(super) fn item_stamps(&self) -> u64 {
        self.memory.address()
    }

    pub(super) fn worker_stamps(&self) -> u64 {
        self.memory.address() + (self.items * size_of::<ItemStamps>()) as u64
    }
}
