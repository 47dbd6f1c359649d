//! Rates, printed to be read.

use super::problem;
use crate::common::{World, device, target};
use flux_core::program::Schedule;
use flux_core::signal::Epoch;
use flux_core::{DType, OpKind, TileShape};
use flux_kernels::harness::{Fill, Seeds};

#[test]
fn unsplit_gemm_at_the_reference_shapes_prints_its_rate() {
    let Some(context) = device("unsplit_gemm_at_the_reference_shapes_prints_its_rate") else {
        return;
    };
    for (op, n, k) in
        [(OpKind::AllGatherGemm, 6144, 12288), (OpKind::GemmReduceScatter, 12288, 6144)]
    {
        let p = problem(op, 8192, n, k, DType::Bf16, 1);
        for tile in target(&context).generation.tiles(DType::Bf16.into()) {
            for raster_group in [8, 16] {
                let mut w = World::new(
                    &context,
                    p,
                    &Schedule { raster_group, ..Schedule::of(tile) },
                    Epoch::FIRST,
                );
                let seeds = Seeds { x: 1, w: 2 };
                w.prepare(seeds, Fill::Uniform);
                w.time(5);
                let mut ms = w.time(15);
                ms.sort_by(f32::total_cmp);
                let rate = p.flop_per_rank() as f64 / f64::from(ms[7]) / 1e9;
                println!(
                    "{p} tile {tile} groups of {raster_group} row blocks: {:.4} ms, {rate:.0} \
                     TFLOP/s",
                    ms[7]
                );
                let report = w.verify(seeds, Fill::Uniform)[0];
                assert!(report.passed(), "{report:?}");
            }
        }
    }
}

#[test]
fn few_rows_against_the_reference_weights_print_their_bandwidth() {
    let Some(context) = device("few_rows_against_the_reference_weights_print_their_bandwidth")
    else {
        return;
    };
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
        if target(&context).generation.tiles(DType::Bf16.into()).all(|of_kernel| of_kernel != tile)
        {
            continue;
        }
        let schedule = Schedule { split_k, ..Schedule::of(tile) };
        let mut w = World::new(&context, p, &schedule, Epoch::FIRST);
        w.workers =
            w.workers.min((m as u32).div_ceil(tile_m) * (n as u32).div_ceil(tile_n) * split_k);
        let seeds = Seeds { x: 1, w: 2 };
        w.prepare(seeds, Fill::Uniform);
        // the clocks rise
        w.time(1000);
        let mut ms = w.time(41);
        ms.sort_by(f32::total_cmp);
        println!(
            "{p}, {schedule}, {} CTAs: {:.4} ms, {:.0} GB/s of w",
            w.workers,
            ms[20],
            (n * k * 2) as f64 / f64::from(ms[20]) / 1e6
        );
        assert!(w.verify(seeds, Fill::Uniform)[0].passed());
    }
}
