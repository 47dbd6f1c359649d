//! The fused kernel on one GPU. Ranks share the device, so both ops, the movers and the close of a
//! call run without a transport.

#![allow(clippy::print_stdout, reason = "a skipped test says why, a rate is there to be read")]

mod common;

use common::lateness::scaled;
use common::{World, cubin, device, programs, target};
use cudarc::driver::{CudaContext, sys};
use flux_core::layout::RowLayout;
use flux_core::layout::fault;
use flux_core::program::{Chunk, Schedule, TileProgram};
use flux_core::signal::Epoch;
use flux_core::tile::Generation;
use flux_core::{DType, Nodes, OpKind, Partials, Problem, Rank, TileShape, WorldSize};
use flux_kernels::cuda::{LaunchError, Pace, loaded};
use flux_kernels::harness::{Fill, Seeds, VerifyReport};
use flux_kernels::{Activation, GateLayout, Variant, WeightLayout};
use std::sync::Arc;
use std::time::Duration;

/// The usual tile.
const TILE: TileShape = TileShape::new(128, 256, 64);
const OPS: [OpKind; 3] = OpKind::ALL;

fn problem(op: OpKind, m_shard: usize, n: usize, k: usize, dtype: DType, world: u32) -> Problem {
    let world = WorldSize::new(world).expect("a world");
    let w = world.index();
    let (n, k) = match op {
        OpKind::AllGatherGemm => (n * w, k),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (n, k * w),
    };
    Problem::new(op, m_shard * w, n, k, dtype, world).expect("a problem")
}

fn schedule(tile: TileShape, chunk: Chunk) -> Schedule {
    Schedule { chunk, raster_group: 8, ..Schedule::of(tile) }
}

type Case = (usize, usize, usize, u32, Chunk);

/// Three calls, with new data each, integers compared for equality.
fn check(context: &Arc<CudaContext>, p: Problem, schedule: &Schedule) {
    check_across(context, p, schedule, Nodes::apart(p.world()));
}

/// The same of ranks in nodes.
fn check_across(context: &Arc<CudaContext>, p: Problem, schedule: &Schedule, nodes: Nodes) {
    let program = &programs(p, schedule, nodes)[0];
    let fitting = Variant::fitting(program, target(context)).unwrap_or_default();
    assert_eq!(fitting.is_empty(), is_refused(program, target(context).generation), "{p}, {schedule}");
    for variant in fitting {
        check_on(context, programs(p, schedule, nodes), variant, schedule);
    }
}

fn check_on(context: &Arc<CudaContext>, programs: Vec<TileProgram>, variant: Variant, schedule: &Schedule) {
    check_with(context, programs, variant, schedule, Pace::default());
}

fn check_with(context: &Arc<CudaContext>, programs: Vec<TileProgram>, variant: Variant, schedule: &Schedule, pace: Pace) {
    let p = programs[0].problem;
    let mut w = World::with(context, programs, variant, Epoch::FIRST);
    w.pace = pace;
    for (call, fill) in [(1, Fill::SmallInts), (2, Fill::Uniform), (3, Fill::SmallInts)] {
        let seeds = Seeds { x: 7 * call, w: 1000 + call };
        w.prepare(seeds, fill);
        w.call();
        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
            let fault = w.fault(rank);
            assert!(report.passed(), "{p}, {schedule}, call {call} {fill:?} rank {rank}: {report:?} {fault:?}");
        }
    }
}

/// Whether there is no kernel for it: the largest tiles have no buffer for the whole tile, which
/// scattered rows need, and some swap-AB tiles do not send partial tiles.
fn is_refused(program: &TileProgram, generation: Generation) -> bool {
    let sends = program.problem.op().reduces() && program.problem.world().peers() > 0;
    sends && !if program.rows.is_flattened() { generation.scatters(program.tile) } else { generation.sends_partials(program.tile) }
}

/// Every variant on every case.
fn check_all_variants(context: &Arc<CudaContext>, cases: &[Case]) {
    for op in OPS {
        for dtype in [DType::Bf16, DType::F16] {
            for tile in target(context).generation.tiles() {
                for &(m, n, k, world, chunk) in cases {
                    check(context, problem(op, m, n, k, dtype, world), &schedule(tile, chunk));
                }
            }
        }
    }
}

#[test]
fn relays_add_what_their_node_peers_send_and_send_the_sum() {
    let Some(context) = device("relays_add_what_their_node_peers_send_and_send_the_sum") else { return };
    for dtype in [DType::Bf16, DType::F16] {
        for tile in target(&context).generation.tiles() {
            for (count, world, chunk, split_k) in [(2, 4, Chunk::Tiles(1), 1), (2, 4, Chunk::Shard, 2), (3, 6, Chunk::Tiles(2), 1)] {
                let p = problem(OpKind::GemmReduceScatter, 129, 584, 392, dtype, world);
                let schedule = Schedule { split_k, ..schedule(tile, chunk) };
                check_across(&context, p, &schedule, Nodes::new(p.world(), count).expect("equal nodes"));
            }
        }
    }
}

/// Also run under `compute-sanitizer memcheck`, which serialises launches: ranks that await each
/// other would time out.
#[test]
fn alone_every_variant_is_right() {
    let Some(context) = device("alone_every_variant_is_right") else { return };
    check_all_variants(&context, &[(256, 512, 256, 1, Chunk::Shard), (129, 328, 200, 1, Chunk::Shard)]);
}

#[test]
fn together_every_variant_is_right_on_whole_and_ragged_tiles() {
    let Some(context) = device("together_every_variant_is_right_on_whole_and_ragged_tiles") else { return };
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
    let Some(context) = device("together_every_variant_is_right_on_shards_of_different_sizes") else { return };
    // A row less is a row block less where m = 4 * 128 + 1.
    let cases =
        [(3, 4, Chunk::Tiles(1)), (3, 4, Chunk::Shard), (70, 3, Chunk::Tiles(1)), (513, 4, Chunk::Tiles(2)), (1030, 4, Chunk::Tiles(1))];
    for (op, tile) in OPS.into_iter().flat_map(|op| target(&context).generation.tiles().map(move |tile| (op, tile))) {
        for (m, world, chunk) in cases {
            for rows in [RowLayout::PerShard, RowLayout::Flattened] {
                let world = WorldSize::new(world).expect("a world");
                let (n, k) = if op == OPS[0] { (328 * world.index(), 200) } else { (328, 200 * world.index()) };
                let p = Problem::new(op, m, n, k, DType::Bf16, world).expect("a problem");
                check(&context, p, &Schedule { rows, ..schedule(tile, chunk) });
            }
        }
    }
}

/// With a residual in memory of its own and in `y`, on top of a bias or none.
fn check_residuals(w: &mut World, tile: TileShape) {
    let cases =
        [(None, false, Fill::SmallInts), (Some(70), true, Fill::SmallInts), (Some(71), false, Fill::Uniform), (None, true, Fill::Uniform)];
    for (bias, in_y, fill) in cases {
        let seeds = Seeds { x: 31, w: 41 };
        (w.bias, w.residual, w.residual_in_y) = (bias, Some(80), in_y);
        w.prepare(seeds, fill);
        w.call();
        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
            let fault = w.fault(rank);
            let p = w.problem;
            assert!(report.passed(), "{p} {tile} residual in y {in_y} bias {bias:?} {fill:?} rank {rank}: {report:?} {fault:?}");
        }
    }
}

/// Every variant with every activation it takes, with and without a bias; sums with a residual too.
fn check_all_epilogues(context: &Arc<CudaContext>, cases: &[Case]) {
    for op in OPS {
        for (dtype, tile) in
            [DType::Bf16, DType::F16].into_iter().flat_map(|dtype| target(context).generation.tiles().map(move |tile| (dtype, tile)))
        {
            for &(m, n, k, world, chunk) in cases {
                let p = problem(op, m, n, k, dtype, world);
                let sends = !op.reduces() || target(context).generation.sends_partials(tile);
                let rows = if sends { RowLayout::PerShard } else { RowLayout::Flattened };
                let schedule = Schedule { rows, ..schedule(tile, chunk) };
                if is_refused(&programs(p, &schedule, Nodes::apart(p.world()))[0], target(context).generation) {
                    continue;
                }
                for (call, &activation) in (1..).zip(Activation::of(op)) {
                    let programs = programs(p, &schedule, Nodes::apart(p.world()));
                    let variant = Variant::of(&programs[0], target(context)).expect("a variant").with_activation(activation);
                    let mut w = World::with(context, programs, variant, Epoch::FIRST);
                    for (bias, fill) in [(Some(50 + call), Fill::SmallInts), (Some(60 + call), Fill::Uniform), (None, Fill::Uniform)] {
                        let seeds = Seeds { x: 11 * call, w: 2000 + call };
                        w.bias = bias;
                        w.prepare(seeds, fill);
                        w.call();
                        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                            let fault = w.fault(rank);
                            assert!(report.passed(), "{p} {tile} {activation} bias {bias:?} {fill:?} rank {rank}: {report:?} {fault:?}");
                        }
                    }
                    if op.reduces() {
                        check_residuals(&mut w, tile);
                    }
                }
            }
        }
    }
}

/// Every tile with gates, in both layouts and with and without a bias.
fn check_all_gates(context: &Arc<CudaContext>, cases: &[Case]) {
    let finishes = [
        (DType::Bf16, Activation::Silu, GateLayout::Concatenated),
        (DType::F16, Activation::Gelu, GateLayout::Interleaved),
        (DType::Bf16, Activation::Gelu, GateLayout::Interleaved),
    ];
    for (tile, (dtype, activation, layout)) in target(context).generation.tiles().flat_map(|tile| finishes.map(|finish| (tile, finish))) {
        for (call, &(m, n, k, world, chunk)) in (1..).zip(cases) {
            let p = problem(OpKind::AllGatherGemm, m, n, k, dtype, world);
            let programs = programs(p, &schedule(tile, chunk), Nodes::apart(p.world()));
            let variant = Variant::of(&programs[0], target(context)).expect("a variant").with_activation(activation).with_gates(true);
            let mut w = World::with(context, programs, variant, Epoch::FIRST);
            w.gates = Some(layout);
            for (bias, fill) in [(Some(50 + call), Fill::Uniform), (Some(60 + call), Fill::SmallInts), (None, Fill::Uniform)] {
                let seeds = Seeds { x: 17 * call, w: 3000 + call };
                w.bias = bias;
                w.prepare(seeds, fill);
                w.call();
                for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                    let fault = w.fault(rank);
                    assert!(report.passed(), "{p} {tile} {layout} {activation} bias {bias:?} {fill:?} rank {rank}: {report:?} {fault:?}");
                }
            }
        }
    }
}

/// Under `compute-sanitizer memcheck` too: the bias ends where its memory ends, in the middle of a
/// tile.
#[test]
fn alone_every_epilogue_is_right() {
    let Some(context) = device("alone_every_epilogue_is_right") else { return };
    check_all_epilogues(&context, &[(129, 328, 200, 1, Chunk::Shard)]);
}

/// Under `compute-sanitizer memcheck` too.
#[test]
fn alone_every_gate_is_right() {
    let Some(context) = device("alone_every_gate_is_right") else { return };
    check_all_gates(&context, &[(129, 336, 200, 1, Chunk::Shard)]);
}

#[test]
fn together_every_gate_is_right_on_whole_and_ragged_tiles() {
    let Some(context) = device("together_every_gate_is_right_on_whole_and_ragged_tiles") else { return };
    check_all_gates(&context, &[(256, 512, 512, 2, Chunk::Shard), (129, 272, 72, 3, Chunk::Tiles(2)), (8, 528, 136, 8, Chunk::Tiles(3))]);
}

#[test]
fn together_every_epilogue_is_right_on_whole_and_ragged_tiles() {
    let Some(context) = device("together_every_epilogue_is_right_on_whole_and_ragged_tiles") else { return };
    let cases = [(256, 512, 512, 2, Chunk::Shard), (129, 264, 72, 3, Chunk::Tiles(2)), (8, 520, 136, 8, Chunk::Tiles(3))];
    check_all_epilogues(&context, &cases);
}

/// Every tile with weights of `[k, n]`: the bits of those of `[n, k]`.
fn check_weights_of_k_and_n(context: &Arc<CudaContext>, cases: &[Case]) {
    for (op, tile) in OPS.into_iter().flat_map(|op| target(context).generation.tiles().map(move |tile| (op, tile))) {
        for (&(m, n, k, world, chunk), dtype) in cases.iter().zip([DType::Bf16, DType::F16].into_iter().cycle()) {
            let p = problem(op, m, n, k, dtype, world);
            for rows in [RowLayout::PerShard, RowLayout::Flattened] {
                let schedule = Schedule { rows, ..schedule(tile, chunk) };
                let programs = || programs(p, &schedule, Nodes::apart(p.world()));
                if is_refused(&programs()[0], target(context).generation) {
                    continue;
                }
                let variant = Variant::of(&programs()[0], target(context)).expect("a variant");
                let [nk, kn] = WeightLayout::ALL.map(|weights| {
                    let mut w = World::with(context, programs(), variant.with_weights(weights), Epoch::FIRST);
                    for fill in [Fill::SmallInts, Fill::Uniform] {
                        let seeds = Seeds { x: 51, w: 61 };
                        w.prepare(seeds, fill);
                        w.call();
                        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                            let fault = w.fault(rank);
                            assert!(report.passed(), "{p} {tile} {weights} {fill:?} rank {rank}: {report:?} {fault:?}");
                        }
                    }
                    (0..world as usize).map(|rank| w.result(rank)).collect::<Vec<_>>()
                });
                assert!(nk == kn, "{p} {tile}: other bits with weights of [k, n]");
            }
        }
    }
}

/// Under `compute-sanitizer memcheck` too: weights end in the middle of a box.
#[test]
fn alone_weights_of_k_and_n_are_right() {
    let Some(context) = device("alone_weights_of_k_and_n_are_right") else { return };
    check_weights_of_k_and_n(&context, &[(129, 328, 200, 1, Chunk::Shard), (64, 8, 8, 1, Chunk::Shard)]);
}

#[test]
fn together_weights_of_k_and_n_are_right_on_whole_and_partial_tiles() {
    let Some(context) = device("together_weights_of_k_and_n_are_right_on_whole_and_partial_tiles") else { return };
    check_weights_of_k_and_n(&context, &[(256, 512, 512, 2, Chunk::Shard), (129, 264, 72, 3, Chunk::Tiles(2))]);
}

#[test]
fn tiles_that_span_shards_and_split_k_are_right() {
    let Some(context) = device("tiles_that_span_shards_and_split_k_are_right") else { return };
    let cases = [(1, 264, 200, 2), (5, 328, 1048, 3), (16, 520, 1024, 4), (8, 264, 1048, 8), (72, 392, 712, 3), (129, 584, 392, 2)];
    for op in OPS {
        for tile in target(&context).generation.tiles() {
            for (m, n, k, world) in cases {
                let p = problem(op, m, n, k, DType::Bf16, world);
                for (rows, split_k, k_slices) in
                    [(RowLayout::Flattened, 1, 1), (RowLayout::Flattened, 3, 1), (RowLayout::Flattened, 2, 3), (RowLayout::PerShard, 3, 2)]
                {
                    let schedule = Schedule { rows, split_k, k_slices, group: 2, ..Schedule::of(tile) };
                    check(&context, p, &schedule);
                }
            }
            for (m, split_k) in [(8, 2), (136, 5)] {
                check(&context, problem(op, m, 328, 1048, DType::F16, 1), &Schedule { split_k, ..Schedule::of(tile) });
            }
        }
    }
}

/// Rows of a shard, `n` and `k` of a rank, ranks, least workers that share first tiles, and
/// in-mainloop partial tiles.
const SHARED: [(usize, usize, usize, u32, u32, u32); 4] =
    [(136, 840, 2000, 2, 2, 0), (256, 1032, 1344, 3, 7, 2), (72, 776, 1600, 8, 9, 4), (1024, 2560, 2048, 2, 33, 1)];

/// With the least number of workers for which first tiles are shared, at least `from`.
fn shared_from(from: u32, p: Problem, schedule: Schedule) -> Schedule {
    let ways = (from..from + 64).map(|stream_k_workers| Schedule { stream_k_workers, ..schedule });
    let stream_k = |way: &Schedule| TileProgram::build(&p, Rank::new(0), way).expect("a valid schedule").split_k_slots > 0;
    ways.into_iter().find(stream_k).unwrap_or_else(|| panic!("{p}, {schedule}: no tiles are left over of any waves"))
}

/// Every variant: the first tiles shared by groups of workers, few and many, with whole tiles
/// behind them and in-mainloop partial tiles.
#[test]
fn first_tiles_that_groups_of_workers_share_are_right() {
    let Some(context) = device("first_tiles_that_groups_of_workers_share_are_right") else { return };
    for op in OPS {
        for tile in target(&context).generation.tiles() {
            for (m_shard, n, k, world, from, in_mainloop) in SHARED {
                let p = problem(op, m_shard, n, k, DType::Bf16, world);
                let schedule = Schedule { in_mainloop, chunk: Chunk::Tiles(1), ..Schedule::of(tile) };
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
        for tile in target(&context).generation.tiles() {
            for (m, n, k, world, chunk, in_mainloop) in [
                (256, 512, 704, 2, Chunk::Tiles(1), 1),
                (1160, 1800, 1176, 3, Chunk::Tiles(2), 2),
                (264, 520, 2056, 4, Chunk::Tiles(1), 2),
                (129, 328, 3720, 8, Chunk::Shard, 7),
            ] {
                let p = problem(OpKind::GemmReduceScatter, m, n, k, dtype, world);
                let schedule = Schedule { in_mainloop, ..schedule(tile, chunk) };
                assert_eq!(programs(p, &schedule, Nodes::apart(p.world()))[0].in_mainloop, in_mainloop, "{p}");
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

/// Every variant that sends fp32 partial sums, with rows per shard, with flattened rows, and with an
/// in-flight limit; relays too.
#[test]
fn partial_sums_in_f32_are_right() {
    let Some(context) = device("partial_sums_in_f32_are_right") else { return };
    for (tile, dtype) in target(&context).generation.tiles().zip([DType::Bf16, DType::F16].into_iter().cycle()) {
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
                let (programs, target) = (programs(p, &schedule, Nodes::apart(p.world())), target(&context));
                if rows.is_flattened() && target.generation.scatters(tile) {
                    let variant = Variant::of(&programs[0], target).expect("a variant");
                    check_with(&context, programs, variant, &schedule, Pace { in_flight_limit: 2, ..Pace::default() });
                }
            }
        }
        let p = problem(OpKind::GemmReduceScatter, 129, 584, 392, dtype, 4).with_partials(Partials::F32);
        check_across(&context, p, &schedule(tile, Chunk::Tiles(1)), Nodes::new(p.world(), 2).expect("equal nodes"));
    }
}

#[test]
fn results_are_the_same_bits_in_every_run_whatever_rank_is_late() {
    let Some(context) = device("results_are_the_same_bits_in_every_run_whatever_rank_is_late") else { return };
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
        assert_eq!(programs(p, &schedule, Nodes::apart(p.world()))[0].in_mainloop, in_mainloop, "{p}");
        let mut w = World::new(&context, p, &schedule, Epoch::new(u32::MAX - 5));
        let seeds = Seeds { x: 3, w: 4 };
        w.prepare(seeds, Fill::Uniform);
        w.call();
        let first: Vec<_> = (0..4).map(|r| w.result(r)).collect();
        assert!(op != OpKind::GemmAllReduce || first.iter().all(|bits| *bits == first[0]), "{op}: ranks have different bits");
        for late in 0..12 {
            w.pace = Pace { push_gap_ns: 500 * (late as u32 % 3), send_gap_ns: 700 * (late as u32 % 2), in_flight_limit: late as u32 % 4 };
            w.prepare(seeds, Fill::Uniform);
            w.delay(late % 4, 300_000);
            w.call();
            for (rank, bits) in first.iter().enumerate() {
                assert!(
                    w.result(rank) == *bits,
                    "{op}, {in_mainloop} in_mainloop, {rows:?}, rank {rank} differs with rank {} late",
                    late % 4
                );
            }
        }
        // Thirteen calls from six before the wrap.
        assert_eq!(w.epoch(0), 7, "{op}");
    }
}

#[test]
fn missing_rank_ends_in_a_timeout_that_names_it_and_leaves_the_device_usable() {
    let Some(context) = device("missing_rank_ends_in_a_timeout_that_names_it_and_leaves_the_device_usable") else { return };
    for (op, k, in_mainloop) in [(OPS[0], 256, 0), (OPS[1], 256, 0), (OPS[1], 1024, 1)] {
        let p = problem(op, 256, 512, k, DType::Bf16, 2);
        let schedule = Schedule { in_mainloop, ..schedule(TILE, Chunk::Shard) };
        let mut w = World::new(&context, p, &schedule, Epoch::FIRST);
        w.deadline_ns = 50_000_000;
        w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
        w.enqueue(0);
        w.synchronize();
        let record = w.fault(0);
        assert_eq!((record.state, record.code, record.wait, record.rank, record.peer), (1, fault::TIMEOUT, fault::SIGNAL, 0, 1), "{op}");
        assert_eq!(w.epoch(0), 1, "a failed call does not advance the epoch");
        // Rank 1 finds all that it awaits, and that its peer has given up: what its peer's streams
        // do by now may have overwritten it.
        w.enqueue(1);
        w.synchronize();
        let record = w.fault(1);
        assert_eq!((record.state, record.code, record.rank, record.abort), (1, fault::ABORTED, 0, fault::TIMED_OUT), "{op}");
        assert_eq!(w.epoch(1), 1, "{op}: a call of a rank whose peer has given up is not closed");
        // The context still works: a new world, complete, is right.
        let mut w = World::new(&context, p, &schedule, Epoch::FIRST);
        let seeds = Seeds { x: 5, w: 6 };
        w.prepare(seeds, Fill::SmallInts);
        w.call();
        assert!(w.verify(seeds, Fill::SmallInts).iter().all(VerifyReport::passed), "{op}");
    }
}

#[test]
fn calls_after_a_failed_one_announce_nothing() {
    let Some(context) = device("calls_after_a_failed_one_announce_nothing") else { return };
    for (op, rows, in_flight_limit) in [
        (OPS[0], RowLayout::PerShard, 0),
        (OPS[0], RowLayout::Flattened, 0),
        (OPS[1], RowLayout::PerShard, 0),
        (OPS[1], RowLayout::Flattened, 0),
        (OPS[1], RowLayout::Flattened, 1),
        (OPS[2], RowLayout::PerShard, 0),
        (OPS[2], RowLayout::Flattened, 0),
        (OPS[2], RowLayout::Flattened, 1),
    ] {
        // Fewer pieces of the shard, and fewer tiles, than CTAs: each launch has CTAs that leave
        // nothing out.
        let p = problem(op, 8, 256, 256, DType::Bf16, 2);
        let mut w = World::new(&context, p, &Schedule { rows, ..schedule(TILE, Chunk::Shard) }, Epoch::FIRST);
        w.pace.in_flight_limit = in_flight_limit;
        w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
        w.poison(0);
        (0..2 * w.workers).for_each(|_| w.enqueue(0));
        w.synchronize();
        assert!(w.signals(1).iter().all(|&word| word == 0), "{op}, {rows:?}, in-flight limit {in_flight_limit}: {:?}", w.signals(1));
        assert_eq!(w.epoch(0), 1, "{op}, {rows:?}, in-flight limit {in_flight_limit}");
    }
}

#[test]
fn calls_of_different_ops_fail_on_all_ranks() {
    let Some(context) = device("calls_of_different_ops_fail_on_all_ranks") else { return };
    for (op, k, in_mainloop) in [(OPS[0], 256, 0), (OPS[1], 256, 0), (OPS[1], 1024, 1)] {
        let p = problem(op, 256, 512, k, DType::Bf16, 3);
        let schedule = Schedule { in_mainloop, ..schedule(TILE, Chunk::Shard) };
        // The call before the wrap, and that whose number is what a pad's words begin as.
        for first in [u32::MAX, 0] {
            let mut w = World::new(&context, p, &schedule, Epoch::new(first));
            w.deadline_ns = scaled(Duration::from_secs(5)).as_nanos() as u64;
            w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
            for rank in 0..3 {
                w.op = if rank == 1 { 9 } else { 4 };
                w.enqueue(rank);
            }
            w.synchronize();
            for rank in 0..3 {
                let (record, own) = (w.fault(rank), if rank == 1 { 9 } else { 4 });
                assert_eq!(w.epoch(rank), first, "{op}: rank {rank} has not closed the call");
                // A rank that finds another's failure first records it; a different op is recorded
                // by every rank, whatever it waits for.
                let disagreed = (record.code, record.expected, record.seen) == (fault::DISAGREED, own, 13 - own);
                assert!(disagreed || (record.code, record.abort) == (fault::ABORTED, fault::IN_ANOTHER_OP), "{op}: {record:?}");
            }
            assert!((0..3).any(|rank| w.fault(rank).code == fault::DISAGREED), "{op}");
        }
    }
}

#[test]
fn a_relay_whose_node_peer_has_given_up_sends_no_sum() {
    let Some(context) = device("a_relay_whose_node_peer_has_given_up_sends_no_sum") else { return };
    let p = problem(OpKind::GemmReduceScatter, 128, 512, 512, DType::Bf16, 4);
    let nodes = Nodes::new(p.world(), 2).expect("two nodes of two");
    let programs = programs(p, &schedule(TILE, Chunk::Tiles(1)), nodes);
    let variant = Variant::of(&programs[0], target(&context)).expect("a variant");
    let awaits: Vec<_> = programs[1].awaits.iter().filter(|a| a.peer == 3).copied().collect();
    let mut w = World::with(&context, programs, variant, Epoch::FIRST);
    w.deadline_ns = 200_000_000;
    w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
    // Rank 3 relays to rank 1 what 2 has sent it.
    w.give_up(2, 3);
    (0..4).for_each(|rank| w.enqueue(rank));
    w.synchronize();
    let record = w.fault(3);
    assert_eq!((record.code, record.rank, record.abort), (fault::ABORTED, 2, fault::TIMED_OUT));
    assert!(!awaits.is_empty(), "rank 1 awaits sums of rank 3");
    assert!(awaits.iter().all(|a| w.signal(1, a.signal) != Epoch::FIRST.get()), "a sum was announced");
    assert_ne!(w.fault(1).state, 0, "rank 1 has not closed the call");
}

#[test]
fn unsplit_gemm_at_the_reference_shapes_prints_its_rate() {
    let Some(context) = device("unsplit_gemm_at_the_reference_shapes_prints_its_rate") else { return };
    for (op, n, k) in [(OpKind::AllGatherGemm, 6144, 12288), (OpKind::GemmReduceScatter, 12288, 6144)] {
        let p = problem(op, 8192, n, k, DType::Bf16, 1);
        for tile in target(&context).generation.tiles() {
            for raster_group in [8, 16] {
                let mut w = World::new(&context, p, &Schedule { raster_group, ..Schedule::of(tile) }, Epoch::FIRST);
                let seeds = Seeds { x: 1, w: 2 };
                w.prepare(seeds, Fill::Uniform);
                w.time(5);
                let mut ms = w.time(15);
                ms.sort_by(f32::total_cmp);
                let rate = p.flop_per_rank() as f64 / f64::from(ms[7]) / 1e9;
                println!("{p} tile {tile} groups of {raster_group} row blocks: {:.4} ms, {rate:.0} TFLOP/s", ms[7]);
                let report = w.verify(seeds, Fill::Uniform)[0];
                assert!(report.passed(), "{report:?}");
            }
        }
    }
}

#[test]
fn few_rows_against_the_reference_weights_print_their_bandwidth() {
    let Some(context) = device("few_rows_against_the_reference_weights_print_their_bandwidth") else { return };
    // rows, weights [n, k], tile, split_k: what a rank of 4 does for GPT-3 and Llama-2 70B
    let cases = [
        (64, (12288, 12288), (64, 128), 1),
        (64, (12288, 12288), (64, 256), 2),
        (128, (12288, 12288), (128, 128), 1),
        (128, (12288, 12288), (128, 192), 2),
        (256, (12288, 12288), (128, 192), 1),
        (256, (12288, 12288), (256, 128), 1),
        (64, (7168, 8192), (64, 128), 2),
        (64, (7168, 8192), (64, 256), 4),
        (64, (8192, 7168), (64, 128), 1),
        (64, (8192, 7168), (64, 128), 2),
        (64, (8192, 7168), (64, 256), 3),
    ];
    for (m, (n, k), (tile_m, tile_n), split_k) in cases {
        let p = problem(OpKind::AllGatherGemm, m, n, k, DType::Bf16, 1);
        let tile = TileShape::new(tile_m, tile_n, 64);
        if target(&context).generation.tiles().all(|of_kernel| of_kernel != tile) {
            continue;
        }
        let schedule = Schedule { split_k, ..Schedule::of(tile) };
        let mut w = World::new(&context, p, &schedule, Epoch::FIRST);
        w.workers = w.workers.min((m as u32).div_ceil(tile_m) * (n as u32).div_ceil(tile_n) * split_k);
        let seeds = Seeds { x: 1, w: 2 };
        w.prepare(seeds, Fill::Uniform);
        // the clocks rise
        w.time(1000);
        let mut ms = w.time(41);
        ms.sort_by(f32::total_cmp);
        println!("{p}, {schedule}, {} CTAs: {:.4} ms, {:.0} GB/s of w", w.workers, ms[20], (n * k * 2) as f64 / f64::from(ms[20]) / 1e6);
        assert!(w.verify(seeds, Fill::Uniform)[0].passed());
    }
}

/// A context of one's own, which goes with it.
struct Context(sys::CUcontext);

impl Context {
    fn new() -> Self {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out pointer is valid, no parameters are given, and the driver has a device 0,
        // whose context has been opened.
        unsafe { sys::cuCtxCreate_v4(&raw mut context, std::ptr::null_mut(), 0, 0) }.result().expect("a context");
        Self(context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; nothing of it is used afterwards.
        let _ = unsafe { sys::cuCtxDestroy_v2(self.0) };
    }
}

#[test]
fn a_kernel_is_loaded_once_while_its_context_lives() {
    let Some(primary) = device("a_kernel_is_loaded_once_while_its_context_lives") else { return };
    let variants = [OPS[0], OPS[1]].map(|op| {
        let problem = problem(op, 128, 128, 64, DType::Bf16, 1);
        Variant::of(&programs(problem, &schedule(TILE, Chunk::Shard), Nodes::apart(problem.world()))[0], target(&primary))
            .expect("a variant")
    });
    let mut loads = 0;
    let mut load = |variant: Variant| {
        loaded::<LaunchError>(variant, || {
            loads += 1;
            Ok(cubin(&primary, &variant.source()))
        })
        .expect("it loads")
    };
    // The second context may have the handle of the first, which is gone.
    for _ in 0..2 {
        let context = Context::new();
        let [first, other] = variants.map(&mut load);
        assert!(!Arc::ptr_eq(&first, &other) && first.variant() == variants[0] && other.variant() == variants[1]);
        let held = Arc::downgrade(&first);
        drop(first);
        assert!(held.upgrade().is_some_and(|first| Arc::ptr_eq(&first, &load(variants[0]))), "nobody needs to hold it");
        drop(context);
    }
    primary.bind_to_thread().expect("the context that others use");
    assert_eq!(loads, 4);
}
