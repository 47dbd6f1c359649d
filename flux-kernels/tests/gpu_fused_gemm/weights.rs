//! Weights of both layouts.

use super::{Case, OPS, is_refused, problem, schedule};
use crate::common::{World, device, programs, target};
use cudarc::driver::CudaContext;
use flux_core::layout::RowLayout;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::{DType, Nodes};
use flux_kernels::harness::{Fill, Seeds};
use flux_kernels::{Variant, WeightLayout};
use std::sync::Arc;

/// Every tile with weights of `[k, n]`: the bits of those of `[n, k]`.
fn check_weights_of_k_and_n(context: &Arc<CudaContext>, cases: &[Case]) {
    for (op, tile) in OPS.into_iter().flat_map(|op| {
        target(context).generation.tiles(DType::Bf16.into()).map(move |tile| (op, tile))
    }) {
        for (&(m, n, k, world, chunk), dtype) in
            cases.iter().zip([DType::Bf16, DType::F16].into_iter().cycle())
        {
            let p = problem(op, m, n, k, dtype, world);
            for rows in [RowLayout::PerShard, RowLayout::Flattened] {
                let schedule = Schedule { rows, ..schedule(tile, chunk) };
                let programs = || programs(p, &schedule, Nodes::apart(p.world()));
                if is_refused(&programs()[0], target(context).generation) {
                    continue;
                }
                let variant = Variant::of(&programs()[0], target(context)).expect("a variant");
                let [nk, kn] = WeightLayout::ALL.map(|weights| {
                    let mut w = World::with(
                        context,
                        programs(),
                        variant.with_weights(weights),
                        Epoch::FIRST,
                    );
                    for fill in [Fill::SmallInts, Fill::Uniform] {
                        let seeds = Seeds { x: 51, w: 61 };
                        w.prepare(seeds, fill);
                        w.call();
                        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
                            let fault = w.fault(rank);
                            assert!(
                                report.passed(),
                                "{p} {tile} {weights} {fill:?} rank {rank}: {report:?} {fault:?}"
                            );
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
    check_weights_of_k_and_n(
        &context,
        &[(129, 328, 200, 1, Chunk::Shard), (64, 8, 8, 1, Chunk::Shard)],
    );
}

#[test]
fn together_weights_of_k_and_n_are_right_on_whole_and_partial_tiles() {
    let Some(context) = device("together_weights_of_k_and_n_are_right_on_whole_and_partial_tiles")
    else {
        return;
    };
    check_weights_of_k_and_n(
        &context,
        &[(256, 512, 512, 2, Chunk::Shard), (129, 264, 72, 3, Chunk::Tiles(2))],
    );
}
