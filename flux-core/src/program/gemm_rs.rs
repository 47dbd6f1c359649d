//! The program of GEMM-ReduceScatter: the peers' shards first, those of a band side by side, own shard last.
//!
//! Invariant: rank `r` works for owners `r + 1`, `r + 2`, ..., `r`, with the same order of tiles in every shard. So at one step every
//! rank sends to another owner, and what an own tile awaits was sent at least one shard earlier.

use super::{Await, NONE, Schedule, TileProgram, WorkItem, sink, source};
use crate::tile::TileGrid;
use crate::{Problem, Rank};

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, tiles: u32) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let tiles_per_chunk = schedule.chunk_of(tiles);
    let chunks = tiles.div_ceil(tiles_per_chunk);
    let tiles_in = |chunk: u32| tiles_per_chunk.min(tiles - chunk * tiles_per_chunk);

    let peers: Vec<Rank> = world.ranks().filter(|&peer| peer != rank).collect();
    let mut awaits = Vec::with_capacity((world.peers() * chunks) as usize);
    for chunk in 0..chunks {
        awaits.extend((0..).zip(&peers).map(|(place, peer)| Await { signal: place * chunks + chunk, peer: peer.get(), k_step: 0 }));
    }

    let mut items = Vec::with_capacity((world.get() * tiles) as usize);
    let mut taken = vec![0; world.index()];
    let peers_first = schedule.in_bands(grid, 1..world.get());
    let own_last = grid.order(schedule.raster).map(|tile| (tile, world.get()));
    for (tile, step) in peers_first.chain(own_last) {
        let owner = rank.after(step, world);
        let index = taken[owner.index()];
        taken[owner.index()] += 1;
        let chunk = index / tiles_per_chunk;
        let item = WorkItem {
            a_source: source::CALLER,
            a_outer: owner.get(),
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            dest: owner.get(),
            k_steps: problem.k_local().div_ceil(schedule.tile.k),
            ..WorkItem::default()
        };
        items.push(match (rank.place_at(owner), owner.place_at(rank)) {
            (Some(place), Some(owner_place)) => WorkItem {
                sink: sink::SEND,
                slot: place * tiles + index,
                raise: place * chunks + chunk,
                counter: if tiles_in(chunk) > 1 { owner_place * chunks + chunk } else { NONE },
                raise_after: tiles_in(chunk),
                ..item
            },
            _ if peers.is_empty() => WorkItem { sink: sink::STORE, ..item },
            _ => WorkItem {
                sink: sink::REDUCE,
                slot: index,
                partials: world.peers(),
                late_first: chunk * world.peers(),
                late_count: world.peers(),
                ..item
            },
        });
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        items,
        awaits: if peers.is_empty() { Vec::new() } else { awaits },
        transfers: Vec::new(),
        slots_per_source: tiles,
        signals: world.peers() * chunks,
        counters: if tiles_per_chunk > 1 { world.peers() * chunks } else { 0 },
        part_slots: 0,
        stacked: false,
    }
}
