//! The memory of a host transport, as one rank's executor uses it.
//!
//! Invariant: words are accessed only as atomics, and payload only between the signals that hand it
//! over.

use flux_core::Rank;
use flux_core::layout::{self, WorkspaceSize, control};
use flux_core::signal::{Control, Words};
use std::marker::PhantomData;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Words of a fault record.
const FAULT_WORDS: u32 = 16;
const _: () = assert!(size_of::<layout::FaultRecord>() == 4 * FAULT_WORDS as usize);

/// One rank's view of a communicator's workspace in host memory, laid out as in
/// [`flux_core::layout`].
#[derive(Clone, Copy, Debug)]
pub struct HostMemory<'a> {
    data: &'a [u64],
    pads: &'a [u64],
    control: u64,
    fault: u64,
    size: WorkspaceSize,
    deadline: Duration,
    lives: PhantomData<&'a AtomicU32>,
}

impl<'a> HostMemory<'a> {
    /// The workspace at these addresses: `data` and `pads` by rank, this rank's included; `control`
    /// and `fault` of this rank. A wait fails after `deadline`.
    ///
    /// # Safety
    /// For `'a`, the addresses (exposed, as by
    /// [`pointer::expose_provenance`](https://doc.rust-lang.org/std/primitive.pointer.html)) are of
    /// initialised memory, aligned to [`layout::LINE`]. It has at least `size.data_bytes()`,
    /// `pad_bytes(size.signals)`, `control::bytes(size.counters)` and [`layout::FAULT_BYTES`]
    /// bytes. Only executors and movers that follow the signal protocol access it
    /// (`docs/architecture.md`): each rank with its own program of one schedule, its calls one
    /// after another.
    pub const unsafe fn new(data: &'a [u64], pads: &'a [u64], control: u64, fault: u64, size: WorkspaceSize, deadline: Duration) -> Self {
        Self { data, pads, control, fault, size, deadline, lives: PhantomData }
    }

    /// Number of ranks whose memory is mapped.
    pub const fn ranks(&self) -> usize {
        if self.data.len() < self.pads.len() { self.data.len() } else { self.pads.len() }
    }

    /// What the workspace holds.
    pub const fn size(&self) -> WorkspaceSize {
        self.size
    }

    /// How long one wait may last.
    pub const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Address of byte `offset` in half `half` of the data of `rank`. Panics if `bytes` bytes from
    /// there leave the half.
    pub(super) fn half<T>(&self, rank: Rank, half: usize, offset: u64, bytes: u64) -> *mut T {
        assert!(half < 2 && offset + bytes <= self.size.half_bytes, "{offset} + {bytes} of {}", self.size.half_bytes);
        let address = self.data[rank.index()] + half as u64 * self.size.half_stride() + offset;
        at(address)
    }
}

impl Words for HostMemory<'_> {
    type Word = AtomicU32;

    fn signal(&self, owner: Rank, index: u32, half: usize) -> &AtomicU32 {
        assert!(index < self.size.signals && half < 2, "signal {index} of {}", self.size.signals);
        // SAFETY: the pad has this signal; it is aligned and atomic, by `new`'s promise.
        unsafe { AtomicU32::from_ptr(at(self.pads[owner.index()] + layout::signal_offset(index, half))) }
    }

    fn calling(&self, owner: Rank, of: Rank, half: usize) -> [&AtomicU32; 2] {
        assert!(of.index() < self.pads.len() && half < 2, "rank {of} of {}", self.pads.len());
        // SAFETY: every pad begins with a line for each rank; the words are aligned and atomic, by
        // `new`'s promise.
        [0, 4].map(|word| unsafe { AtomicU32::from_ptr(at(self.pads[owner.index()] + layout::calling_offset(of.get(), half) + word)) })
    }

    fn control(&self, word: Control) -> &AtomicU32 {
        // SAFETY: the control block has these words; they are aligned and atomic, by `new`'s
        // promise.
        unsafe { AtomicU32::from_ptr(at(self.control + word.offset())) }
    }

    fn counter(&self, index: u32) -> &AtomicU32 {
        assert!(index < self.size.counters, "counter {index} of {}", self.size.counters);
        // SAFETY: the control block has this counter; it is aligned and atomic, by `new`'s promise.
        unsafe { AtomicU32::from_ptr(at(self.control + control::COUNTERS + u64::from(index) * 4)) }
    }

    fn fault(&self, index: u32) -> &AtomicU32 {
        assert!(index < FAULT_WORDS, "word {index} of {FAULT_WORDS}");
        // SAFETY: the fault block begins with the record; it is aligned and atomic, by `new`'s
        // promise.
        unsafe { AtomicU32::from_ptr(at(self.fault + u64::from(index) * 4)) }
    }

    fn abort(&self) -> &AtomicU32 {
        // SAFETY: the fault block has this word; it is aligned and atomic, by `new`'s promise.
        unsafe { AtomicU32::from_ptr(at(self.fault + layout::ABORT_OFFSET)) }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an address of this process fits its pointers")]
fn at<T>(address: u64) -> *mut T {
    with_exposed_provenance_mut(address as usize)
}
