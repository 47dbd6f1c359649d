//! Time to build, and to verify, the tile programs of the largest reference shapes, GPT-3 175B's
//! MLP at m = 8192 over 8 ranks, and to choose how they are cut and sent where chunks are messages.
//!
//! An op chooses and builds its own rank's program once, when it is made; verifying takes the
//! programs of all ranks.

#![allow(missing_docs, reason = "criterion's macros generate undocumented functions")]

use criterion::{Criterion, criterion_group, criterion_main};
use flux_core::program::{Channels, Schedule, Sending, TileProgram, check};
use flux_core::{DType, Nodes, OpKind, Problem, Rank, WorldSize};
use std::hint::black_box;

fn tile_program(c: &mut Criterion) {
    let world = WorldSize::new(8).expect("8 is a world size");
    for (op, n, k) in [(OpKind::AllGatherGemm, 49152, 12288), (OpKind::GemmReduceScatter, 12288, 49152)] {
        let problem = Problem::new(op, 8192, n, k, DType::Bf16, world).expect("a reference shape");
        let schedule = Schedule::heuristic(&problem);
        let build = |rank| TileProgram::build(&problem, rank, &schedule).expect("a reference schedule");
        let mut group = c.benchmark_group(op.name());
        group.bench_function("build", |b| b.iter(|| build(black_box(Rank::new(3)))));
        let programs: Vec<_> = world.ranks().map(build).collect();
        group.bench_function("verify_all_ranks", |b| b.iter(|| check::verify(black_box(&programs))));
        // NCCL's on one host: 4 channels for each message.
        let channels = Channels { all: 32, each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20, network: false };
        let choose = |problem: &Problem| {
            let sending = Sending::heuristic(problem, &channels, world.peers(), None);
            Schedule::in_messages(problem, &channels, sending, Nodes::apart(world))
        };
        group.bench_function("choose_messages", |b| b.iter(|| choose(black_box(&problem))));
        group.finish();
    }
}

criterion_group!(benches, tile_program);
criterion_main!(benches);
