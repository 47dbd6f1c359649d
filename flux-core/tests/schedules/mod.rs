//! Random schedules, included by suites of several crates.

use flux_core::TileShape;
use flux_core::layout::RowLayout;
use flux_core::program::{Chunk, Schedule};
use proptest::prelude::*;

/// Schedules with every field, effective or not. `numbers` gives values from a least one on.
pub(crate) fn schedules<N: Strategy<Value = u32> + 'static>(
    tiles: impl Strategy<Value = TileShape>,
    chunks: impl Strategy<Value = Chunk>,
    numbers: impl Fn(u32) -> N,
) -> impl Strategy<Value = Schedule> {
    let raster_group =
        numbers(1).prop_flat_map(|group| prop::sample::select(vec![1, group, u32::MAX]));
    let shards = (numbers(1), numbers(0), numbers(0), numbers(0));
    let stream_k_workers = prop_oneof![Just(1), 2..=12_u32];
    let rows = prop::sample::select(vec![
        RowLayout::PerShard,
        RowLayout::Flattened,
        RowLayout::FlattenedTwoExchanges,
    ]);
    let along_k = (numbers(1), numbers(1), stream_k_workers, rows, numbers(0));
    (tiles, chunks, raster_group, shards, along_k).prop_map(
        |(
            tile,
            chunk,
            raster_group,
            (group, prologue, chunk_ordered, own_lag),
            (k_slices, split_k, stream_k_workers, rows, in_mainloop),
        )| {
            Schedule {
                tile,
                chunk,
                raster_group,
                group,
                prologue,
                chunk_ordered,
                k_slices,
                split_k,
                stream_k_workers,
                rows,
                in_mainloop,
                own_lag,
            }
        },
    )
}

/// Chunks from one tile to a whole shard, and beyond.
pub(crate) fn chunks() -> impl Strategy<Value = Chunk> {
    prop_oneof![Just(Chunk::Shard), (1..=14_u32).prop_map(Chunk::Tiles)]
}
