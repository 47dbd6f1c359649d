//! Random plans for ranks whose executor takes any tile.

use flux_core::TileShape;
use flux_core::plan::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
use proptest::prelude::*;

/// Plans of every kind with such row mappings and communication modes, whether all of it has an
/// effect for the problem or not.
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
    let chunk = prop_oneof![Just(Chunk::Shard), (1..=14_u32).prop_map(Chunk::Tiles)];
    (tile, rows, k, chunk, 1..5_u32, comm).prop_map(|(tile, rows, k, chunk, k_slices, comm)| Plan {
        tile,
        rows,
        k,
        chunk,
        k_slices,
        comm,
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
