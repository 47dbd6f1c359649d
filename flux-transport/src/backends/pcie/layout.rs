//! The layout of a rank's shared region of host memory.
//!
//! Invariant: in a call every word has one writer and at most one waiting rank. Anybody may look at
//! `broken`, `poisoned` and the op-sequence hashes.
//!
//! | part | size |
//! |---|---|
//! | `broken`, `poisoned` | a line |
//! | proof | a line |
//! | op-sequence hashes | `u64`s |
//! | flags, reader by reader, by the reader's signal | dense `u32`s, from a line |
//! | pad | as on a device |
//! | two buffers, by `epoch % 2` | from a border of 2 MiB |
//!
//! With copy engines the buffers hold what the owner sends, announced by the flags; with scattering
//! kernels what it receives, announced by the pad. A buffer is free again two calls later.

use crate::backends::device::calls::OpHashes;
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

        #[test]
        fn a_region_holds_both_halves_of_any_size_or_has_none(half_bytes: u64, signals: u32) {
            let size = WorkspaceSize { half_bytes, signals, counters: 0 };
            if let Some(bytes) = Layout::new(2, &size).bytes() {
                prop_assert!(u128::from(bytes) >= 2 * u128::from(half_bytes));
            }
        }
    }
}
