//! Random schedules for the suites of several crates, each of which includes this file: every knob, whether it means something for the problem or not.

use flux_core::TileShape;
use flux_core::program::{Chunk, Lent, Schedule};
use flux_core::tile::Raster;
use proptest::prelude::*;

/// Small ones, of these tiles.
pub(crate) fn schedules(tiles: impl Strategy<Value = TileShape>) -> impl Strategy<Value = Schedule> {
    let chunk = prop_oneof![Just(Chunk::Shard), (1..6_u32).prop_map(Chunk::Tiles)];
    let raster = (1..4_u32).prop_flat_map(|group| prop::sample::select(Raster::each(group).to_vec()));
    let lent = (0..4_u32, 0..20_u32).prop_map(|(first, last)| Lent { first, last });
    let shares = (prop_oneof![Just(1), 2..12_u32], lent);
    let along_k = (1..5_u32, 1..5_u32, shares, any::<bool>(), 0..4_u32);
    (tiles, chunk, raster, (1..4_u32, 0..3_u32, 0..3_u32), along_k).prop_map(
        |(tile, chunk, raster, (band, alone, by_chunk), (k_chunks, splits, (shares, lent), stack, early))| Schedule {
            tile,
            chunk,
            raster,
            band,
            alone,
            by_chunk,
            k_chunks,
            splits,
            shares,
            stack,
            early,
            lent,
        },
    )
}
