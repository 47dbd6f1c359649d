//! How much memory the calls of an op need.

use super::control;
use super::pad::pad_bytes;

/// Workspace that a call needs; a communicator holds the largest of its ops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WorkspaceSize {
    /// Bytes of one half of the data region: the gather buffer or the slots of one epoch.
    pub half_bytes: u64,
    /// Signals on the pad.
    pub signals: u32,
    /// Local chunk counters.
    pub counters: u32,
}

impl WorkspaceSize {
    /// Alignment of the halves, for tensor maps and the driver's allocation granularity.
    pub const ALIGN: u64 = 1 << 21;

    /// A size that covers both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            half_bytes: self.half_bytes.max(other.half_bytes),
            signals: self.signals.max(other.signals),
            counters: self.counters.max(other.counters),
        }
    }

    /// Distance between the halves: `half_bytes` rounded up to [`Self::ALIGN`]. It saturates.
    pub const fn half_stride(&self) -> u64 {
        match self.half_bytes.checked_next_multiple_of(Self::ALIGN) {
            Some(stride) => stride,
            None => u64::MAX,
        }
    }

    /// Bytes of the data region.
    pub const fn data_bytes(&self) -> u64 {
        self.half_stride().saturating_mul(2)
    }

    /// Device bytes in all: data, pad and control block.
    pub const fn total_bytes(&self) -> u64 {
        self.data_bytes()
            .saturating_add(pad_bytes(self.signals))
            .saturating_add(control::bytes(self.counters))
    }
}
