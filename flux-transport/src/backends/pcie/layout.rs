//! Where things are in a rank's shared region of host memory.
//!
//! Invariant: every word has one writer in a call and at most one rank that waits for it, but for
//! `broken`, `poisoned` and `said`, which everybody may look at; nothing overlaps.
//!
//! ```text
//! [ broken, poisoned ] [ proof ] [ said ] [ flags of reader 0 ][ flags of reader 1 ] ... [ pad ] | [ half 0 ][ half 1 ]
//!   a line               a line   u64s     dense u32, by the reader's signal, from a line           from a border of 2 MiB
//! ```
//!
//! In calls whose data copy engines carry, what the owner sends lies in the halves, and the flags
//! say so. In calls whose kernels scatter rows themselves, what is for the owner does, and the pad
//! says so. One call's use of a half is over on all ranks before the next but one begins
//! (`flux_core::signal`), whichever each is.

use crate::backends::calls::OpHashes;
use flux_core::layout::{LINE, WorkspaceSize, pad_bytes};

/// The offsets of a region for a world and a workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    world: u32,
    signals: u32,
    half_stride: u64,
}

/// Where the owner says that it has given up: 0, or the reason.
pub(super) const BROKEN: u64 = 0;

/// Where the owner's stream copies its kernels' poison word: 0, or a wait has failed. A stopped
/// process's streams still run.
pub(super) const POISONED: u64 = BROKEN + 4;

/// Where the owner's streams show, when the ranks connect, what they can do. No call uses it.
pub(super) const PROOF: u64 = LINE;

/// Where the owner's host says which ops its last calls were of.
pub(super) const OP_HASHES: u64 = 2 * LINE;

/// The flags of the first reader.
const FLAGS: u64 = OP_HASHES + (8 * OpHashes::WORDS as u64).next_multiple_of(LINE);

impl Layout {
    pub(super) fn new(world: u32, size: &WorkspaceSize) -> Self {
        Self { world, signals: size.signals, half_stride: size.half_stride() }
    }

    /// The last call in which the owner published the parcel that raises `signal` at `reader`.
    pub(super) fn flag(&self, reader: u32, signal: u32) -> u64 {
        self.flags(reader) + 4 * u64::from(signal)
    }

    /// The first flag of `reader`, of as many as there are signals.
    pub(super) fn flags(&self, reader: u32) -> u64 {
        FLAGS + u64::from(reader) * self.flag_bytes()
    }

    fn flag_bytes(&self) -> u64 {
        (4 * u64::from(self.signals)).next_multiple_of(LINE)
    }

    /// The pad on which kernels of other ranks tell the owner's.
    pub(super) fn pad(&self) -> u64 {
        self.flags(self.world)
    }

    /// The half of the calls of one parity.
    pub(super) fn half(&self, half: u64) -> u64 {
        self.words_bytes() + half * self.half_stride
    }

    /// Bytes before the halves: words only.
    pub(super) fn words_bytes(&self) -> u64 {
        (self.pad() + pad_bytes(self.signals)).next_multiple_of(WorkspaceSize::ALIGN)
    }

    pub(super) fn bytes(&self) -> Option<u64> {
        self.half_stride.checked_mul(2)?.checked_add(self.words_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn nothing_overlaps(world in 2u32..=16, signals in 0u32..200, half_bytes in 0u64..1 << 40) {
            let size = WorkspaceSize { half_bytes, signals, counters: 0 };
            let layout = Layout::new(world, &size);
            let mut words = BTreeSet::from([BROKEN, POISONED, PROOF]);
            words.extend((OP_HASHES..OP_HASHES + 8 * OpHashes::WORDS as u64).step_by(4));
            for rank in 0..world {
                for signal in 0..signals {
                    prop_assert!(words.insert(layout.flag(rank, signal)));
                }
            }
            words.extend((layout.pad()..layout.pad() + pad_bytes(signals)).step_by(4));
            prop_assert_eq!(words.len() as u64, 3 + 2 * OpHashes::WORDS as u64 + u64::from(world * signals) + pad_bytes(signals) / 4);
            prop_assert!(words.iter().all(|word| word % 4 == 0 && word + 4 <= layout.words_bytes()));
            prop_assert!(layout.half(0) >= layout.words_bytes() && layout.half(1) >= layout.half(0) + half_bytes);
            prop_assert!(layout.bytes().is_some_and(|bytes| bytes >= layout.half(1) + half_bytes));
            prop_assert_eq!(layout.half(1) % WorkspaceSize::ALIGN, 0);
        }
    }
}
