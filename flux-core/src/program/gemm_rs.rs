//! The program of GEMM-ReduceScatter: the peers' shards first, those of a band side by side, own shard last.
//!
//! Invariant: rank `r` works for owners `r + 1`, `r + 2`, ..., `r`, with the same order of tiles in every shard. So at one step every
//! rank sends to another owner, and what an own tile awaits was sent at least one shard earlier.

use super::along_k::AlongK;
use super::items::Items;
use super::{Await, NONE, Schedule, TileProgram, WorkItem, sink, source};
use crate::tile::TileGrid;
use crate::{Problem, Rank};

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let tiles = grid.row_blocks() * grid.col_blocks();
    let tiles_per_chunk = schedule.chunk_of(tiles);
    let chunks = tiles.div_ceil(tiles_per_chunk);
    let tiles_in = |chunk: u32| tiles_per_chunk.min(tiles - chunk * tiles_per_chunk);

    let peers: Vec<Rank> = world.ranks().filter(|&peer| peer != rank).collect();
    let mut list = Items::new(rank, world.get() * tiles, AlongK::new(problem, schedule), schedule, world.peers() * chunks);
    for chunk in 0..chunks {
        list.awaits.extend((0..).zip(&peers).map(|(place, peer)| Await { signal: place * chunks + chunk, peer: peer.get(), k_step: 0 }));
    }

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
            ..WorkItem::default()
        };
        let item = match (rank.place_at(owner), owner.place_at(rank)) {
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
        };
        list.tile(item, |_| (0, 0, 0));
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        part_slots: list.part_slots,
        items: list.all,
        awaits: list.awaits,
        transfers: Vec::new(),
        slots_per_source: tiles,
        counters: if tiles_per_chunk > 1 { world.peers() * chunks } else { 0 },
        stacked: false,
    }
}
