//! When each phase of each item ended, as a traced kernel records it.
//!
//! Invariant: the stamps are mirrored word for word by the structs of the same names in
//! `flux-kernels/cuda/program.cuh`. Times are nanoseconds of one GPU's `%globaltimer`, which ticks
//! every 32 ns or so: differences on one GPU mean something, those between GPUs do not.

use super::LaunchError;
use super::call::{check, current_context, release_in, synchronize};
use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys;

/// Ends of one item's phases, in nanoseconds; 64 bytes. Producer, consumers and storer work side by
/// side, so the phases of one role follow one another and those of two roles overlap.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct ItemStamps {
    /// Producer: it turned to the item, before any wait.
    pub opened: u64,
    /// Producer: the peers' rows that the item awaits were there, and what it loads of `w`
    /// beforehand and of them at once was issued.
    pub rows_there: u64,
    /// Producer: the last load of operands was issued.
    pub loaded: u64,
    /// Producer: the peers' partial tiles were there; 0 for an item that adds none.
    pub partials_there: u64,
    /// Consumer: the accumulators were final.
    pub multiplied: u64,
    /// Consumer: the peers' partial tiles were added; for an item that adds none, as `multiplied`.
    pub summed: u64,
    /// Consumer: the rounded result was in the output buffer, for which it may have waited.
    pub written: u64,
    /// Storer: the output buffer was read; for an item that is sent to a peer, the whole write was
    /// done and its signal, if it was its chunk's last, raised.
    pub sent: u64,
}

/// One CTA's life, in nanoseconds; 56 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct WorkerStamps {
    /// It began.
    pub entered: u64,
    /// All of its roles had ended.
    pub left: u64,
    /// The multiprocessor that it ran on.
    pub multiprocessor: u32,
    /// Not used.
    pub reserved: u32,
    /// Mover: the first piece that it pushes was stored; this and what follows is 0 where the
    /// kernel pushes nothing.
    pub push_begun: u64,
    /// Mover: its pieces of what is announced first were at the readers.
    pub first_delivered: u64,
    /// Mover: its pieces of what is announced last, if not first, were at the readers.
    pub last_delivered: u64,
    /// Producer: the first rows of peers that it awaited were there; 0 where it awaited none.
    pub first_rows: u64,
}

const _: () = assert!(size_of::<ItemStamps>() == 64 && size_of::<WorkerStamps>() == 56);

/// What a launch recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stamps {
    /// By item, in program order.
    pub items: Vec<ItemStamps>,
    /// By CTA; CTA `i` of `n` took the items `i`, `i + n`, ... in order.
    pub workers: Vec<WorkerStamps>,
}

/// Device memory for the stamps of one launch at a time; the next one overwrites them.
#[derive(Debug)]
pub struct TraceBuffer {
    memory: u64,
    items: usize,
    workers: usize,
    context: sys::CUcontext,
}

// SAFETY: the context handle and the address are plain values; the driver's calls on them are
// thread-safe.
unsafe impl Send for TraceBuffer {}
// SAFETY: as above; the host changes nothing through a shared reference.
unsafe impl Sync for TraceBuffer {}

impl TraceBuffer {
    /// Room on the current device for launches of a program of `items` items with exactly `workers`
    /// CTAs; all zero.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when memory is short.
    pub fn new(items: usize, workers: u32) -> Result<Self, LaunchError> {
        let context = current_context()?;
        let workers = workers as usize;
        let bytes = items * size_of::<ItemStamps>() + workers * size_of::<WorkerStamps>();
        let mut memory = 0;
        // SAFETY: the out pointer is valid; a size of zero is refused by the driver.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut memory, bytes) })?;
        let this = Self { memory, items, workers, context };
        // SAFETY: the range was just allocated with this size.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(memory, 0, bytes) })?;
        synchronize(0)?;
        Ok(this)
    }

    /// Waits for what is on `stream`, on which the launches are, and reads what the last one
    /// recorded.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the stream has failed.
    pub fn read(&self, stream: usize) -> Result<Stamps, LaunchError> {
        synchronize(stream)?;
        let mut stamps = Stamps { items: vec![Zeroable::zeroed(); self.items], workers: vec![Zeroable::zeroed(); self.workers] };
        copy(bytemuck::cast_slice_mut(&mut stamps.items), self.item_stamps())?;
        copy(bytemuck::cast_slice_mut(&mut stamps.workers), self.worker_stamps())?;
        Ok(stamps)
    }

    /// Whether a launch of so many items by so many CTAs fills it exactly.
    pub(super) fn fits(&self, items: usize, workers: u32) -> bool {
        (self.items, self.workers) == (items, workers as usize)
    }

    pub(super) fn item_stamps(&self) -> u64 {
        self.memory
    }

    pub(super) fn worker_stamps(&self) -> u64 {
        self.memory + (self.items * size_of::<ItemStamps>()) as u64
    }
}

/// Reads device memory that [`TraceBuffer::new`] has allocated.
fn copy(to: &mut [u8], from: u64) -> Result<(), LaunchError> {
    // SAFETY: both ranges are part of a trace buffer's layout, of the same length.
    check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len()) })
}

impl Drop for TraceBuffer {
    fn drop(&mut self) {
        release_in(self.context, || {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.memory) };
        });
    }
}
