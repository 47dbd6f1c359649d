//! 8-bit operands with scales: every variant, under every kind of schedule and epilogue.

use super::{OPS, check, check_with, problem, schedule};
use crate::common::{World, device, programs, target};
use cudarc::driver::CudaContext;
use flux_core::layout::RowLayout;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::{DType, Nodes, Numerics, OpKind, Partials, Scales, TileShape};
use flux_kernels::cuda::Pace;
use flux_kernels::harness::{Fill, Seeds};
use flux_kernels::{Activation, GateLayout, Variant};
use std::sync::Arc;

/// Operands of each form, with both types of outputs in turn.
fn forms() -> [Numerics; 4] {
    [
        Numerics::e4m3(Scales::Tensor, DType::F16),
        Numerics::e4m3(Scales::Row, DType::Bf16),
        Numerics { fast_accumulation: true, ..Numerics::e4m3(Scales::Row, DType::F16) },
        Numerics::e4m3(Scales::Block, DType::Bf16),
    ]
}

/// Each form with every third of its tiles, so that every tile is taken by a form.
fn kernels(context: &Arc<CudaContext>) -> Vec<(Numerics, TileShape)> {
    let generation = target(context).generation;
    forms()
        .into_iter()
        .enumerate()
        .flat_map(|(form, numerics)| {
            let tiles = generation.tiles(numerics).skip(form % 3).step_by(3);
            tiles.map(move |tile| (numerics, tile))
        })
        .collect()
}

/// `n` and `k` of a rank in multiples of what operands allow: 16, or 128 with scales of blocks.
fn problem_of(
    op: OpKind,
    (m, n, k): (usize, usize, usize),
    numerics: Numerics,
    world: u32,
) -> flux_core::Problem {
    let multiple = numerics.row_multiple() as usize;
    let [n, k] = [n, k].map(|extent| extent.next_multiple_of(multiple));
    problem(op, m, n, k, numerics, world)
}

#[test]
fn scaled_products_are_right_alone() {
    let Some(context) = device("scaled_products_are_right_alone") else { return };
    for (numerics, tile) in kernels(&context) {
        for op in OPS {
            for shape in [(256, 512, 256), (129, 336, 208)] {
                check(&context, problem_of(op, shape, numerics, 1), &schedule(tile, Chunk::Shard));
            }
        }
    }
}

#[test]
fn scaled_products_are_right_together() {
    let Some(context) = device("scaled_products_are_right_together") else { return };
    let cases = [
        ((256, 512, 512), 2, Chunk::Shard),
        ((129, 336, 208), 3, Chunk::Tiles(1)),
        ((8, 272, 1040), 8, Chunk::Tiles(3)),
    ];
    for (numerics, tile) in kernels(&context) {
        for op in OPS {
            for (shape, world, chunk) in cases {
                let p = problem_of(op, shape, numerics, world);
                check(&context, p, &schedule(tile, chunk));
            }
        }
    }
}

/// Flattened rows, split-K and groups of workers that share tiles.
#[test]
fn scaled_products_of_split_tiles_are_right() {
    let Some(context) = device("scaled_products_of_split_tiles_are_right") else { return };
    for (numerics, tile) in kernels(&context) {
        for op in OPS {
            for (rows, split_k, stream_k_workers) in [
                (RowLayout::Flattened, 1, 1),
                (RowLayout::Flattened, 3, 1),
                (RowLayout::PerShard, 2, 1),
                (RowLayout::PerShard, 1, 9),
            ] {
                let p = problem_of(op, (72, 400, 1104), numerics, 3);
                let schedule =
                    Schedule { rows, split_k, stream_k_workers, group: 2, ..Schedule::of(tile) };
                check(&context, p, &schedule);
            }
        }
    }
}

#[test]
fn scaled_partial_sums_in_f32_are_right() {
    let Some(context) = device("scaled_partial_sums_in_f32_are_right") else { return };
    for (numerics, tile) in kernels(&context) {
        if numerics.scales == Scales::Tensor {
            continue;
        }
        let numerics = numerics.with_partials(Partials::F32);
        for (rows, in_flight_limit) in
            [(RowLayout::PerShard, 0), (RowLayout::Flattened, 0), (RowLayout::Flattened, 2)]
        {
            let p = problem_of(OpKind::GemmReduceScatter, (129, 336, 640), numerics, 3);
            let schedule = Schedule { rows, ..schedule(tile, Chunk::Tiles(1)) };
            let programs = programs(p, &schedule, Nodes::apart(p.world()));
            let Ok(variant) = Variant::of(&programs[0], target(&context)) else { continue };
            let pace = Pace { in_flight_limit, ..Pace::default() };
            check_with(&context, programs, variant, &schedule, pace);
        }
    }
}

/// With a bias, gates in both layouts and activations, or a residual.
#[test]
fn epilogues_of_scaled_products_are_right() {
    let Some(context) = device("epilogues_of_scaled_products_are_right") else { return };
    let finishes = [
        (OPS[0], None),
        (OPS[0], Some(GateLayout::Concatenated)),
        (OPS[0], Some(GateLayout::Interleaved)),
        (OPS[1], None),
    ];
    for (number, (numerics, tile)) in kernels(&context).into_iter().enumerate() {
        for (op, gates) in [finishes[number % 4], finishes[(number + 1) % 4]] {
            let multiple = 2 * numerics.row_multiple() as usize;
            let n = 336_usize.next_multiple_of(multiple);
            let p = problem_of(op, (129, n, 336), numerics, 2);
            let flattened =
                op.reduces() && !target(&context).generation.sends_partials(tile, numerics);
            let rows = if flattened { RowLayout::Flattened } else { RowLayout::PerShard };
            let schedule = Schedule { rows, ..schedule(tile, Chunk::Tiles(1)) };
            let programs = programs(p, &schedule, Nodes::apart(p.world()));
            let Ok(variant) = Variant::of(&programs[0], target(&context)) else { continue };
            let variant = variant.with_gates(gates.is_some());
            let mut w = World::with(&context, programs, variant, Epoch::FIRST);
            (w.gates, w.bias) = (gates, Some(50));
            if op.reduces() {
                w.residual = Some(80);
            } else {
                w.activation = Activation::Silu;
            }
            for fill in [Fill::SmallInts, Fill::Uniform] {
                let seeds = Seeds { x: 17, w: 3000 };
                w.prepare(seeds, fill);
                w.call();
                for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                    let fault = w.fault(rank);
                    assert!(
                        report.passed(),
                        "{p} {tile} {gates:?} {fill:?} rank {rank}: {report:?} {fault:?}"
                    );
                }
            }
        }
    }
}
