//! Places of partial tiles of a GEMM-ReduceScatter, and which shards may share a group.
//!
//! Invariant: all ranks derive the same places, from the nodes alone.
//!
//! ```text
//! places at a rank   [ intra-node peers, own shard ][ other nodes' sums, own shard ]
//!                    [ intra-node peers, shard of the rail's rank in each other node ]
//! ```

use crate::{Nodes, Rank};
use std::ops::Range;

/// The places of slots at a rank, and the sources that fill them; rows are per shard.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    nodes: Nodes,
}

impl Places {
    /// The places of ranks in these nodes.
    pub const fn new(nodes: Nodes) -> Self {
        Self { nodes }
    }

    /// Number of a rank's node among those other than `seen_from`'s.
    const fn other(self, node: Rank, seen_from: Rank) -> u32 {
        let (node, own) = (self.nodes.node_of(node), self.nodes.node_of(seen_from));
        if node < own { node } else { node - 1 }
    }

    /// The places at `rank` of the partial tiles for `owner`'s shard, which is its own or of its
    /// rail.
    pub(super) const fn added(self, rank: Rank, owner: Rank) -> Range<u32> {
        let node_peers = self.nodes.per_node() - 1;
        let own = node_peers + self.nodes.others();
        if rank.get() == owner.get() {
            return 0..own;
        }
        let first = own + self.other(owner, rank) * node_peers;
        first..first + node_peers
    }

    /// The sources that fill those places, in order.
    pub(super) fn sources(self, rank: Rank, owner: Rank) -> impl Iterator<Item = Rank> {
        let nodes = self.nodes;
        let others = if rank == owner { nodes.others() } else { 0 };
        (1..nodes.per_node())
            .chain((1..=others).map(move |distance| distance * nodes.per_node()))
            .map(move |step| nodes.before(rank, step))
    }

    /// The rank to which `rank` sends a tile of `owner`'s shard, and its place there; `None` for
    /// the own shard.
    pub fn destination(self, rank: Rank, owner: Rank) -> Option<(Rank, u32)> {
        let nodes = self.nodes;
        let dest = match (nodes.together(rank, owner), nodes.on_one_rail(rank, owner)) {
            (true, true) => return None,
            (false, true) => {
                let distance =
                    (nodes.node_of(owner) + nodes.count() - nodes.node_of(rank)) % nodes.count();
                return Some((owner, nodes.per_node() - 1 + distance - 1));
            }
            (true, false) => owner,
            (false, false) => nodes.rank(nodes.node_of(rank), nodes.local_of(owner)),
        };
        let turn =
            (nodes.local_of(dest) + nodes.per_node() - nodes.local_of(rank)) % nodes.per_node();
        Some((dest, self.added(dest, owner).start + turn - 1))
    }
}

/// Steps whose shards may share a group. A relay's shard and the own shard are groups of their own:
/// they add partial tiles of intra-node peers, which must have been sent before.
pub(super) fn runs(nodes: Nodes) -> Vec<Range<u32>> {
    let (per_node, last) = (nodes.per_node(), nodes.world().get());
    if per_node == 1 {
        return vec![1..last, last..last + 1];
    }
    (0..nodes.count())
        .map(|node| node * per_node + per_node)
        .flat_map(|relay| [relay + 1 - per_node..relay, relay..relay + 1])
        .collect()
}

/// Most shards of a group.
pub(crate) fn widest_group(nodes: Nodes) -> u32 {
    runs(nodes).into_iter().map(|run| run.len() as u32).max().unwrap_or(1)
}
