//! The words of the protocol in plain memory: a rank's view of its workspace on the host.
//!
//! Invariant: the memory outlives the view, has the [`layout`](crate::layout) of this crate, and
//! its words are accessed atomically only.

use super::{Control, Words};
use crate::Rank;
use crate::layout::{ABORT_OFFSET, WorkspaceSize, calling_offset, control, signal_offset};
use crate::rank::MAX_WORLD;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::AtomicU32;

/// One rank's words, by the addresses of pads and blocks. Clones reach the same words.
#[derive(Clone, Copy, Debug)]
pub struct SharedMemory<P = Vec<u64>> {
    pads: P,
    control: u64,
    fault: u64,
    size: WorkspaceSize,
}

/// The memory region of a word.
#[derive(Clone, Copy)]
enum Region {
    Pad(Rank),
    Control,
    Fault,
}

impl<P: AsRef<[u64]>> SharedMemory<P> {
    /// The words at these addresses: every rank's pad, in rank order, and this rank's control and
    /// fault blocks.
    ///
    /// # Safety
    /// The addresses are exposed, as by
    /// [`pointer::expose_provenance`](https://doc.rust-lang.org/std/primitive.pointer.html). While
    /// this view or a clone lives, each pad is readable and writable for
    /// [`pad_bytes(size.signals)`](crate::layout::pad_bytes) bytes. `control` is so for
    /// [`control::bytes(size.counters)`](control::bytes) and `fault` for
    /// [`FAULT_BYTES`](crate::layout::FAULT_BYTES) bytes. All are aligned to 4 bytes, and their
    /// words are accessed atomically only.
    pub const unsafe fn new(pads: P, control: u64, fault: u64, size: WorkspaceSize) -> Self {
        Self { pads, control, fault, size }
    }

    /// Number of ranks whose pads are mapped.
    pub fn ranks(&self) -> usize {
        self.pads.as_ref().len()
    }

    /// What the workspace holds.
    pub const fn size(&self) -> WorkspaceSize {
        self.size
    }

    fn word(&self, region: Region, offset: u64) -> &AtomicU32 {
        let base = match region {
            Region::Pad(owner) => self.pads.as_ref()[owner.index()],
            Region::Control => self.control,
            Region::Fault => self.fault,
        };
        let address = usize::try_from(base + offset).expect("mapped memory is addressable");
        // SAFETY: callers check their index against `size` and offsets are multiples of 4, so the
        // word lies in the block. `new`'s caller promised a valid, aligned block that outlives
        // `self`.
        unsafe { AtomicU32::from_ptr(with_exposed_provenance_mut(address)) }
    }
}

impl<P: AsRef<[u64]>> Words for SharedMemory<P> {
    type Word = AtomicU32;

    fn signal(&self, owner: Rank, index: u32, half: usize) -> &AtomicU32 {
        assert!(
            index < self.size.signals && half < 2,
            "signal {index} is outside the pad of {} signals",
            self.size.signals
        );
        self.word(Region::Pad(owner), signal_offset(index, half))
    }

    fn calling(&self, owner: Rank, of: Rank, half: usize) -> [&AtomicU32; 2] {
        assert!(of.index() < MAX_WORLD && half < 2, "no rank {of} has words for half {half}");
        [0, 4].map(|word| self.word(Region::Pad(owner), calling_offset(of.get(), half) + word))
    }

    fn control(&self, word: Control) -> &AtomicU32 {
        self.word(Region::Control, word.offset())
    }

    fn counter(&self, index: u32) -> &AtomicU32 {
        assert!(
            index < self.size.counters,
            "counter {index} is outside the {} counters",
            self.size.counters
        );
        self.word(Region::Control, control::COUNTERS + u64::from(index) * 4)
    }

    fn fault(&self, index: u32) -> &AtomicU32 {
        assert!(index < 16, "a fault record has 16 words");
        self.word(Region::Fault, u64::from(index) * 4)
    }

    fn abort(&self) -> &AtomicU32 {
        self.word(Region::Fault, ABORT_OFFSET)
    }
}
