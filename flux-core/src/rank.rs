//! Ranks and world sizes.
//!
//! Invariant: a [`WorldSize`] lies in `1..=MAX_WORLD`, so a rank's arrays of peers have a fixed
//! capacity on the device.

use std::fmt;

/// Most ranks of one communicator: the capacity of the peer arrays in a kernel's parameters.
pub const MAX_WORLD: usize = 16;

/// One member of a communicator, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(u32);

impl Rank {
    /// The rank with this number. Whether it is below the world size is the communicator's
    /// business.
    pub const fn new(rank: u32) -> Self {
        Self(rank)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number, to index with.
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

    /// Position of this rank among the ranks other than `owner`, in rank order: the index of its
    /// place in `owner`'s gather buffer.
    ///
    /// `None` for `owner` itself, which keeps nothing of its own there.
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

    /// The number of ranks, to index with.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The ranks other than one.
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
