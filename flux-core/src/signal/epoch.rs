//! Epochs: a signal word is never reset; it holds the number of the last call that raised it.
//!
//! Invariant: for one word, raised epochs only grow (modulo 2^32), and only one rank writes it in a call. The protocol keeps
//! every writer at most [`Epoch::MAX_LEAD`] calls ahead of every reader.

use std::fmt;

/// Number of a call on a communicator, modulo 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch(u32);

impl Epoch {
    /// How far ahead of what a reader expects a word can be.
    ///
    /// Credits alone bound it. A rank that closes call `e` has published `consumed = e` and awaits `consumed >= e - 1`. On the strength
    /// of its credit a peer can close call `e + 1`, and with data to send but none to await run through call `e + 2` and publish
    /// `consumed = e + 2`: a lead of 3. Signals of a half do not lead at all: a rank that still awaits one of call `e` has published no more than
    /// `e - 1`, so nobody is past call `e + 1`, which raises those of the other half.
    pub const MAX_LEAD: u32 = 3;

    /// The epoch of a fresh communicator's first call.
    pub const FIRST: Self = Self(1);

    /// The epoch with this number.
    pub const fn new(epoch: u32) -> Self {
        Self(epoch)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The next call's epoch.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The epoch `calls` before.
    #[must_use]
    pub const fn before(self, calls: u32) -> Self {
        Self(self.0.wrapping_sub(calls))
    }

    /// Which half of the data region the call uses.
    pub const fn half(self) -> usize {
        (self.0 & 1) as usize
    }

    /// Whether a word that reads `seen` says that this epoch was reached.
    ///
    /// True for this epoch and up to [`Self::MAX_LEAD`] later ones, so that a word that was last raised any other number of calls ago, even
    /// more than 2^31, does not satisfy the wait; a comparison of signs would let it.
    pub const fn reached_by(self, seen: u32) -> bool {
        seen.wrapping_sub(self.0) <= Self::MAX_LEAD
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
