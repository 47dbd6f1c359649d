//! The program of AllGather-GEMM with flattened rows: all rows are one matrix, which the gather
//! buffer holds in rank order.
//!
//! Invariant: the own shard is moved and awaited like any other, at step 0, so every tile reads the
//! gather buffer alone. Row blocks of a raster group await each other's rows. The last group also
//! awaits shards without rows, so that no call ends before all ranks are in it.

use super::items::Items;
use super::shard_cut::ShardCut;
use crate::layout::RowLayout;
use crate::program::{RowSource, Schedule, Sink, TileProgram, Transfer, WorkItem};
use crate::tile::TileGrid;
use crate::{Nodes, Problem, Rank};

pub(super) fn build(
    problem: &Problem,
    rank: Rank,
    schedule: &Schedule,
    nodes: Nodes,
) -> TileProgram {
    let world = problem.world();
    let m = problem.m();
    let cut = ShardCut::new(problem, schedule);
    let slices = cut.slices();
    let grid = TileGrid::of_all_rows(problem, rank, schedule.tile);
    let mut list =
        Items::new(problem, rank, schedule, nodes, world.get() * cut.chunks() * slices, 0);

    // By raster group: its first await, and its awaits for each slice.
    let together = rows_awaited_together(schedule, &grid);
    let mut awaited = Vec::new();
    for first_row in (0..m).step_by(together as usize) {
        let rows = first_row..first_row.saturating_add(together).min(m);
        // In order of arrival.
        let pieces = || {
            (0..world.get()).map(|step| rank.after(step, world)).flat_map(|shard| {
                let own = problem.shard_rows(shard);
                let (first, end) = (rows.start.max(own.start), rows.end.min(own.end));
                let chunks = if first < end {
                    cut.chunks_of(first - own.start..end - own.start)
                } else if own.is_empty() && rows.end == m {
                    0..1
                } else {
                    0..0
                };
                chunks.map(move |chunk| (shard, chunk))
            })
        };
        awaited.push((list.next_await(), pieces().count() as u32));
        for slice in 0..slices {
            list.awaits.extend(
                pieces().map(|(shard, chunk)| cut.await_piece(shard.get(), shard, chunk, slice)),
            );
        }
    }
    for tile in grid.order(schedule.raster_group) {
        let (first, per_slice) = awaited[(tile.row / together) as usize];
        let item = WorkItem {
            a_source: RowSource::Gather,
            row: tile.row,
            rows: tile.rows,
            col: tile.col,
            cols: tile.cols,
            sink: Sink::Store,
            dest: rank.get(),
            ..WorkItem::default()
        };
        list.tile(item, |k| cut.awaits_of(first, per_slice, k));
    }
    TileProgram {
        problem: *problem,
        rank,
        tile: schedule.tile,
        signals: list.signals(),
        split_k_slots: list.split_k_slots,
        items: list.in_order(),
        awaits: list.awaits,
        transfers: transfers(&cut, problem, rank),
        forwards: Vec::new(),
        slots_per_source: 0,
        in_mainloop: 0,
        counters: 0,
        rows: RowLayout::Flattened,
        nodes,
    }
}

/// Rows of a raster group. They await the same signals, since the tiles of a group share a pass
/// over `w`.
fn rows_awaited_together(schedule: &Schedule, grid: &TileGrid) -> u32 {
    schedule.tile.m.saturating_mul(schedule.raster_group.min(grid.row_blocks()).max(1))
}

/// Entries of the await list: for every slice, the chunks that each raster group overlaps.
pub(super) fn awaits(problem: &Problem, schedule: &Schedule, cut: &ShardCut) -> u64 {
    let grid = TileGrid::of_all_rows(problem, Rank::new(0), schedule.tile);
    let together = rows_awaited_together(schedule, &grid);
    // Groups that overlap a chunk of `shard`.
    let groups = |shard: Rank, chunk| {
        let (rows, start) = (cut.rows_of(shard, chunk), problem.shard_rows(shard).start);
        if rows.is_empty() {
            0
        } else {
            (start + rows.end - 1) / together - (start + rows.start) / together + 1
        }
    };
    let of_shard =
        |shard: Rank| match (0..cut.chunks()).map(|chunk| u64::from(groups(shard, chunk))).sum() {
            // The last group awaits a shard without rows.
            0 => 1,
            awaited => awaited,
        };
    problem.world().ranks().map(of_shard).sum::<u64>() * u64::from(cut.slices())
}

/// Moves the own shard to every rank, itself first. First slices come first: every reader needs
/// those of all shards.
fn transfers(cut: &ShardCut, problem: &Problem, rank: Rank) -> Vec<Transfer> {
    let world = problem.world();
    let mut list = Vec::with_capacity((world.get() * cut.chunks() * cut.slices()) as usize);
    for slice in 0..cut.slices() {
        for chunk in 0..cut.chunks() {
            list.extend((0..world.get()).map(|step| {
                cut.transfer(rank, rank.before(step, world), step, rank.get(), chunk, slice)
            }));
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

    /// Rank 1 has all rows of the second of two row blocks.
    #[test]
    fn row_blocks_of_a_raster_group_await_the_same() {
        let two = WorldSize::new(2).expect("ranks");
        let problem = Problem::new(OpKind::AllGatherGemm, 258, 512, 512, DType::Bf16, two)
            .expect("a valid problem");
        let awaited = |group| {
            let schedule = Schedule {
                raster_group: group,
                k_slices: 2,
                rows: RowLayout::Flattened,
                ..Schedule::of(TileShape::new(136, 256, 64))
            };
            let program =
                TileProgram::build(&problem, Rank::new(1), &schedule).expect("a valid schedule");
            let mut peers: Vec<Vec<u32>> = program
                .items
                .iter()
                .map(|item| program.awaits_of(item).iter().map(|entry| entry.peer).collect())
                .collect();
            peers.dedup();
            peers
        };
        assert_eq!(awaited(2), [[1, 0, 1, 0]], "both shards, slice by slice");
        assert_eq!(awaited(1), [vec![1, 0, 1, 0], vec![1, 1]]);
    }

    proptest! {
        #[test]
        fn awaits_of_rows_are_counted(
            world in 2..=8_u32,
            m in 1..=480_usize,
            tile_m in 1..=40_u32,
            chunk in 1..=4_u32,
            k_slices in 1..=6_u32,
            group in 1..=5_u32,
        ) {
            let world = WorldSize::new(world).expect("a world size");
            let problem =
                Problem::new(OpKind::AllGatherGemm, m, 8 * world.index(), 40, DType::Bf16, world)
                    .expect("a valid problem");
            let schedule = Schedule {
                chunk: Chunk::Tiles(chunk),
                raster_group: group,
                k_slices,
                rows: RowLayout::Flattened,
                ..Schedule::of(TileShape::new(tile_m, 8, 8))
            };
            let counted = awaits(&problem, &schedule, &ShardCut::new(&problem, &schedule));
            for rank in world.ranks() {
                let program = TileProgram::build(&problem, rank, &schedule).expect(
                    "a valid schedule",
                );
                prop_assert_eq!(program.awaits.len() as u64, counted);
            }
        }
    }
}
