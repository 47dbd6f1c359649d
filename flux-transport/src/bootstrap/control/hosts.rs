//! Which ranks share a host.
//!
//! Invariant: two ranks have the same number exactly when they can pass descriptors. Hosts are
//! numbered by their lowest rank.

use flux_core::{Rank, WorldSize};

/// The host of every rank of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hosts {
    of: Vec<u32>,
}

impl Hosts {
    pub(crate) fn one(world: WorldSize) -> Self {
        Self { of: vec![0; world.index()] }
    }

    /// By equality of what names a rank's host, in rank order.
    pub(crate) fn group<T: PartialEq>(names: &[T]) -> Self {
        let mut of = Vec::with_capacity(names.len());
        let mut count = 0;
        for (rank, name) in names.iter().enumerate() {
            let known = names[..rank].iter().position(|other| other == name);
            of.push(known.map_or(count, |rank| of[rank]));
            count += u32::from(known.is_none());
        }
        Self { of }
    }

    /// Number of hosts.
    pub fn count(&self) -> u32 {
        self.of.iter().max().map_or(0, |last| last + 1)
    }

    /// The number of a rank's host, below [`count`](Self::count).
    ///
    /// # Panics
    /// If the world has no such rank.
    pub fn of(&self, rank: Rank) -> u32 {
        self.of[rank.index()]
    }

    /// Whether two ranks share a host: then they can pass each other descriptors, and so memory.
    ///
    /// # Panics
    /// If the world has no such ranks.
    pub fn together(&self, a: Rank, b: Rank) -> bool {
        self.of(a) == self.of(b)
    }

    /// The ranks of host `host`, in order.
    pub fn ranks(&self, host: u32) -> impl Iterator<Item = Rank> {
        (0..).map(Rank::new).zip(&self.of).filter(move |&(_, &of)| of == host).map(|(rank, _)| rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_are_together_exactly_where_their_names_are_the_same(
            names in prop::collection::vec(0..5_u8, 1..16),
        ) {
            let hosts = Hosts::group(&names);
            let ranks = || (0..names.len() as u32).map(Rank::new);
            for a in ranks() {
                for b in ranks() {
                    prop_assert_eq!(hosts.together(a, b), names[a.index()] == names[b.index()]);
                }
            }
            // Numbered by their lowest rank, without a gap; each rank is on one.
            let lowest: Vec<Rank> = (0..hosts.count()).map(|host| hosts.ranks(host).next().unwrap()).collect();
            prop_assert!(lowest.is_sorted() && lowest[0] == Rank::new(0));
            prop_assert_eq!((0..hosts.count()).map(|host| hosts.ranks(host).count()).sum::<usize>(), names.len());
        }
    }
}
