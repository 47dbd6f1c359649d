//! The memory of a host transport, as one rank's executor uses it.
//!
//! Invariant: words are accessed only as atomics, and payload only between the signals that hand it
//! over.

use flux_core::Rank;
use flux_core::layout::WorkspaceSize;
use flux_core::signal::SharedMemory;
use std::ptr::with_exposed_provenance_mut;
use std::time::Duration;

/// One rank's view of a communicator's workspace in host memory, laid out as in
/// [`flux_core::layout`].
#[derive(Clone, Copy, Debug)]
pub struct HostMemory<'a> {
    data: &'a [u64],
    words: SharedMemory<&'a [u64]>,
    deadline: Duration,
}

impl<'a> HostMemory<'a> {
    /// The workspace at these addresses: `data` and `pads` by rank, this rank's included; `control`
    /// and `fault` of this rank. A wait fails after `deadline`.
    ///
    /// # Safety
    /// For `'a`, the addresses (exposed, as by
    /// [`pointer::expose_provenance`](https://doc.rust-lang.org/std/primitive.pointer.html)) are of
    /// initialised memory, aligned to [`LINE`](flux_core::layout::LINE). It has at least
    /// `size.data_bytes()`, `pad_bytes(size.signals)`, `control::bytes(size.counters)` and
    /// [`FAULT_BYTES`](flux_core::layout::FAULT_BYTES) bytes. Only executors and movers that follow
    /// the signal protocol access it (`docs/architecture.md`): each rank with its own program of
    /// one schedule, its calls one after another.
    pub const unsafe fn new(
        data: &'a [u64],
        pads: &'a [u64],
        control: u64,
        fault: u64,
        size: WorkspaceSize,
        deadline: Duration,
    ) -> Self {
        // SAFETY: as the caller promises.
        let words = unsafe { SharedMemory::new(pads, control, fault, size) };
        Self { data, words, deadline }
    }

    /// Number of ranks whose memory is mapped.
    pub fn ranks(&self) -> usize {
        self.data.len().min(self.words.ranks())
    }

    /// What the workspace holds.
    pub const fn size(&self) -> WorkspaceSize {
        self.words.size()
    }

    /// The words of the signal protocol.
    pub const fn words(&self) -> &SharedMemory<&'a [u64]> {
        &self.words
    }

    /// How long one wait may last.
    pub const fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Address of byte `offset` in half `half` of the data of `rank`. Panics if `bytes` bytes from
    /// there leave the half.
    pub(super) fn half<T>(&self, rank: Rank, half: usize, offset: u64, bytes: u64) -> *mut T {
        let size = self.size();
        assert!(
            half < 2 && offset + bytes <= size.half_bytes,
            "{offset} + {bytes} of {}",
            size.half_bytes
        );
        let address = self.data[rank.index()] + half as u64 * size.half_stride() + offset;
        at(address)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an address of this process fits its pointers")]
fn at<T>(address: u64) -> *mut T {
    with_exposed_provenance_mut(address as usize)
}
