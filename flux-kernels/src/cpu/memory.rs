//! The memory of a host transport, as one rank's executor uses it.
//!
//! Invariant: words are only touched as atomics; payload bytes are read or written only between the signals that hand them over.

use flux_core::layout::{self, WorkspaceSize, control};
use flux_core::rank::MAX_WORLD;
use std::marker::PhantomData;
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Words of a fault record.
pub(super) const FAULT_WORDS: u32 = 16;
const _: () = assert!(size_of::<layout::FaultRecord>() == 4 * FAULT_WORDS as usize);

/// The words that an executor uses; of its own rank where no rank is given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    /// Signal `index` on the pad of `rank`.
    Signal {
        rank: u32,
        index: u32,
    },
    /// What `writer` says, on the pad of `rank`, that it has consumed.
    Consumed {
        rank: u32,
        writer: u32,
    },
    Epoch,
    Poison,
    Pushed,
    /// A chunk's finished items.
    Counter(u32),
    /// A word of the fault record.
    Fault(u32),
    /// By which the host ends all waits of the rank.
    Abort,
}

/// One rank's view of a communicator's workspace in host memory; the layout is that of [`flux_core::layout`].
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
    /// The workspace at these addresses: `data` and `pads` by rank, the own rank's included; `control` and `fault` of the own rank. A wait
    /// gives up after `deadline`.
    ///
    /// # Safety
    /// For `'a`, the addresses (exposed, as by [`pointer::expose_provenance`](https://doc.rust-lang.org/std/primitive.pointer.html))
    /// are of initialised memory, aligned to [`layout::LINE`], of at least `size.data_bytes()`, `pad_bytes(size.signals)`,
    /// `control::bytes(size.counters)` and [`layout::FAULT_BYTES`] bytes. It is accessed only by executors and movers that follow the
    /// signal protocol (`docs/architecture.md`), each rank with its own program of one schedule, the calls of a rank one after another.
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

    /// The word, for atomic use.
    pub(super) fn word(&self, word: Word) -> &'a AtomicU32 {
        let address = match word {
            Word::Signal { rank, index } => {
                assert!(index < self.size.signals, "signal {index} of {}", self.size.signals);
                self.pads[rank as usize] + layout::signal_offset(index)
            }
            Word::Consumed { rank, writer } => {
                assert!((writer as usize) < MAX_WORLD, "rank {writer}");
                self.pads[rank as usize] + layout::consumed_offset(writer)
            }
            Word::Epoch => self.control + control::EPOCH,
            Word::Poison => self.control + control::POISON,
            Word::Pushed => self.control + control::PUSHED,
            Word::Counter(index) => {
                assert!(index < self.size.counters, "counter {index} of {}", self.size.counters);
                self.control + control::COUNTERS + u64::from(index) * 4
            }
            Word::Fault(index) => {
                assert!(index < FAULT_WORDS);
                self.fault + u64::from(index) * 4
            }
            Word::Abort => self.fault + layout::ABORT_OFFSET,
        };
        // SAFETY: by the assertions the word lies inside a block that `new` was promised; it is aligned because blocks are aligned to a line and
        // offsets to four bytes; words are only accessed as atomics.
        unsafe { AtomicU32::from_ptr(at(address)) }
    }

    /// Address of byte `offset` in half `half` of the data of `rank`, of which `bytes` are about to be used.
    pub(super) fn half<T>(&self, rank: u32, half: usize, offset: u64, bytes: u64) -> *mut T {
        assert!(half < 2 && offset + bytes <= self.size.half_bytes, "{offset} + {bytes} of {}", self.size.half_bytes);
        let address = self.data[rank as usize] + half as u64 * self.size.half_stride() + offset;
        at(address)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an address of this process fits its pointers")]
fn at<T>(address: u64) -> *mut T {
    with_exposed_provenance_mut(address as usize)
}
