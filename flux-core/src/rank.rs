//! Ranks and world sizes.
//!
//! Invariant: a [`WorldSize`] lies in `1..=MAX_WORLD`, so peer arrays have a fixed capacity.

use std::fmt;

/// Most ranks of one communicator: the capacity of the peer arrays in a kernel's parameters.
pub const MAX_WORLD: usize = 16;

/// One member of a communicator, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(u32);

impl Rank {
    /// The rank with this number, which the communicator checks against its world size.
    pub const fn new(rank: u32) -> Self {
        Self(rank)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The rank `steps` after this one, around the ring of `world`.
    #[must_use]
    pub const fn after(self, steps: u32, world: WorldSize) -> Self {
        Self((self.0 + steps) % world.get())
    }

    /// The rank `steps` before this one, around the ring of `world`.
    #[must_use]
    pub const fn before(self, steps: u32, world: WorldSize) -> Self {
        Self((self.0 + world.get() - steps % world.get()) % world.get())
    }

    /// Index of this rank's place in the gather buffer of `owner`: its position among the other
    /// ranks. `None` for `owner` itself.
    pub const fn place_at(self, owner: Self) -> Option<u32> {
        if self.0 == owner.0 {
            None
        } else if self.0 < owner.0 {
            Some(self.0)
        } else {
            Some(self.0 - 1)
        }
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Number of ranks of a communicator, `1..=MAX_WORLD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorldSize(u32);

impl WorldSize {
    /// A world of one rank.
    pub const ONE: Self = Self(1);

    /// A world of `size` ranks; `None` outside `1..=MAX_WORLD`.
    pub const fn new(size: u32) -> Option<Self> {
        if size == 0 || size as usize > MAX_WORLD { None } else { Some(Self(size)) }
    }

    /// The number of ranks.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number of ranks as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Ranks other than one.
    pub const fn peers(self) -> u32 {
        self.0 - 1
    }

    /// All ranks, from 0.
    pub fn ranks(self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator {
        (0..self.0).map(Rank)
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
