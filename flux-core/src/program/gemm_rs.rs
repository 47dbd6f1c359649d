//! The program of GEMM-ReduceScatter: the peers' shards first, those of a group side by side, own
//! shard last.
//!
//! Invariant: rank `r` works for owners `r + 1`, `r + 2`, ..., `r`, with the same order of tiles in
//! every shard. So at one step every rank sends to another rank, and what a tile adds was sent at
//! least one shard earlier. With several nodes the steps go around each other node first and around
//! the own one last, and end in each at the rank of the own rail.
//!
//! A partial tile for an owner of another node goes to the intra-node peer on the owner's rail, the **relay**:
//! its own item for that tile adds those of its intra-node peers and sends the sum, so `per_node` times less
//! crosses nodes. What is added to a tile is, in this order: the own product, the intra-node peers', the other
//! nodes' sums, each rounded once where it was sent; both as they are sent, so rank `r` adds those
//! of `r - 1`, `r - 2`, ... The first of them may be added before the own product is whole, at
//! steps along `k` that are the same in every run.
//!
//! ```text
//! places at a rank   [ intra-node peers, for the own shard ][ other nodes' sums, for the own shard ][ intra-node peers, for the rail's rank in each other node, in turn ]
//! ```

use super::along_k::AlongK;
use super::items::Items;
use super::schedule::groups_of;
use super::{Await, NONE, Schedule, TileProgram, WorkItem, in_mainloop_steps, most_in_mainloop, sink, source};
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank};
use std::ops::Range;

/// Where sources' slots lie at a rank of a GEMM-ReduceScatter whose tiles do not span shards, and
/// who fills them.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    nodes: Nodes,
}

impl Places {
    /// Of ranks that are grouped so.
    pub const fn new(nodes: Nodes) -> Self {
        Self { nodes }
    }

    /// Number of a node among those other than `seen_from`'s.
    const fn other(self, node: Rank, seen_from: Rank) -> u32 {
        let (node, own) = (self.nodes.node_of(node), self.nodes.node_of(seen_from));
        if node < own { node } else { node - 1 }
    }

    /// The places at `rank` of what is added to a tile of `owner`'s shard, which is its own or that
    /// of its rail's rank in another node.
    pub(super) const fn added(self, rank: Rank, owner: Rank) -> Range<u32> {
        let node_peers = self.nodes.per_node() - 1;
        let own = node_peers + self.nodes.others();
        if rank.get() == owner.get() {
            return 0..own;
        }
        let first = own + self.other(owner, rank) * node_peers;
        first..first + node_peers
    }

    /// Who fills those places, in order: as they work for the owner.
    pub(super) fn sources(self, rank: Rank, owner: Rank) -> impl Iterator<Item = Rank> {
        let nodes = self.nodes;
        let others = if rank == owner { nodes.others() } else { 0 };
        (1..nodes.per_node()).chain((1..=others).map(move |distance| distance * nodes.per_node())).map(move |step| nodes.before(rank, step))
    }

    /// To whom `rank` sends what it has of a tile of `owner`'s shard, and its place there; `None`
    /// for the own shard.
    pub fn destination(self, rank: Rank, owner: Rank) -> Option<(Rank, u32)> {
        let nodes = self.nodes;
        let dest = match (nodes.together(rank, owner), nodes.on_one_rail(rank, owner)) {
            (true, true) => return None,
            (false, true) => {
                let distance = (nodes.node_of(owner) + nodes.count() - nodes.node_of(rank)) % nodes.count();
                return Some((owner, nodes.per_node() - 1 + distance - 1));
            }
            (true, false) => owner,
            (false, false) => nodes.rank(nodes.node_of(rank), nodes.local_of(owner)),
        };
        let turn = (nodes.local_of(dest) + nodes.per_node() - nodes.local_of(rank)) % nodes.per_node();
        Some((dest, self.added(dest, owner).start + turn - 1))
    }
}

/// The owner for whom a rank works at each step, counted from 1 to the number of ranks.
fn owner_at(rank: Rank, step: u32, nodes: Nodes) -> Rank {
    // Within a node from the next number on: the own number is a node's last.
    let (turn, distance) = ((step - 1) % nodes.per_node() + 1, (step - 1) / nodes.per_node() + 1);
    nodes.rank((nodes.node_of(rank) + distance) % nodes.count(), (nodes.local_of(rank) + turn) % nodes.per_node())
}

/// Steps whose shards may share a group: what a relay adds, and the own shard, wait for the intra-node peers
/// and are not begun before what they wait for was sent.
fn runs(nodes: Nodes) -> Vec<Range<u32>> {
    let (per_node, last) = (nodes.per_node(), nodes.world().get());
    if per_node == 1 {
        return vec![1..last, last..last + 1];
    }
    (0..nodes.count()).map(|node| node * per_node + per_node).flat_map(|relay| [relay + 1 - per_node..relay, relay..relay + 1]).collect()
}

/// Most shards that share a group.
pub(crate) fn widest_group(nodes: Nodes) -> u32 {
    runs(nodes).into_iter().map(|run| run.len() as u32).max().unwrap_or(1)
}

/// How many of the `added` partial tiles of an own tile are added while it is multiplied.
pub(super) fn in_mainloop(schedule: &Schedule, along_k: AlongK, nodes: Nodes, added: u32) -> u32 {
    if schedule.split_k > 1 || nodes.are_mixed() {
        return 0;
    }
    schedule.in_mainloop.min(added).min(most_in_mainloop(along_k.steps()))
}

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, nodes: Nodes) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let tiles = grid.row_blocks() * grid.col_blocks();
    let tiles_per_chunk = schedule.chunk_of(tiles);
    let chunks = tiles.div_ceil(tiles_per_chunk);
    let tiles_in = |chunk: u32| tiles_per_chunk.min(tiles - chunk * tiles_per_chunk);

    let (places, along_k) = (Places::new(nodes), AlongK::new(problem, schedule));
    let in_mainloop = in_mainloop(schedule, along_k, nodes, world.peers());
    let (first_step, gap) = in_mainloop_steps(along_k.steps(), in_mainloop);
    let stream_k = schedule.stream_k_tiles(problem).filter(|_| !nodes.are_mixed());
    let mut list = Items::new(rank, world.get() * tiles, along_k, schedule, world.peers() * chunks).shared(stream_k);
    // By owner: the first entry of what is awaited for the partial tiles of its first chunk.
    let mut first_await = vec![0; world.index()];
    for owner in nodes.rail(rank).chain([rank]) {
        first_await[owner.index()] = list.next_await();
        for chunk in 0..chunks {
            let entries = (0..).zip(places.added(rank, owner)).zip(places.sources(rank, owner));
            list.awaits.extend(entries.map(|((number, place), peer)| {
                let k_step = if number < in_mainloop { first_step + number * gap } else { 0 };
                Await { signal: place * chunks + chunk, peer: peer.get(), k_step }
            }));
        }
    }

    let mut taken = vec![0; world.index()];
    for (tile, step) in
        runs(nodes).into_iter().flat_map(|run| groups_of(run, schedule.group)).flat_map(|group| schedule.in_group(grid, group))
    {
        let owner = owner_at(rank, step, nodes);
        let index = taken[owner.index()];
        taken[owner.index()] += 1;
        let chunk = index / tiles_per_chunk;
        let added = if nodes.on_one_rail(rank, owner) { places.added(rank, owner) } else { 0..0 };
        let partials = added.end - added.start;
        let first = first_await[owner.index()] + chunk * partials;
        let in_mainloop = in_mainloop.min(partials);
        let item = WorkItem {
            a_source: source::CALLER,
            a_outer: owner.get(),
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            partials,
            partial_slot: if partials > 0 { added.start * tiles + index } else { NONE },
            late_first: if partials > in_mainloop { first + in_mainloop } else { 0 },
            late_count: partials - in_mainloop,
            ..WorkItem::default()
        };
        let item = match (places.destination(rank, owner), owner.place_at(rank)) {
            (Some((dest, place)), Some(owner_place)) => WorkItem {
                sink: sink::SEND,
                dest: dest.get(),
                slot: place * tiles + index,
                raise: place * chunks + chunk,
                counter: if tiles_in(chunk) > 1 { owner_place * chunks + chunk } else { NONE },
                raise_after: tiles_in(chunk),
                ..item
            },
            _ => WorkItem { sink: if world.peers() == 0 { sink::STORE } else { sink::REDUCE }, dest: rank.get(), ..item },
        };
        list.tile(item, |_| if in_mainloop > 0 { (first, in_mainloop, 1) } else { (0, 0, 0) });
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        split_k_slots: list.split_k_slots,
        items: list.in_order(),
        awaits: list.awaits,
        transfers: Vec::new(),
        forwards: Vec::new(),
        slots_per_source: tiles,
        in_mainloop,
        counters: if tiles_per_chunk > 1 { world.peers() * chunks } else { 0 },
        flattened: false,
        nodes,
    }
}
