//! Epochs: a signal word is never reset; it holds the number of the last call that raised it.
//!
//! Invariant: for one word, raised epochs only grow (modulo 2^32), and only one rank writes it in a
//! call. No word is ahead of its reader: a rank that still awaits one of call `e` has raised none
//! of call `e + 1`, so nobody has ended that call, and only the next one writes the word again, as
//! each half has words of its own. So a wait is over when the word is the call's number, and a word
//! of any other call but one 2^32 before is not taken for it.

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

    /// The epoch `calls` before.
    #[must_use]
    pub const fn before(self, calls: u32) -> Self {
        Self(self.0.wrapping_sub(calls))
    }

    /// Which half of the data region the call uses.
    pub const fn half(self) -> usize {
        (self.0 & 1) as usize
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
