//! The program of AllGather-GEMM: own shard first, then the peers' in the order in which they arrive; the shards of a band side by side,
//! from the moment on which all their rows are there.
//!
//! Invariant: rank `r` works on sources `r`, `r + 1`, `r + 2`, ... and sends its shard to `r - 1`, `r - 2`, ..., so the mover step that
//! brings a shard is the step at which it is worked on, and at one step every rank writes to another destination.

use super::{Await, Schedule, TileProgram, Transfer, WorkItem, sink, source};
use crate::tile::TileGrid;
use crate::{Problem, Rank};

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, tiles: u32) -> TileProgram {
    let world = problem.world();
    let grid = TileGrid::of_shard(problem, schedule.tile);
    let blocks_per_chunk = schedule.chunk_of(grid.row_blocks());
    let chunks = grid.row_blocks().div_ceil(blocks_per_chunk);
    let chunk_rows = |chunk: u32| {
        let first = chunk * blocks_per_chunk * schedule.tile.m;
        (first, (blocks_per_chunk * schedule.tile.m).min(problem.m_shard() - first))
    };

    let mut items = Vec::with_capacity((world.get() * tiles) as usize);
    let mut awaits = Vec::with_capacity((world.peers() * chunks) as usize);
    let mut transfers = Vec::with_capacity((world.peers() * chunks) as usize);
    for (tile, step) in schedule.in_bands(grid, 0..world.get()) {
        let shard = rank.after(step, world);
        let place = shard.place_at(rank);
        let chunk = tile.row / schedule.tile.m / blocks_per_chunk;
        // The await list is in the order of steps, without the own shard. A shard by itself is begun chunk by chunk. The tiles of a band read the
        // same weights: begun at different times they would each read them from memory, so all of them, own ones too, await the whole band.
        let band = schedule.band_of(step, world);
        let (await_first, await_count) = if band.len() > 1 {
            let first = band.start.max(1);
            ((first - 1) * chunks, (band.end - first) * chunks)
        } else if place.is_some() {
            ((step - 1) * chunks + chunk, 1)
        } else {
            (0, 0)
        };
        items.push(WorkItem {
            a_source: if place.is_some() { source::GATHER } else { source::CALLER },
            a_outer: place.unwrap_or(0),
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            sink: sink::STORE,
            out_outer: shard.get(),
            dest: rank.get(),
            await_first,
            await_count,
            k_steps: problem.k_local().div_ceil(schedule.tile.k),
            ..WorkItem::default()
        });
    }
    for step in 1..world.get() {
        let shard = rank.after(step, world);
        if let Some(place) = shard.place_at(rank) {
            awaits.extend((0..chunks).map(|chunk| Await { signal: place * chunks + chunk, peer: shard.get(), k_step: 0 }));
        }
        let dest = rank.before(step, world);
        if let Some(place) = rank.place_at(dest) {
            transfers.extend((0..chunks).map(|chunk| {
                let (row, rows) = chunk_rows(chunk);
                Transfer { dest: dest.get(), place, row, rows, col: 0, cols: problem.k_local(), raise: place * chunks + chunk, step }
            }));
        }
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        items,
        awaits,
        transfers,
        slots_per_source: 0,
        signals: world.peers() * chunks,
        counters: 0,
        part_slots: 0,
        stacked: false,
    }
}
