//! The fused kernel on one GPU. Ranks share the device, so both ops, the movers and the close of a
//! call run without a transport.

#![allow(clippy::print_stdout, reason = "a skipped test says why, a rate is there to be read")]

#[path = "../common/mod.rs"]
mod common;
mod epilogues;
mod failures;
mod loading;
mod rates;
mod scales;
mod schedules;
mod weights;

use common::{World, programs, target};
use cudarc::driver::CudaContext;
use flux_core::program::{Chunk, Schedule, TileProgram};
use flux_core::signal::Epoch;
use flux_core::tile::Generation;
use flux_core::{Nodes, Numerics, OpKind, Problem, TileShape, WorldSize};
use flux_kernels::Variant;
use flux_kernels::cuda::Pace;
use flux_kernels::harness::{Fill, Seeds};
use std::sync::Arc;

/// The usual tile.
const TILE: TileShape = TileShape::new(128, 256, 64);
const OPS: [OpKind; 3] = OpKind::ALL;

fn problem(
    op: OpKind,
    m_shard: usize,
    n: usize,
    k: usize,
    numerics: impl Into<Numerics>,
    world: u32,
) -> Problem {
    let world = WorldSize::new(world).expect("a world");
    let w = world.index();
    let (n, k) = match op {
        OpKind::AllGatherGemm => (n * w, k),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (n, k * w),
    };
    Problem::new(op, m_shard * w, n, k, numerics, world).expect("a problem")
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
    assert_eq!(
        fitting.is_empty(),
        is_refused(program, target(context).generation),
        "{p}, {schedule}"
    );
    for variant in fitting {
        check_on(context, programs(p, schedule, nodes), variant, schedule);
    }
}

fn check_on(
    context: &Arc<CudaContext>,
    programs: Vec<TileProgram>,
    variant: Variant,
    schedule: &Schedule,
) {
    check_with(context, programs, variant, schedule, Pace::default());
}

fn check_with(
    context: &Arc<CudaContext>,
    programs: Vec<TileProgram>,
    variant: Variant,
    schedule: &Schedule,
    pace: Pace,
) {
    let p = programs[0].problem;
    let mut w = World::with(context, programs, variant, Epoch::FIRST);
    w.pace = pace;
    for (call, fill) in [(1, Fill::SmallInts), (2, Fill::Uniform), (3, Fill::SmallInts)] {
        let seeds = Seeds { x: 7 * call, w: 1000 + call };
        w.prepare(seeds, fill);
        w.call();
        for (rank, report) in w.verify(seeds, fill).iter().enumerate() {
            let fault = w.fault(rank);
            assert!(
                report.passed(),
                "{p}, {schedule}, call {call} {fill:?} rank {rank}: {report:?} {fault:?}"
            );
        }
    }
}

/// Whether there is no kernel for it: the largest tiles have no buffer for the whole tile, which
/// scattered rows need, and some swap-AB tiles do not send partial tiles.
fn is_refused(program: &TileProgram, generation: Generation) -> bool {
    let sends = program.problem.op().reduces() && program.problem.world().peers() > 0;
    sends
        && !if program.rows.is_flattened() {
            generation.scatters(program.tile, program.problem.numerics())
        } else {
            generation.sends_partials(program.tile, program.problem.numerics())
        }
}
