//! Words of a pad: those about ranks, then signals.

use super::LINE;
use crate::rank::MAX_WORLD;

/// Offset, in a pad, of the word with the reason why `rank` has given up, or 0. When they connect,
/// `rank` also proves with it that it reaches the pad.
pub const fn broken_offset(rank: u32) -> u64 {
    rank as u64 * LINE
}

/// Offset, in a pad, of two words of `rank`: the number of its call of half `half`, and its
/// op-sequence hash, never 0.
///
/// Both words begin as 0, so a reader accepts the call number only with a hash.
pub const fn calling_offset(rank: u32, half: usize) -> u64 {
    broken_offset(rank) + 8 + half as u64 * 8
}

/// Offset, in a pad, of signal `index` of the calls that use half `half` of the data regions.
///
/// Each half has words of its own: another rank may raise the signal in the next call. A rank
/// that is a call ahead must not end a wait of this call.
pub const fn signal_offset(index: u32, half: usize) -> u64 {
    (MAX_WORLD as u64 + 2 * index as u64 + half as u64) * LINE
}

/// Bytes of the words about ranks at the start of a pad, which begin as 0. Signals begin as the
/// epoch before the first call's.
pub const BROKEN_BYTES: u64 = signal_offset(0, 0);

/// Bytes of a pad of `signals` signals.
pub const fn pad_bytes(signals: u32) -> u64 {
    signal_offset(signals, 0)
}
