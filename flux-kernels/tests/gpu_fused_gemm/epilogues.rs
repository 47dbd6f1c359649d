//! Bias, residual, activation and gates.

use super::{Case, OPS, is_refused, problem, schedule};
use crate::common::{World, device, programs, target};
use cudarc::driver::CudaContext;
use flux_core::layout::RowLayout;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::{DType, Nodes, OpKind, TileShape};
use flux_kernels::harness::{Fill, Seeds};
use flux_kernels::{Activation, GateLayout, Variant};
use std::sync::Arc;

/// With a residual in memory of its own and in `y`, on top of a bias or none.
fn check_residuals(w: &mut World, tile: TileShape) {
    let cases = [
        (None, false, Fill::SmallInts),
        (Some(70), true, Fill::SmallInts),
        (Some(71), false, Fill::Uniform),
        (None, true, Fill::Uniform),
    ];
    for (bias, in_y, fill) in cases {
        let seeds = Seeds { x: 31, w: 41 };
        (w.bias, w.residual, w.residual_in_y) = (bias, Some(80), in_y);
        w.prepare(seeds, fill);
        w.call();
        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
            let fault = w.fault(rank);
            let p = w.problem;
            assert!(
                report.passed(),
                "{p} {tile} residual in y {in_y} bias {bias:?} {fill:?} rank {rank}: {report:?} \
                 {fault:?}"
            );
        }
    }
}

/// Every variant with every activation it takes, with and without a bias; sums with a residual too.
fn check_all_epilogues(context: &Arc<CudaContext>, cases: &[Case]) {
    for op in OPS {
        for (dtype, tile) in [DType::Bf16, DType::F16].into_iter().flat_map(|dtype| {
            target(context).generation.tiles(DType::Bf16.into()).map(move |tile| (dtype, tile))
        }) {
            for &(m, n, k, world, chunk) in cases {
                let p = problem(op, m, n, k, dtype, world);
                let sends = !op.reduces()
                    || target(context).generation.sends_partials(tile, DType::Bf16.into());
                let rows = if sends { RowLayout::PerShard } else { RowLayout::Flattened };
                let schedule = Schedule { rows, ..schedule(tile, chunk) };
                if is_refused(
                    &programs(p, &schedule, Nodes::apart(p.world()))[0],
                    target(context).generation,
                ) {
                    continue;
                }
                let mut w = World::new(context, p, &schedule, Epoch::FIRST);
                for (call, &activation) in (1..).zip(Activation::of(op)) {
                    w.activation = activation;
                    for (bias, fill) in [
                        (Some(50 + call), Fill::SmallInts),
                        (Some(60 + call), Fill::Uniform),
                        (None, Fill::Uniform),
                    ] {
                        let seeds = Seeds { x: 11 * call, w: 2000 + call };
                        w.bias = bias;
                        w.prepare(seeds, fill);
                        w.call();
                        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                            let fault = w.fault(rank);
                            assert!(
                                report.passed(),
                                "{p} {tile} {activation} bias {bias:?} {fill:?} rank {rank}: \
                                 {report:?} {fault:?}"
                            );
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
    for (tile, (dtype, activation, layout)) in target(context)
        .generation
        .tiles(DType::Bf16.into())
        .flat_map(|tile| finishes.map(|finish| (tile, finish)))
    {
        for (call, &(m, n, k, world, chunk)) in (1..).zip(cases) {
            let p = problem(OpKind::AllGatherGemm, m, n, k, dtype, world);
            let programs = programs(p, &schedule(tile, chunk), Nodes::apart(p.world()));
            let variant =
                Variant::of(&programs[0], target(context)).expect("a variant").with_gates(true);
            let mut w = World::with(context, programs, variant, Epoch::FIRST);
            (w.activation, w.gates) = (activation, Some(layout));
            for (bias, fill) in [
                (Some(50 + call), Fill::Uniform),
                (Some(60 + call), Fill::SmallInts),
                (None, Fill::Uniform),
            ] {
                let seeds = Seeds { x: 17 * call, w: 3000 + call };
                w.bias = bias;
                w.prepare(seeds, fill);
                w.call();
                for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                    let fault = w.fault(rank);
                    assert!(
                        report.passed(),
                        "{p} {tile} {layout} {activation} bias {bias:?} {fill:?} rank {rank}: \
                         {report:?} {fault:?}"
                    );
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
    let Some(context) = device("together_every_gate_is_right_on_whole_and_ragged_tiles") else {
        return;
    };
    check_all_gates(
        &context,
        &[
            (256, 512, 512, 2, Chunk::Shard),
            (129, 272, 72, 3, Chunk::Tiles(2)),
            (8, 528, 136, 8, Chunk::Tiles(3)),
        ],
    );
}

#[test]
fn together_every_epilogue_is_right_on_whole_and_ragged_tiles() {
    let Some(context) = device("together_every_epilogue_is_right_on_whole_and_ragged_tiles") else {
        return;
    };
    let cases = [
        (256, 512, 512, 2, Chunk::Shard),
        (129, 264, 72, 3, Chunk::Tiles(2)),
        (8, 520, 136, 8, Chunk::Tiles(3)),
    ];
    check_all_epilogues(&context, &cases);
}
