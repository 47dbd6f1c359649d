//! The program of AllGather-GEMM whose tiles span shards: all rows as one matrix, which the gather buffer holds in rank order.
//!
//! Invariant: the own shard is moved and awaited like any other, at step 0, so every tile reads the gather buffer alone.

use super::along_k::AlongK;
use super::arrivals::Arrivals;
use super::items::Items;
use super::{Schedule, TileProgram, Transfer, WorkItem, sink, source};
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank};

pub(super) fn build(problem: &Problem, rank: Rank, schedule: &Schedule, nodes: Nodes) -> TileProgram {
    let world = problem.world();
    let (m, tile_m) = (problem.m(), schedule.tile.m);
    let arrivals = Arrivals::new(problem, schedule);
    let slices = arrivals.slices();
    let grid = TileGrid::new(m, problem.n_local(), schedule.tile);
    let mut list = Items::new(
        rank,
        grid.row_blocks() * grid.col_blocks(),
        AlongK::new(problem, schedule),
        schedule,
        world.get() * arrivals.chunks() * slices,
    )
    .shared(schedule.shared_tiles(problem));

    // by row block: the first entry of its await list, and entries for each slice
    let mut awaited = Vec::new();
    for first_row in (0..m).step_by(tile_m as usize) {
        let rows = first_row..first_row.saturating_add(tile_m).min(m);
        // in the order in which shards arrive
        let pieces = || {
            (0..world.get()).map(|step| rank.after(step, world)).flat_map(|shard| {
                let own = problem.shard_rows(shard);
                let (first, end) = (rows.start.max(own.start), rows.end.min(own.end));
                let chunks = if first < end { arrivals.chunks_of(first - own.start..end - own.start) } else { 0..0 };
                chunks.map(move |chunk| (shard, chunk))
            })
        };
        awaited.push((list.next_await(), pieces().count() as u32));
        for slice in 0..slices {
            list.awaits.extend(pieces().map(|(shard, chunk)| arrivals.await_piece(shard.get(), shard, chunk, slice)));
        }
    }
    for tile in grid.order(schedule.raster) {
        let (first, per_slice) = awaited[(tile.row / tile_m) as usize];
        let item = WorkItem {
            a_source: source::GATHER,
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            sink: sink::STORE,
            dest: rank.get(),
            ..WorkItem::default()
        };
        list.tile(item, |k| arrivals.awaits_of(first, per_slice, k));
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        part_slots: list.part_slots,
        items: list.in_order(),
        awaits: list.awaits,
        transfers: transfers(&arrivals, problem, rank),
        forwards: Vec::new(),
        slots_per_source: 0,
        early: 0,
        counters: 0,
        stacked: true,
        nodes,
    }
}

/// Entries of the await list that announce rows: of every slice, the chunks that each row block reads.
pub(super) fn awaits(problem: &Problem, schedule: &Schedule, arrivals: &Arrivals) -> u64 {
    let tile_m = schedule.tile.m;
    // A row block reads one chunk, and one more for each that begins within it. Chunks are whole row blocks of their shard: all of them begin at borders of tiles, or none.
    let begins_within = |shard: &Rank| !problem.shard_rows(*shard).start.is_multiple_of(tile_m);
    let shards = problem.world().ranks().filter(begins_within).count() as u64;
    (u64::from(problem.m().div_ceil(tile_m)) + shards * u64::from(arrivals.chunks())) * u64::from(arrivals.slices())
}

/// The own shard to every rank, the own one first: every reader's first steps along `k` need the first slice of all shards.
fn transfers(arrivals: &Arrivals, problem: &Problem, rank: Rank) -> Vec<Transfer> {
    let world = problem.world();
    let mut list = Vec::with_capacity((world.get() * arrivals.chunks() * arrivals.slices()) as usize);
    for slice in 0..arrivals.slices() {
        for chunk in 0..arrivals.chunks() {
            list.extend((0..world.get()).map(|step| arrivals.transfer((rank.before(step, world), step), rank.get(), chunk, slice)));
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Chunk;
    use crate::{DType, OpKind, TileShape, WorldSize};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn awaits_of_rows_are_counted(world in 2..=8_u32, m_shard in 1..=60_usize, tile_m in 1..=40_u32, chunk in 1..=4_u32, k_chunks in 1..=6_u32) {
            let world = WorldSize::new(world).expect("a world size");
            let problem = Problem::new(OpKind::AllGatherGemm, m_shard * world.index(), 8 * world.index(), 40, DType::Bf16, world).expect("a valid problem");
            let schedule = Schedule { chunk: Chunk::Tiles(chunk), k_chunks, stack: true, ..Schedule::of(TileShape::new(tile_m, 8, 8)) };
            let counted = awaits(&problem, &schedule, &Arrivals::new(&problem, &schedule));
            for rank in world.ranks() {
                let program = TileProgram::build(&problem, rank, &schedule).expect("a valid schedule");
                prop_assert_eq!(program.awaits.len() as u64, counted);
            }
        }
    }
}
