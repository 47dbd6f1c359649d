//! Random schedules for the suites of several crates, each of which includes this file.

use flux_core::TileShape;
use flux_core::program::{Chunk, Schedule};
use flux_core::tile::Raster;
use proptest::prelude::*;

/// Every knob, whether it means something for the problem or not: of these tiles and chunks, and of
/// `numbers` from the least that a knob may be.
pub(crate) fn schedules<N: Strategy<Value = u32> + 'static>(
    tiles: impl Strategy<Value = TileShape>,
    chunks: impl Strategy<Value = Chunk>,
    numbers: impl Fn(u32) -> N,
) -> impl Strategy<Value = Schedule> {
    let raster = numbers(1).prop_flat_map(|group| prop::sample::select(Raster::each(group).to_vec()));
    let shards = (numbers(1), numbers(0), numbers(0));
    let stream_k = prop_oneof![Just(1), 2..=12_u32];
    let along_k = (numbers(1), numbers(1), stream_k, any::<bool>(), numbers(0));
    (tiles, chunks, raster, shards, along_k).prop_map(
        |(tile, chunk, raster, (group, prologue, chunk_ordered), (k_slices, split_k, stream_k, flattened, in_mainloop))| Schedule {
            tile,
            chunk,
            raster,
            group,
            prologue,
            chunk_ordered,
            k_slices,
            split_k,
            stream_k,
            flattened,
            in_mainloop,
        },
    )
}

/// Chunks from one tile to a whole shard, and beyond.
pub(crate) fn chunks() -> impl Strategy<Value = Chunk> {
    prop_oneof![Just(Chunk::Shard), (1..=14_u32).prop_map(Chunk::Tiles)]
}
