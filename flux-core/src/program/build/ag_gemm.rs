//! The program of AllGather-GEMM: the own shard first, then the peers' shards in order of arrival.
//!
//! Invariant: rank `r` works on sources `r`, `r + 1`, `r + 2`, ... and sends its shard to `r - 1`,
//! `r - 2`, ... So a shard arrives at the step at which it is worked on, and at one step every rank
//! writes to another destination. The steps go around the own node first, then around each other
//! node from the rank of the own rail on, which brings its shard across.

use super::items::Items;
use super::shard_cut::ShardCut;
use crate::layout::RowLayout;
use crate::program::{Await, Forward, RowSource, Schedule, Sink, TileProgram, Transfer, WorkItem};
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank};

pub(super) fn build(
    problem: &Problem,
    rank: Rank,
    schedule: &Schedule,
    nodes: Nodes,
) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard_at(problem, rank, schedule.tile);
    let cut = ShardCut::new(problem, schedule);
    let (chunks, slices) = (cut.chunks(), cut.slices());
    let mut list = Items::new(problem, rank, schedule, nodes, world.peers() * chunks * slices, 0);
    awaits(&mut list, &cut, rank, schedule, nodes);

    // By step: the owner, its rows, and its place in the gather buffer.
    let shards: Vec<_> = (0..world.get())
        .map(|step| nodes.after(rank, step))
        .map(|owner| (owner, problem.shard_rows(owner).len() as u32, owner.place_at(rank)))
        .collect();
    for group in schedule.groups(world) {
        let chunk_ordered = schedule.is_chunk_ordered(&group, slices);
        for (tile, step) in schedule.gather_order(grid, group.clone(), slices) {
            let (shard, shard_rows, place) = shards[step as usize];
            let tile = tile.above(shard_rows);
            // A tile of a shard without rows stays: it awaits the rank's signal, so that no call
            // ends before all ranks are in it.
            if tile.rows == 0 && shard_rows > 0 {
                continue;
            }
            // The await list is in the order of groups, without the own shard. A single shard
            // begins chunk by chunk. The tiles of a larger group share a pass over `w`, so all of
            // them, own ones too, await the whole group, or a chunk of each of its shards.
            let first_step = group.start.max(1);
            let before_group = (first_step - 1) * chunks * slices;
            let chunk = || cut.chunks_of(tile.row..tile.row + tile.rows).start;
            let (first, per_slice) = if group.len() > 1 && chunk_ordered {
                let shards = group.end - first_step;
                (before_group + chunk() * shards, shards)
            } else if group.len() > 1 {
                (before_group, (group.end - first_step) * chunks)
            } else if place.is_some() {
                (before_group + chunk() * slices, 1)
            } else {
                (0, 0)
            };
            let item = WorkItem {
                a_source: if place.is_some() { RowSource::Gather } else { RowSource::Caller },
                a_outer: place.unwrap_or(0),
                row: tile.row,
                rows: tile.rows,
                col: tile.col,
                cols: tile.cols,
                sink: Sink::Store,
                out_outer: shard.get(),
                dest: rank.get(),
                ..WorkItem::default()
            };
            list.tile(item, |k| cut.awaits_of(first, per_slice, k));
        }
    }
    let (transfers, forwards) = moves(&cut, rank, schedule, nodes);
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
        rows: RowLayout::PerShard,
        nodes,
    }
}

/// The awaits of each group: chunk by chunk for single shards and chunk-ordered groups, slice by
/// slice for others.
fn awaits(list: &mut Items, cut: &ShardCut, rank: Rank, schedule: &Schedule, nodes: Nodes) {
    for group in schedule.groups(nodes.world()) {
        let pieces = group.clone().filter_map(|step| {
            let shard = nodes.after(rank, step);
            Some((shard.place_at(rank)?, brought_by(shard, rank, nodes)))
        });
        let chunks = || 0..cut.chunks();
        let slices = || 0..cut.slices();
        let piece = |(place, by), chunk, slice| cut.await_piece(place, by, chunk, slice);
        if group.len() > 1 && schedule.is_chunk_ordered(&group, cut.slices()) {
            list.awaits.extend(
                chunks().flat_map(|chunk| pieces.clone().map(move |shard| piece(shard, chunk, 0))),
            );
        } else if group.len() == 1 {
            let of = |shard| {
                chunks()
                    .flat_map(move |chunk| slices().map(move |slice| piece(shard, chunk, slice)))
            };
            list.awaits.extend(pieces.flat_map(of));
        } else {
            let of = |slice| {
                pieces
                    .clone()
                    .flat_map(move |shard| chunks().map(move |chunk| piece(shard, chunk, slice)))
            };
            list.awaits.extend(slices().flat_map(of));
        }
    }
}

/// The rank that brings `shard` to `rank`: its owner, or the intra-node peer on its rail.
fn brought_by(shard: Rank, rank: Rank, nodes: Nodes) -> Rank {
    if nodes.together(shard, rank) || nodes.on_one_rail(shard, rank) {
        shard
    } else {
        nodes.rank(nodes.node_of(rank), nodes.local_of(shard))
    }
}

/// Moves the own shard to every intra-node peer and along the rail, and forwards shards that come
/// along the rail to every intra-node peer. Groups get first slices first, single shards chunks in
/// order.
fn moves(
    cut: &ShardCut,
    rank: Rank,
    schedule: &Schedule,
    nodes: Nodes,
) -> (Vec<Transfer>, Vec<Forward>) {
    let world = nodes.world();
    let direct =
        || (1..world.get()).filter(|&step| step < nodes.per_node() || step % nodes.per_node() == 0);
    let chunks = || 0..cut.chunks();
    let slices = || 0..cut.slices();
    let mut pieces = Vec::with_capacity(direct().count() * (cut.chunks() * cut.slices()) as usize);
    for group in schedule.groups(world) {
        let steps = || direct().filter(|step| group.contains(step));
        if group.len() == 1 {
            pieces.extend(steps().flat_map(|step| {
                chunks().flat_map(move |chunk| slices().map(move |slice| (step, chunk, slice)))
            }));
        } else {
            // A mover loads a piece for several readers once.
            pieces.extend(slices().flat_map(|slice| {
                chunks().flat_map(move |chunk| steps().map(move |step| (step, chunk, slice)))
            }));
        }
    }
    // No rank moves anything to itself.
    let transfer = |shard: Rank, dest: Rank, (step, chunk, slice)| {
        let place = shard.place_at(dest)?;
        Some(cut.transfer(shard, dest, step, place, chunk, slice))
    };
    let transfers = pieces
        .iter()
        .filter_map(|&piece| transfer(rank, nodes.before(rank, piece.0), piece))
        .collect();
    // In order of arrival, which is that of the rounds: all ranks send alike.
    pieces.retain(|&(step, ..)| step >= nodes.per_node());
    pieces.sort_by_key(|&(_, chunk, _)| chunk);
    let forwards = pieces.iter().flat_map(|&(step, chunk, slice)| {
        let shard = nodes.after(rank, step);
        (1..nodes.per_node()).filter_map(move |local_step| {
            let from = shard.place_at(rank)?;
            let to =
                transfer(shard, nodes.before(rank, local_step), (step + local_step, chunk, slice))?;
            let awaits = Await { k_step: 0, ..cut.await_piece(from, shard, chunk, slice) };
            Some(Forward { from, awaits, to })
        })
    });
    (transfers, forwards.collect())
}
