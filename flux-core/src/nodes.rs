//! Nodes: groups of ranks that reach each other's memory. Messages carry data between nodes.
//!
//! Invariant: all nodes have equally many, consecutive ranks: rank `node * per_node + local`. The
//! ranks with one local number form a **rail**; traffic between nodes stays on its rail.

use crate::{Rank, WorldSize};
use std::fmt;

/// How the ranks of a world are grouped.
///
/// ```
/// use flux_core::{Nodes, Rank, WorldSize};
/// let nodes = Nodes::new(WorldSize::new(8).unwrap(), 2).unwrap();
/// let rank = Rank::new(6);
/// assert_eq!((nodes.per_node(), nodes.node_of(rank), nodes.local_of(rank)), (4, 1, 2));
/// assert_eq!(nodes.node_peers(rank).map(Rank::get).collect::<Vec<_>>(), [4, 5, 7]);
/// assert_eq!(nodes.rail(rank).map(Rank::get).collect::<Vec<_>>(), [2]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nodes {
    world: WorldSize,
    count: u32,
}

impl Nodes {
    /// `count` nodes; `None` if they would not be equal.
    pub const fn new(world: WorldSize, count: u32) -> Option<Self> {
        if count == 0 || !world.get().is_multiple_of(count) {
            None
        } else {
            Some(Self { world, count })
        }
    }

    /// One rank in each node.
    pub const fn apart(world: WorldSize) -> Self {
        Self { world, count: world.get() }
    }

    /// One node of all ranks.
    pub const fn of_all(world: WorldSize) -> Self {
        Self { world, count: 1 }
    }

    /// The ranks.
    pub const fn world(self) -> WorldSize {
        self.world
    }

    /// Number of nodes.
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Nodes other than the own one.
    pub const fn others(self) -> u32 {
        self.count - 1
    }

    /// Ranks of a node.
    pub const fn per_node(self) -> u32 {
        self.world.get() / self.count
    }

    /// Whether some ranks share a node and others do not.
    pub const fn are_mixed(self) -> bool {
        self.count > 1 && self.count < self.world.get()
    }

    /// The node of a rank.
    pub const fn node_of(self, rank: Rank) -> u32 {
        rank.get() / self.per_node()
    }

    /// The number of a rank in its node.
    pub const fn local_of(self, rank: Rank) -> u32 {
        rank.get() % self.per_node()
    }

    /// The rank with number `local` of node `node`.
    pub const fn rank(self, node: u32, local: u32) -> Rank {
        Rank::new(node * self.per_node() + local)
    }

    /// Whether both ranks are in one node.
    pub const fn together(self, a: Rank, b: Rank) -> bool {
        self.node_of(a) == self.node_of(b)
    }

    /// Whether both ranks have the same local number.
    pub const fn on_one_rail(self, a: Rank, b: Rank) -> bool {
        self.local_of(a) == self.local_of(b)
    }

    /// The other ranks of a rank's node, in order.
    pub fn node_peers(self, rank: Rank) -> impl DoubleEndedIterator<Item = Rank> + Clone {
        let first = self.node_of(rank) * self.per_node();
        (first..first + self.per_node()).map(Rank::new).filter(move |&node_peer| node_peer != rank)
    }

    /// The other ranks of a rank's rail, in order.
    pub fn rail(self, rank: Rank) -> impl DoubleEndedIterator<Item = Rank> + Clone {
        (0..self.count)
            .map(move |node| self.rank(node, self.local_of(rank)))
            .filter(move |&peer| peer != rank)
    }

    /// The rank `step` steps after `rank`: around its node, then around each next node from the
    /// same local number on.
    #[must_use]
    pub const fn after(self, rank: Rank, step: u32) -> Rank {
        let (distance, turn) = (step / self.per_node(), step % self.per_node());
        self.rank(
            (self.node_of(rank) + distance) % self.count,
            (self.local_of(rank) + turn) % self.per_node(),
        )
    }

    /// The rank whose [`after`](Self::after) at `step` is `rank`.
    #[must_use]
    pub const fn before(self, rank: Rank, step: u32) -> Rank {
        let (distance, turn) = (step / self.per_node() % self.count, step % self.per_node());
        let node = (self.node_of(rank) + self.count - distance) % self.count;
        self.rank(node, (self.local_of(rank) + self.per_node() - turn) % self.per_node())
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} nodes of {}", self.count, self.per_node())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn ranks_are_dealt_evenly_or_not_at_all() {
        let nodes = |world, count| Nodes::new(WorldSize::new(world).unwrap(), count);
        assert!(nodes(8, 3).is_none() && nodes(8, 0).is_none() && nodes(4, 8).is_none());
        assert!(
            nodes(8, 2).unwrap().are_mixed()
                && !nodes(8, 8).unwrap().are_mixed()
                && !nodes(8, 1).unwrap().are_mixed()
        );
        assert_eq!(nodes(6, 6), Some(Nodes::apart(WorldSize::new(6).unwrap())));
    }

    #[test]
    fn steps_lead_to_every_rank_once_and_back() {
        for world in 1..=16 {
            let world = WorldSize::new(world).unwrap();
            for nodes in (1..=world.get()).filter_map(|count| Nodes::new(world, count)) {
                for rank in world.ranks() {
                    let all: BTreeSet<Rank> =
                        (0..world.get()).map(|step| nodes.after(rank, step)).collect();
                    assert_eq!(all.len(), world.index());
                    assert!(
                        (0..world.get())
                            .all(|step| nodes.before(nodes.after(rank, step), step) == rank)
                    );
                    // At one step no two ranks reach the same rank.
                    let reached: BTreeSet<Rank> =
                        world.ranks().map(|other| nodes.after(other, rank.get())).collect();
                    assert_eq!(reached.len(), world.index());
                    // Without mixed nodes it is the ring of the world.
                    let ring = |step| nodes.after(rank, step) == rank.after(step, world);
                    assert!(nodes.are_mixed() || (0..world.get()).all(ring));
                    assert_eq!(nodes.node_peers(rank).count() + 1, nodes.per_node() as usize);
                    assert!(
                        nodes.rail(rank).all(
                            |peer| nodes.on_one_rail(rank, peer) && !nodes.together(rank, peer)
                        )
                    );
                }
            }
        }
    }
}
