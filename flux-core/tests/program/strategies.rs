//! Problems and schedules that are valid by construction. Strategies of calls are boxed: unboxed
//! ones take most of the time in which these tests are compiled.

use flux_core::layout::RowLayout;
use flux_core::problem::MAX_WEIGHTS;
use flux_core::program::{Chunk, Schedule, TileProgram};
use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
use proptest::prelude::*;
use std::fmt::Write;
use std::ops::RangeInclusive;

/// The programs of all ranks of one call. A failed property prints them.
#[derive(Clone)]
pub(crate) struct Call(pub(crate) Vec<TileProgram>);

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_char('\n')?;
        self.0.iter().try_for_each(|program| write!(f, "{program}"))
    }
}

/// The programs of all ranks.
pub(crate) fn build(problem: &Problem, schedule: &Schedule) -> Call {
    Call(
        problem
            .world()
            .ranks()
            .map(|rank| TileProgram::build(problem, rank, schedule).unwrap())
            .collect(),
    )
}

/// An extent of `blocks` blocks, the last with 1 to `block` elements.
fn extent(
    blocks: RangeInclusive<u32>,
    block: RangeInclusive<u32>,
) -> impl Strategy<Value = (u32, u32)> {
    (blocks, block).prop_flat_map(|(blocks, block)| {
        (1..=block).prop_map(move |tail| ((blocks - 1) * block + tail, block))
    })
}

/// Chunks from one tile to a whole shard, and beyond.
pub(crate) fn chunks() -> impl Strategy<Value = Chunk> {
    prop_oneof![Just(Chunk::Shard), (1..=14_u32).prop_map(Chunk::Tiles)]
}

/// Calls of `op`: `worlds` ranks, shards of `row_blocks` by `col_blocks` tiles.
pub(crate) fn calls(
    op: OpKind,
    worlds: RangeInclusive<u32>,
    row_blocks: RangeInclusive<u32>,
    col_blocks: RangeInclusive<u32>,
    chunks: impl Strategy<Value = Chunk> + 'static,
) -> BoxedStrategy<Call> {
    calls_in_groups(op, worlds, row_blocks, col_blocks, chunks, 1..=5)
}

/// The same, with groups of `groups` shards.
pub(crate) fn calls_in_groups(
    op: OpKind,
    worlds: RangeInclusive<u32>,
    row_blocks: RangeInclusive<u32>,
    col_blocks: RangeInclusive<u32>,
    chunks: impl Strategy<Value = Chunk> + 'static,
    groups: RangeInclusive<u32>,
) -> BoxedStrategy<Call> {
    let raster_group =
        (1..=6_u32).prop_flat_map(|group| prop::sample::select(vec![1, group, u32::MAX]));
    (worlds, extent(row_blocks, 1..=160), extent(col_blocks, 1..=40), chunks, raster_group, groups)
        .prop_map(move |(world, (m_shard, tile_m), (n8, tile_n8), chunk, raster_group, group)| {
            let world = WorldSize::new(world).unwrap();
            let (n, k) = match op {
                OpKind::AllGatherGemm => (8 * n8 * world.get(), 8),
                OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (8 * n8, 8 * world.get()),
            };
            let (m, n, k) = (m_shard as usize * world.index(), n as usize, k as usize);
            let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
            build(
                &problem,
                &Schedule {
                    chunk,
                    raster_group,
                    group,
                    ..Schedule::of(TileShape::new(tile_m, 8 * tile_n8, 64))
                },
            )
        })
        .boxed()
}

/// Calls of AllGather-GEMM and GEMM-ReduceScatter with one item a tile, and whole rows announced.
pub(crate) fn plain_calls(worlds: RangeInclusive<u32>) -> BoxedStrategy<Call> {
    let of = move |op| calls(op, worlds.clone(), 1..=4, 1..=3, chunks());
    prop_oneof![of(OpKind::AllGatherGemm), of(OpKind::GemmReduceScatter)].boxed()
}

/// Fields of a schedule besides tile, chunk, raster and group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Knobs {
    pub(crate) k_slices: u32,
    pub(crate) split_k: u32,
    pub(crate) stream_k_workers: u32,
    pub(crate) rows: RowLayout,
    pub(crate) in_mainloop: u32,
    pub(crate) prologue: u32,
    pub(crate) chunk_ordered: u32,
    pub(crate) own_lag: u32,
}

impl Knobs {
    /// One item a tile, whole rows announced, one group after another.
    pub(crate) const PLAIN: Self = Self {
        k_slices: 1,
        split_k: 1,
        stream_k_workers: 1,
        rows: RowLayout::PerShard,
        in_mainloop: 0,
        prologue: 0,
        chunk_ordered: 0,
        own_lag: 0,
    };
}

/// All values of the knobs.
pub(crate) fn knobs() -> impl Strategy<Value = Knobs> {
    // Stream-K has no effect with split-K.
    let parts = prop_oneof![(Just(1), Just(1)), (2..=4_u32, Just(1)), (Just(1), 2..=12_u32)];
    let rows = prop::sample::select(vec![
        RowLayout::PerShard,
        RowLayout::Flattened,
        RowLayout::FlattenedTwoExchanges,
    ]);
    let own_lags = prop_oneof![0..=9_u32, Just(u32::MAX)];
    (1..=6_u32, parts, rows, 0..=6_u32, 0..=3_u32, 0..=3_u32, own_lags).prop_map(
        |(
            k_slices,
            (split_k, stream_k_workers),
            rows,
            in_mainloop,
            prologue,
            chunk_ordered,
            own_lag,
        )| Knobs {
            k_slices,
            split_k,
            stream_k_workers,
            rows,
            in_mainloop,
            prologue,
            chunk_ordered,
            own_lag,
        },
    )
}

/// Calls of `op` with `k_blocks` steps along `k`; shards have less than a tile as often as several.
pub(crate) fn knob_calls(
    op: OpKind,
    worlds: RangeInclusive<u32>,
    k_blocks: RangeInclusive<u32>,
    knobs: impl Strategy<Value = Knobs> + 'static,
) -> BoxedStrategy<Call> {
    uneven_calls(op, worlds, k_blocks, knobs.boxed(), Just((0, 0)).boxed())
}

/// The same, with fewer rows than equal shards have, and more groups of 8 of what is split:
/// `uneven` has both, modulo the world size.
fn uneven_calls(
    op: OpKind,
    worlds: RangeInclusive<u32>,
    k_blocks: RangeInclusive<u32>,
    knobs: BoxedStrategy<Knobs>,
    uneven: BoxedStrategy<(u32, u32)>,
) -> BoxedStrategy<Call> {
    let raster_group =
        (1..=6_u32).prop_flat_map(|group| prop::sample::select(vec![1, group, u32::MAX]));
    let rows = prop_oneof![(1..=40_u32, 1..=160_u32), extent(1..=3, 1..=40)];
    let order = (chunks(), raster_group, 1..=5_u32);
    // Groups of 8 columns of each further weight, in half of the cases none.
    let further = prop_oneof![
        Just(Vec::new()),
        prop::collection::vec((1..=12_u32, 0..16_u32), 1..MAX_WEIGHTS)
    ];
    (worlds, (rows, uneven, further), extent(1..=3, 1..=6), extent(k_blocks, 1..=4), order, knobs)
        .prop_map(
            move |(
                world,
                ((m_shard, tile_m), (less, more), further),
                (n8, tile_n8),
                (k8, tile_k8),
                (chunk, raster_group, group),
                knobs,
            )| {
                let world = WorldSize::new(world).unwrap();
                let split = |groups, more| 8 * (groups * world.get() + more % world.get());
                let mut columns = vec![if op.reduces() { 8 * n8 } else { split(n8, more) }];
                if !op.reduces() {
                    columns.extend(further.into_iter().map(|(groups, more)| split(groups, more)));
                }
                let (n, k) = (
                    columns.iter().sum::<u32>(),
                    if op.reduces() { split(k8, more) } else { 8 * k8 },
                );
                // Shards differ by a row, or have none.
                let m = m_shard * world.get() - less % world.get();
                let problem =
                    Problem::new(op, m as usize, n as usize, k as usize, DType::Bf16, world)
                        .unwrap()
                        .with_weights(&columns)
                        .unwrap();
                let tile = TileShape::new(tile_m, 8 * tile_n8, 8 * tile_k8);
                let Knobs {
                    k_slices,
                    split_k,
                    stream_k_workers,
                    rows,
                    in_mainloop,
                    prologue,
                    chunk_ordered,
                    own_lag,
                } = knobs;
                build(
                    &problem,
                    &Schedule {
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
                    },
                )
            },
        )
        .boxed()
}

/// Calls of any op, under any schedule, of any `m`; what is split divides by the ranks, or not.
pub(crate) fn any_calls(worlds: RangeInclusive<u32>) -> BoxedStrategy<Call> {
    let either = || prop_oneof![Just(0), 1..16_u32];
    let uneven = (either(), either()).boxed();
    let of = move |op| uneven_calls(op, worlds.clone(), 1..=5, knobs().boxed(), uneven.clone());
    prop_oneof![of(OpKind::AllGatherGemm), of(OpKind::GemmReduceScatter), of(OpKind::GemmAllReduce)]
        .boxed()
}
