//! Every variant under every kind of schedule: the product, and the same bits whoever is late.

use super::{Case, OPS, TILE, check, check_across, check_with, problem, schedule};
use crate::common::{World, device, programs, target};
use cudarc::driver::CudaContext;
use flux_core::layout::RowLayout;
use flux_core::program::{Chunk, Schedule, TileProgram};
use flux_core::signal::Epoch;
use flux_core::{DType, Nodes, OpKind, Partials, Problem, Rank, WorldSize};
use flux_kernels::Variant;
use flux_kernels::cuda::Pace;
use flux_kernels::harness::{Fill, Seeds};
use std::sync::Arc;

/// Every variant on every case.
fn check_all_variants(context: &Arc<CudaContext>, cases: &[Case]) {
    for op in OPS {
        for dtype in [DType::Bf16, DType::F16] {
            for tile in target(context).generation.tiles(DType::Bf16.into()) {
                for &(m, n, k, world, chunk) in cases {
                    check(context, problem(op, m, n, k, dtype, world), &schedule(tile, chunk));
                }
            }
        }
    }
}

#[test]
fn relays_add_what_their_node_peers_send_and_send_the_sum() {
    let Some(context) = device("relays_add_what_their_node_peers_send_and_send_the_sum") else {
        return;
    };
    for dtype in [DType::Bf16, DType::F16] {
        for tile in target(&context).generation.tiles(DType::Bf16.into()) {
            for (count, world, chunk, split_k) in
                [(2, 4, Chunk::Tiles(1), 1), (2, 4, Chunk::Shard, 2), (3, 6, Chunk::Tiles(2), 1)]
            {
                let p = problem(OpKind::GemmReduceScatter, 129, 584, 392, dtype, world);
                let schedule = Schedule { split_k, ..schedule(tile, chunk) };
                check_across(
                    &context,
                    p,
                    &schedule,
                    Nodes::new(p.world(), count).expect("equal nodes"),
                );
            }
        }
    }
}

/// Also run under `compute-sanitizer memcheck`, which serialises launches: ranks that await each
/// other would time out.
#[test]
fn alone_every_variant_is_right() {
    let Some(context) = device("alone_every_variant_is_right") else { return };
    check_all_variants(
        &context,
        &[(256, 512, 256, 1, Chunk::Shard), (129, 328, 200, 1, Chunk::Shard)],
    );
}

#[test]
fn together_every_variant_is_right_on_whole_and_ragged_tiles() {
    let Some(context) = device("together_every_variant_is_right_on_whole_and_ragged_tiles") else {
        return;
    };
    let cases = [
        (256, 512, 512, 2, Chunk::Shard),
        (129, 328, 200, 3, Chunk::Tiles(1)),
        (264, 520, 72, 4, Chunk::Tiles(2)),
        (8, 264, 1048, 8, Chunk::Tiles(3)),
    ];
    check_all_variants(&context, &cases);
}

/// Shards of which some have a row less, or none.
#[test]
fn together_every_variant_is_right_on_shards_of_different_sizes() {
    let Some(context) = device("together_every_variant_is_right_on_shards_of_different_sizes")
    else {
        return;
    };
    // A row less is a row block less where m = 4 * 128 + 1.
    let cases = [
        (3, 4, Chunk::Tiles(1)),
        (3, 4, Chunk::Shard),
        (70, 3, Chunk::Tiles(1)),
        (513, 4, Chunk::Tiles(2)),
        (1030, 4, Chunk::Tiles(1)),
    ];
    for (op, tile) in OPS.into_iter().flat_map(|op| {
        target(&context).generation.tiles(DType::Bf16.into()).map(move |tile| (op, tile))
    }) {
        for (m, world, chunk) in cases {
            for rows in [RowLayout::PerShard, RowLayout::Flattened] {
                let world = WorldSize::new(world).expect("a world");
                let (n, k) = if op == OPS[0] {
                    (328 * world.index(), 200)
                } else {
                    (328, 200 * world.index())
                };
                let p = Problem::new(op, m, n, k, DType::Bf16, world).expect("a problem");
                check(&context, p, &Schedule { rows, ..schedule(tile, chunk) });
            }
        }
    }
}

#[test]
fn tiles_that_span_shards_and_split_k_are_right() {
    let Some(context) = device("tiles_that_span_shards_and_split_k_are_right") else { return };
    let cases = [
        (1, 264, 200, 2),
        (5, 328, 1048, 3),
        (16, 520, 1024, 4),
        (8, 264, 1048, 8),
        (72, 392, 712, 3),
        (129, 584, 392, 2),
    ];
    for op in OPS {
        for tile in target(&context).generation.tiles(DType::Bf16.into()) {
            for (m, n, k, world) in cases {
                let p = problem(op, m, n, k, DType::Bf16, world);
                for (rows, split_k, k_slices) in [
                    (RowLayout::Flattened, 1, 1),
                    (RowLayout::Flattened, 3, 1),
                    (RowLayout::Flattened, 2, 3),
                    (RowLayout::PerShard, 3, 2),
                ] {
                    let schedule =
                        Schedule { rows, split_k, k_slices, group: 2, ..Schedule::of(tile) };
                    check(&context, p, &schedule);
                }
            }
            for (m, split_k) in [(8, 2), (136, 5)] {
                check(
                    &context,
                    problem(op, m, 328, 1048, DType::F16, 1),
                    &Schedule { split_k, ..Schedule::of(tile) },
                );
            }
        }
    }
}

/// Rows of a shard, `n` and `k` of a rank, ranks, least workers that share first tiles, and
/// in-mainloop partial tiles.
const SHARED: [(usize, usize, usize, u32, u32, u32); 4] = [
    (136, 840, 2000, 2, 2, 0),
    (256, 1032, 1344, 3, 7, 2),
    (72, 776, 1600, 8, 9, 4),
    (1024, 2560, 2048, 2, 33, 1),
];

/// With the least number of workers for which first tiles are shared, at least `from`.
fn shared_from(from: u32, p: Problem, schedule: Schedule) -> Schedule {
    let ways = (from..from + 64).map(|stream_k_workers| Schedule { stream_k_workers, ..schedule });
    let stream_k = |way: &Schedule| {
        TileProgram::build(&p, Rank::new(0), way).expect("a valid schedule").split_k_slots > 0
    };
    ways.into_iter()
        .find(stream_k)
        .unwrap_or_else(|| panic!("{p}, {schedule}: no tiles are left over of any waves"))
}

/// Every variant: the first tiles shared by groups of workers, few and many, with whole tiles
/// behind them and in-mainloop partial tiles.
#[test]
fn first_tiles_that_groups_of_workers_share_are_right() {
    let Some(context) = device("first_tiles_that_groups_of_workers_share_are_right") else {
        return;
    };
    for op in OPS {
        for tile in target(&context).generation.tiles(DType::Bf16.into()) {
            for (m_shard, n, k, world, from, in_mainloop) in SHARED {
                let p = problem(op, m_shard, n, k, DType::Bf16, world);
                let schedule =
                    Schedule { in_mainloop, chunk: Chunk::Tiles(1), ..Schedule::of(tile) };
                check(&context, p, &shared_from(from, p, schedule));
            }
        }
    }
}

/// Every variant: in-mainloop partial tiles, with and without later ones, of whole and partial
/// tiles, several to a CTA.
#[test]
fn partial_tiles_that_are_early_are_right() {
    let Some(context) = device("partial_tiles_that_are_early_are_right") else { return };
    for dtype in [DType::Bf16, DType::F16] {
        for tile in target(&context).generation.tiles(DType::Bf16.into()) {
            for (m, n, k, world, chunk, in_mainloop) in [
                (256, 512, 704, 2, Chunk::Tiles(1), 1),
                (1160, 1800, 1176, 3, Chunk::Tiles(2), 2),
                (264, 520, 2056, 4, Chunk::Tiles(1), 2),
                (129, 328, 3720, 8, Chunk::Shard, 7),
            ] {
                let p = problem(OpKind::GemmReduceScatter, m, n, k, dtype, world);
                let schedule = Schedule { in_mainloop, ..schedule(tile, chunk) };
                assert_eq!(
                    programs(p, &schedule, Nodes::apart(p.world()))[0].in_mainloop,
                    in_mainloop,
                    "{p}"
                );
                check(&context, p, &schedule);
            }
        }
    }
}

/// Rows of a shard, `n` and `k` of a rank, ranks, chunk and in-mainloop partial tiles.
const IN_F32: [(usize, usize, usize, u32, Chunk, u32); 4] = [
    (256, 512, 704, 2, Chunk::Shard, 0),
    (129, 328, 1992, 3, Chunk::Tiles(1), 1),
    (21, 264, 136, 4, Chunk::Tiles(2), 0),
    (264, 520, 2056, 4, Chunk::Tiles(1), 1),
];

/// Every variant that sends fp32 partial sums, with rows per shard, with flattened rows, and with
/// an in-flight limit; relays too.
#[test]
fn partial_sums_in_f32_are_right() {
    let Some(context) = device("partial_sums_in_f32_are_right") else { return };
    for (tile, dtype) in target(&context)
        .generation
        .tiles(DType::Bf16.into())
        .zip([DType::Bf16, DType::F16].into_iter().cycle())
    {
        for (m, n, k, world, chunk, in_mainloop) in IN_F32 {
            for (op, rows, split_k) in [
                (OpKind::GemmReduceScatter, RowLayout::PerShard, 1),
                (OpKind::GemmReduceScatter, RowLayout::PerShard, 2),
                (OpKind::GemmReduceScatter, RowLayout::Flattened, 2),
                (OpKind::GemmAllReduce, RowLayout::PerShard, 1),
                (OpKind::GemmAllReduce, RowLayout::Flattened, 1),
                (OpKind::GemmAllReduce, RowLayout::FlattenedTwoExchanges, 1),
            ] {
                let p = problem(op, m, n, k, dtype, world).with_partials(Partials::F32);
                let in_mainloop = if rows.is_flattened() || split_k > 1 { 0 } else { in_mainloop };
                let schedule = Schedule { rows, split_k, in_mainloop, ..schedule(tile, chunk) };
                check(&context, p, &schedule);
                let (programs, target) =
                    (programs(p, &schedule, Nodes::apart(p.world())), target(&context));
                if rows.is_flattened() && target.generation.scatters(tile, DType::Bf16.into()) {
                    let variant = Variant::of(&programs[0], target).expect("a variant");
                    check_with(
                        &context,
                        programs,
                        variant,
                        &schedule,
                        Pace { in_flight_limit: 2, ..Pace::default() },
                    );
                }
            }
        }
        let p = problem(OpKind::GemmReduceScatter, 129, 584, 392, dtype, 4)
            .with_partials(Partials::F32);
        check_across(
            &context,
            p,
            &schedule(tile, Chunk::Tiles(1)),
            Nodes::new(p.world(), 2).expect("equal nodes"),
        );
    }
}

#[test]
fn results_are_the_same_bits_in_every_run_whatever_rank_is_late() {
    let Some(context) = device("results_are_the_same_bits_in_every_run_whatever_rank_is_late")
    else {
        return;
    };
    for (op, k, in_mainloop, rows) in [
        (OPS[0], 512, 0, RowLayout::PerShard),
        (OPS[1], 512, 0, RowLayout::PerShard),
        (OPS[1], 1728, 2, RowLayout::PerShard),
        (OPS[1], 1728, 3, RowLayout::PerShard),
        (OPS[1], 512, 0, RowLayout::Flattened),
        (OPS[2], 512, 0, RowLayout::PerShard),
        (OPS[2], 512, 0, RowLayout::Flattened),
    ] {
        let p = problem(op, 384, 768, k, DType::Bf16, 4);
        let schedule = Schedule { in_mainloop, rows, ..schedule(TILE, Chunk::Tiles(1)) };
        assert_eq!(
            programs(p, &schedule, Nodes::apart(p.world()))[0].in_mainloop,
            in_mainloop,
            "{p}"
        );
        let mut w = World::new(&context, p, &schedule, Epoch::new(u32::MAX - 5));
        let seeds = Seeds { x: 3, w: 4 };
        w.prepare(seeds, Fill::Uniform);
        w.call();
        let first: Vec<_> = (0..4).map(|r| w.result(r)).collect();
        assert!(
            op != OpKind::GemmAllReduce || first.iter().all(|bits| *bits == first[0]),
            "{op}: ranks have different bits"
        );
        for late in 0..12 {
            w.pace = Pace {
                push_gap_ns: 500 * (late as u32 % 3),
                send_gap_ns: 700 * (late as u32 % 2),
                in_flight_limit: late as u32 % 4,
            };
            w.prepare(seeds, Fill::Uniform);
            w.delay(late % 4, 300_000);
            w.call();
            for (rank, bits) in first.iter().enumerate() {
                assert!(
                    w.result(rank) == *bits,
                    "{op}, {in_mainloop} in_mainloop, {rows:?}, rank {rank} differs with rank {} \
                     late",
                    late % 4
                );
            }
        }
        // Thirteen calls from six before the wrap.
        assert_eq!(w.epoch(0), 7, "{op}");
    }
}
