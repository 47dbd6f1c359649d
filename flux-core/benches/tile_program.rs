//! Time to choose a plan, and to build and verify tile programs, for GPT-3 175B's MLP at m = 8192
//! over 8 ranks.
//!
//! An op builds its own rank's program once; verifying takes the programs of all ranks.

#![allow(missing_docs, reason = "criterion's macros generate undocumented functions")]

use criterion::{Criterion, criterion_group, criterion_main};
use flux_core::machine::Machine;
use flux_core::plan::{Plan, Target};
use flux_core::program::{TileProgram, check};
use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
use std::hint::black_box;

fn tile_program(c: &mut Criterion) {
    let world = WorldSize::new(8).expect("8 is a world size");
    for (op, n, k) in
        [(OpKind::AllGatherGemm, 49152, 12288), (OpKind::GemmReduceScatter, 12288, 49152)]
    {
        let problem = Problem::new(op, 8192, n, k, DType::Bf16, world).expect("a reference shape");
        let target = Target::peer_memory(Machine::H100, &problem);
        let schedule = Plan::ranked(&problem, &target)[0].schedule(&problem, &target);
        let build =
            |rank| TileProgram::build(&problem, rank, &schedule).expect("a reference schedule");
        let mut group = c.benchmark_group(op.name());
        group.bench_function("build", |b| b.iter(|| build(black_box(Rank::new(3)))));
        let programs: Vec<_> = world.ranks().map(build).collect();
        group
            .bench_function("verify_all_ranks", |b| b.iter(|| check::verify(black_box(&programs))));
        group.bench_function("choose_plan", |b| {
            b.iter(|| Plan::ranked(black_box(&problem), &target));
        });
        group.finish();
    }
}

criterion_group!(benches, tile_program);
criterion_main!(benches);
