//! The programs of GEMM-ReduceScatter and GEMM-AllReduce with rows per shard: the peers' shards
//! first, the own shard last.
//!
//! Invariant: rank `r` works for owners `r + 1`, `r + 2`, ..., `r`, with the same order of tiles in
//! every shard. So at one step every rank sends to another rank, and a tile's partial tiles were
//! sent at least one shard earlier. With several nodes the steps go around each other node first,
//! then around the own one, and end in each at the rank of the own rail.
//!
//! A partial tile for an owner in another node goes to the **relay**, the intra-node peer on the
//! owner's rail. The relay's own item for that tile adds the partial tiles of its node and sends
//! the sum, so `per_node` times fewer bytes cross nodes.
//!
//! A GEMM-AllReduce works on an own tile as soon as [`Schedule::own_lag`] items lie between it and
//! the last partial tile for it. So finished tiles leave while others are multiplied.
//! They are announced in chunks, as the partial tiles of a shard are. The peers' finished tiles are
//! copied to `y` at the end.
//!
//! A tile adds its own product, the partial tiles of intra-node peers, then the sums of other
//! nodes, in the order in which they were sent. Each was rounded once where it was sent.

use super::items::{AwaitRange, Items};
use super::k_extent::KExtent;
use crate::layout::RowLayout;
use crate::program::mainloop::{accumulation_steps, most_partials};
use crate::program::places::{Places, runs};
use crate::program::schedule::groups_of;
use crate::program::{Await, NONE, RowSource, Schedule, Sink, TileProgram, WorkItem};
use crate::tile::{TileExtent, TileGrid};
use crate::{Nodes, Problem, Rank, Scales, SumsTo};
use std::ops::Range;

/// The owner for whom a rank works at a step, counted from 1 to the world size.
fn owner_at(rank: Rank, step: u32, nodes: Nodes) -> Rank {
    // The own local number is the last of each node.
    let (local, distance) = ((step - 1) % nodes.per_node() + 1, (step - 1) / nodes.per_node() + 1);
    nodes.rank(
        (nodes.node_of(rank) + distance) % nodes.count(),
        (nodes.local_of(rank) + local) % nodes.per_node(),
    )
}

/// Partial tiles that an own tile adds in its mainloop, of `added` in all: none to sums of
/// operands with scales, which are multiplied by them behind it, or leave no registers.
fn in_mainloop(
    problem: &Problem,
    schedule: &Schedule,
    k_extent: KExtent,
    nodes: Nodes,
    added: u32,
) -> u32 {
    let is_scaled = problem.numerics().scales != Scales::None;
    if schedule.split_k > 1 || nodes.are_mixed() || is_scaled {
        return 0;
    }
    schedule.in_mainloop.min(added).min(most_partials(problem, k_extent.steps()))
}

/// `order` with each own tile as early as `lag` items behind the last partial tile of its chunk.
/// Own tiles, of step `world`, stay in order, and every step has as many.
fn own_tiles_early(
    order: &[(TileExtent, u32)],
    world: u32,
    tiles_per_chunk: u32,
    lag: u32,
) -> Vec<(TileExtent, u32)> {
    let (own, peers) = (
        order.iter().filter(|(_, step)| *step == world),
        order.iter().filter(|(_, step)| *step != world),
    );
    let tiles = order.len() as u32 / world;
    // By chunk: its tiles, and partial tiles that are still to come.
    let of_chunk = |first| tiles_per_chunk.min(tiles - first);
    let mut missing: Vec<(u32, u32)> = (0..tiles)
        .step_by(tiles_per_chunk as usize)
        .map(|first| (of_chunk(first), (world - 1) * of_chunk(first)))
        .collect();
    let mut taken = vec![0; world as usize];
    let mut all = Vec::with_capacity(order.len());
    // Own tiles with all partial tiles, and the position from which on they may come.
    let mut ready = std::collections::VecDeque::new();
    let mut next = own.copied();
    for &(tile, step) in peers {
        while ready.front().is_some_and(|&from| from <= all.len()) {
            ready.pop_front();
            all.extend(next.next());
        }
        all.push((tile, step));
        let (of_chunk, left) = &mut missing[(taken[step as usize] / tiles_per_chunk) as usize];
        taken[step as usize] += 1;
        *left -= 1;
        if *left == 0 {
            ready.extend(std::iter::repeat_n(all.len() + lag as usize, *of_chunk as usize));
        }
    }
    all.extend(next);
    all
}

/// Appends the copies of peers' finished tiles, in the order in which their owners finish them.
/// Signals of `tiles_per_chunk` tiles, by owner, begin with `results`.
fn append_copies(
    problem: &Problem,
    rank: Rank,
    tiles: Vec<TileExtent>,
    results: u32,
    tiles_per_chunk: u32,
    items: &mut Vec<WorkItem>,
    awaits: &mut Vec<Await>,
) {
    let (world, chunks) = (problem.world(), (tiles.len() as u32).div_ceil(tiles_per_chunk));
    for (index, tile) in (0..).zip(tiles) {
        for owner in (1..world.get()).map(|step| rank.before(step, world)) {
            let rows = problem.shard_rows(owner);
            let tile = tile.above(rows.len() as u32);
            let late_first = awaits.len() as u32;
            awaits.push(Await {
                signal: results + owner.get() * chunks + index / tiles_per_chunk,
                peer: owner.get(),
                k_step: 0,
            });
            items.push(WorkItem {
                a_source: RowSource::Caller,
                row: rows.start + tile.row,
                rows: tile.rows,
                col: tile.col,
                cols: tile.cols,
                sink: Sink::Copy,
                dest: rank.get(),
                late_first,
                late_count: 1,
                ..WorkItem::default()
            });
        }
    }
}

/// A shard as this rank works on it.
struct Shard {
    owner: Rank,
    rows: u32,
    /// Places of the partial tiles that are added here.
    added: Range<u32>,
    /// The rank that its tiles are sent to, the place there, and the owner's place here.
    sent: Option<((Rank, u32), u32)>,
}

/// What all tiles of a shard have in common, by step from 1.
fn shards(problem: &Problem, rank: Rank, nodes: Nodes, places: Places) -> Vec<Shard> {
    let shard = |step| {
        let owner = owner_at(rank, step, nodes);
        let added = if nodes.on_one_rail(rank, owner) { places.added(rank, owner) } else { 0..0 };
        let sent = places.destination(rank, owner).zip(owner.place_at(rank));
        Shard { owner, rows: problem.shard_rows(owner).len() as u32, added, sent }
    };
    (1..=problem.world().get()).map(shard).collect()
}

pub(super) fn build(
    problem: &Problem,
    rank: Rank,
    schedule: &Schedule,
    nodes: Nodes,
) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let tiles = grid.row_blocks() * grid.col_blocks();
    let tiles_per_chunk = schedule.chunk_of(tiles);
    let chunks = tiles.div_ceil(tiles_per_chunk);
    let tiles_in = |chunk: u32| tiles_per_chunk.min(tiles - chunk * tiles_per_chunk);

    let (places, k_extent) = (Places::new(nodes), KExtent::new(problem, rank, schedule));
    let in_mainloop =
        in_mainloop(problem, schedule, KExtent::least(problem, schedule), nodes, world.peers());
    let (first_step, gap) = accumulation_steps(k_extent.steps(), in_mainloop);
    let all_reduces = problem.op().sums_to() == SumsTo::All && world.peers() > 0;
    // Signals of finished tiles, by owner, follow those of chunks.
    let results = world.peers() * chunks;
    let signals = if all_reduces { results + world.get() * chunks } else { results };
    let copies = if all_reduces { world.peers() * tiles } else { 0 };
    let mut list = Items::new(problem, rank, schedule, nodes, signals, copies);
    // By owner: the first await of its first chunk.
    let mut first_await = vec![0; world.index()];
    for owner in nodes.rail(rank).chain([rank]) {
        first_await[owner.index()] = list.next_await();
        let entries = (0..).zip(places.added(rank, owner)).zip(places.sources(rank, owner));
        let of_first_chunk: Vec<_> = entries
            .map(|((number, place), peer)| {
                let k_step = if number < in_mainloop { first_step + number * gap } else { 0 };
                Await { signal: place * chunks, peer: peer.get(), k_step }
            })
            .collect();
        for chunk in 0..chunks {
            list.awaits.extend(
                of_first_chunk.iter().map(|first| Await { signal: first.signal + chunk, ..*first }),
            );
        }
    }
    let shards = shards(problem, rank, nodes, places);

    let mut taken = vec![0; world.index()];
    let mut order = Vec::with_capacity((world.get() * tiles) as usize);
    for group in runs(nodes).into_iter().flat_map(|run| groups_of(run, schedule.group)) {
        order.extend(schedule.tiles_of_group(grid, group));
    }
    if all_reduces {
        order = own_tiles_early(
            &order,
            world.get(),
            tiles_per_chunk,
            schedule.own_lag.max(schedule.stream_k_workers),
        );
    }
    for (tile, step) in order {
        let Shard { owner, rows, ref added, sent } = shards[step as usize - 1];
        // Without rows the owner still gets a slot and its signal, as of every other tile.
        let tile = tile.above(rows);
        let index = taken[owner.index()];
        taken[owner.index()] += 1;
        let chunk = index / tiles_per_chunk;
        let partials = added.end - added.start;
        let first = first_await[owner.index()] + chunk * partials;
        let in_mainloop = in_mainloop.min(partials);
        let item = WorkItem {
            a_source: RowSource::Caller,
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
        // As one of a chunk whose tiles are counted by the counter of this number.
        let announced = |raise, counter| WorkItem {
            raise,
            counter: if tiles_in(chunk) > 1 { counter } else { NONE },
            raise_after: tiles_in(chunk),
            ..item
        };
        let item = match sent {
            Some(((dest, place), owner_place)) => WorkItem {
                sink: Sink::Send,
                dest: dest.get(),
                slot: place * tiles + index,
                ..announced(place * chunks + chunk, owner_place * chunks + chunk)
            },
            None if all_reduces => WorkItem {
                sink: Sink::Reduce,
                dest: rank.get(),
                ..announced(results + rank.get() * chunks + chunk, results + chunk)
            },
            None => WorkItem {
                sink: if world.peers() == 0 { Sink::Store } else { Sink::Reduce },
                dest: rank.get(),
                ..item
            },
        };
        list.tile(item, |_| {
            if in_mainloop > 0 {
                AwaitRange { first, count: in_mainloop, group: 1 }
            } else {
                AwaitRange::default()
            }
        });
    }
    let mut items = list.in_order();
    if all_reduces {
        let tiles = grid.order(schedule.raster_group);
        append_copies(problem, rank, tiles, results, tiles_per_chunk, &mut items, &mut list.awaits);
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        split_k_slots: list.split_k_slots,
        items,
        awaits: list.awaits,
        transfers: Vec::new(),
        forwards: Vec::new(),
        slots_per_source: tiles,
        in_mainloop,
        // One for each chunk that is sent, then for each own one that peers read.
        counters: match (tiles_per_chunk, all_reduces) {
            (1, _) => 0,
            (_, false) => results,
            (_, true) => results + chunks,
        },
        rows: RowLayout::PerShard,
        nodes,
    }
}
