//! Epochs: a signal word holds the number of the last call that raised it, and is never reset.
//!
//! Invariant: the epochs of a word only grow (modulo 2^32), and one rank writes it in a call. No
//! word is ahead of its reader: while a rank awaits a signal of call `e`, it has raised none of
//! call `e + 1`, so nobody has ended that call. A wait therefore ends when the word equals the
//! call's number.

use std::fmt;

/// Number of a call on a communicator, modulo 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epoch(u32);

impl Epoch {
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

    /// The epoch `calls` earlier.
    #[must_use]
    pub const fn before(self, calls: u32) -> Self {
        Self(self.0.wrapping_sub(calls))
    }

    /// Whether it comes before `other`, of which it is at most 2^31 calls away.
    pub const fn is_before(self, other: Self) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() < 0
    }

    /// The half of the data region that the call uses: the buffer index of double buffering.
    pub const fn half(self) -> usize {
        (self.0 & 1) as usize
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
