//! Random schedules and plans.

use flux_core::TileShape;
use flux_core::layout::RowLayout;
use flux_core::plan::{CommMode, KSplit, Mover, Plan, RowMapping};
use flux_core::program::{Chunk, Schedule};
use proptest::prelude::*;

/// Schedules with every field, effective or not. `numbers` gives values from a least one on.
pub fn schedules<N: Strategy<Value = u32> + 'static>(
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
pub fn chunks() -> impl Strategy<Value = Chunk> {
    prop_oneof![Just(Chunk::Shard), (1..=14_u32).prop_map(Chunk::Tiles)]
}

/// Plans of every kind for ranks whose executor takes any tile, with such row mappings and
/// communication modes, whether all of it has an effect for the problem or not.
pub fn plans(
    rows: impl Strategy<Value = RowMapping>,
    comm: impl Strategy<Value = CommMode>,
) -> impl Strategy<Value = Plan> {
    let tile = (1..40_u32, 1..40_u32, 1..20_u32).prop_map(|(m, n, k)| TileShape::new(m, n, k));
    let k = prop_oneof![
        Just(KSplit::Whole),
        (2..5_u32).prop_map(KSplit::SplitK),
        Just(KSplit::StreamK)
    ];
    (tile, rows, k, chunks(), 1..5_u32, comm).prop_map(|(tile, rows, k, chunk, k_slices, comm)| {
        Plan { tile, rows, k, chunk, k_slices, comm }
    })
}

/// Shards in groups of any size.
pub fn per_shard() -> impl Strategy<Value = RowMapping> {
    (1..5_u32).prop_map(|group| RowMapping::PerShard { group })
}

/// Every row mapping.
pub fn rows() -> impl Strategy<Value = RowMapping> {
    prop_oneof![per_shard(), Just(RowMapping::Flattened), Just(RowMapping::FlattenedTwoExchanges)]
}

/// Either mover, and messages beside the kernel, of which those that a transport lacks have its own
/// mover in their place.
pub fn side_by_side() -> impl Strategy<Value = CommMode> {
    let movers = [Mover::Kernel, Mover::CopyEngine].map(|mover| CommMode::Fused { mover });
    prop_oneof![
        prop::sample::select(movers.to_vec()),
        (1..5_u32).prop_map(|peers| CommMode::Overlapped { peers })
    ]
}

/// Every communication mode.
pub fn comm_modes() -> impl Strategy<Value = CommMode> {
    prop_oneof![side_by_side(), Just(CommMode::Sequential)]
}
