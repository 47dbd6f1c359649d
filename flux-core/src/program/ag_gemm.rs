//! The program of AllGather-GEMM: own shard first, then the peers' in the order in which they
//! arrive; the shards of a group side by side, from the moment on which all their rows are there.
//!
//! Invariant: rank `r` works on sources `r`, `r + 1`, `r + 2`, ... and sends its shard to `r - 1`,
//! `r - 2`, ..., so the mover step that brings a shard is the step at which it is worked on, and at
//! one step every rank writes to another destination. The steps go around the own node first, then
//! around each other node, from the rank of the own rail on, which is the one that brings its shard
//! across.

use super::along_k::AlongK;
use super::arrivals::Arrivals;
use super::items::Items;
use super::{Await, Forward, Schedule, TileProgram, Transfer, WorkItem, sink, source};
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank};

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, nodes: Nodes) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let arrivals = Arrivals::new(problem, schedule);
    let (chunks, slices) = (arrivals.chunks(), arrivals.slices());
    let (tiles, along_k) = (world.get() * grid.row_blocks() * grid.col_blocks(), AlongK::new(problem, schedule));
    let stream_k = schedule.stream_k_tiles(problem).filter(|_| !nodes.are_mixed());
    let mut list = Items::new(rank, tiles, along_k, schedule, world.peers() * chunks * slices).shared(stream_k);
    awaits(&mut list, &arrivals, rank, schedule, nodes);

    for group in schedule.groups(world) {
        let chunk_ordered = schedule.is_chunk_ordered(&group, slices);
        for (tile, step) in schedule.as_they_come(grid, group.clone(), slices) {
            let shard = nodes.after(rank, step);
            let place = shard.place_at(rank);
            // The await list is in the order of groups, without the own shard. A shard by itself is
            // begun chunk by chunk. The tiles of a group read the same weights: begun at different
            // times they would each read them from memory, so all of them, own ones too, await the
            // whole group, or a chunk of each of its shards.
            let first_step = group.start.max(1);
            let before_band = (first_step - 1) * chunks * slices;
            let chunk = || arrivals.chunks_of(tile.row..tile.row + tile.rows).start;
            let (first, per_slice) = if group.len() > 1 && chunk_ordered {
                let shards = group.end - first_step;
                (before_band + chunk() * shards, shards)
            } else if group.len() > 1 {
                (before_band, (group.end - first_step) * chunks)
            } else if place.is_some() {
                (before_band + chunk() * slices, 1)
            } else {
                (0, 0)
            };
            let item = WorkItem {
                a_source: if place.is_some() { source::GATHER } else { source::CALLER },
                a_outer: place.unwrap_or(0),
                row: tile.row,
                rows: tile.rows,
                col: tile.col,
                cols: tile.cols,
                sink: sink::STORE,
                out_outer: shard.get(),
                dest: rank.get(),
                ..WorkItem::default()
            };
            list.tile(item, |k| arrivals.awaits_of(first, per_slice, k));
        }
    }
    let (transfers, forwards) = moves(&arrivals, rank, schedule, nodes);
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        split_k_slots: list.split_k_slots,
        items: list.in_order(),
        awaits: list.awaits,
        transfers,
        forwards,
        slots_per_source: 0,
        in_mainloop: 0,
        counters: 0,
        flattened: false,
        nodes,
    }
}

/// What is awaited of each group: of one shard chunk by chunk, and so of several that come by chunk,
/// of others slice by slice.
fn awaits(list: &mut Items, arrivals: &Arrivals, rank: Rank, schedule: &Schedule, nodes: Nodes) {
    for group in schedule.groups(nodes.world()) {
        let pieces = group.clone().filter_map(|step| {
            let shard = nodes.after(rank, step);
            Some((shard.place_at(rank)?, brought_by(shard, rank, nodes)))
        });
        let chunks = || 0..arrivals.chunks();
        let slices = || 0..arrivals.slices();
        let piece = |(place, by), chunk, slice| arrivals.await_piece(place, by, chunk, slice);
        if group.len() > 1 && schedule.is_chunk_ordered(&group, arrivals.slices()) {
            list.awaits.extend(chunks().flat_map(|chunk| pieces.clone().map(move |shard| piece(shard, chunk, 0))));
        } else if group.len() == 1 {
            let of = |shard| chunks().flat_map(move |chunk| slices().map(move |slice| piece(shard, chunk, slice)));
            list.awaits.extend(pieces.flat_map(of));
        } else {
            let of = |slice| pieces.clone().flat_map(move |shard| chunks().map(move |chunk| piece(shard, chunk, slice)));
            list.awaits.extend(slices().flat_map(of));
        }
    }
}

/// Who brings `shard` to `rank`: its owner, or the intra-node peer on its rail.
fn brought_by(shard: Rank, rank: Rank, nodes: Nodes) -> Rank {
    if nodes.together(shard, rank) || nodes.on_one_rail(shard, rank) {
        shard
    } else {
        nodes.rank(nodes.node_of(rank), nodes.local_of(shard))
    }
}

/// The own shard to every intra-node peer and along the rail, and what comes along the rail to every intra-node peer.
/// Readers of a group want the first slices of all its shards first, those of single shards one
/// chunk after another.
fn moves(arrivals: &Arrivals, rank: Rank, schedule: &Schedule, nodes: Nodes) -> (Vec<Transfer>, Vec<Forward>) {
    let world = nodes.world();
    let direct = || (1..world.get()).filter(|&step| step < nodes.per_node() || step % nodes.per_node() == 0);
    let chunks = || 0..arrivals.chunks();
    let slices = || 0..arrivals.slices();
    let mut pieces = Vec::with_capacity(direct().count() * (arrivals.chunks() * arrivals.slices()) as usize);
    for group in schedule.groups(world) {
        let steps = || direct().filter(|step| group.contains(step));
        if group.len() == 1 {
            pieces.extend(steps().flat_map(|step| chunks().flat_map(move |chunk| slices().map(move |slice| (step, chunk, slice)))));
        } else {
            // what goes to several readers side by side, so that a mover can load it once
            pieces.extend(slices().flat_map(|slice| chunks().flat_map(move |chunk| steps().map(move |step| (step, chunk, slice)))));
        }
    }
    // No rank moves anything to itself.
    let transfer = |shard: Rank, dest: Rank, (step, chunk, slice)| {
        let place = shard.place_at(dest)?;
        Some(arrivals.transfer((dest, step), place, chunk, slice))
    };
    let transfers = pieces.iter().filter_map(|&piece| transfer(rank, nodes.before(rank, piece.0), piece)).collect();
    // In the order in which they come: that of the rounds, as all ranks send alike.
    pieces.retain(|&(step, ..)| step >= nodes.per_node());
    pieces.sort_by_key(|&(_, chunk, _)| chunk);
    let forwards = pieces.iter().flat_map(|&(step, chunk, slice)| {
        let shard = nodes.after(rank, step);
        (1..nodes.per_node()).filter_map(move |turn| {
            let from = shard.place_at(rank)?;
            let to = transfer(shard, nodes.before(rank, turn), (step + turn, chunk, slice))?;
            let awaits = Await { k_step: 0, ..arrivals.await_piece(from, shard, chunk, slice) };
            Some(Forward { from, awaits, to })
        })
    });
    (transfers, forwards.collect())
}
