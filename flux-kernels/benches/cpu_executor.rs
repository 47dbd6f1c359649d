//! Time of one call of the CPU executor: all ranks of a world as threads over plain memory, movers
//! included.
//!
//! A sample is `iters` calls in a row on every rank, decided by one leader, from a common start to
//! the last rank's end.

#![allow(missing_docs, reason = "criterion's macros make undocumented items")]
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run should stop")]

#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use flux_core::machine::Machine;
use flux_core::plan::{Plan, Target};
use flux_core::signal::Epoch;
use flux_core::{DType, OpKind, Problem, WorldSize};
use half::bf16;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use support::Member;
use support::oracle::{Global, Numbers};

fn calls(problem: &Problem, global: &Global<bf16>, iters: u64) -> Duration {
    let barrier = Barrier::new(problem.world().index());
    let target = Target::peer_memory(Machine::H100, problem);
    let schedule = Plan::ranked(problem, &target)[0].schedule(problem, &target);
    let times = support::run(problem, &schedule, 1, Epoch::FIRST, |mut member: Member<'_>| {
        let (x, w) = global.shard(member.rank);
        barrier.wait();
        let start = Instant::now();
        for _ in 0..iters {
            std::hint::black_box(member.call(&x, &w, Duration::ZERO).unwrap());
        }
        start.elapsed()
    });
    times.into_iter().max().unwrap_or_default()
}

fn executor(c: &mut Criterion) {
    let mut group = c.benchmark_group("cpu_executor");
    group.sample_size(10);
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for world in [1, 8] {
            let world = WorldSize::new(world).unwrap();
            let problem = Problem::new(op, 1024, 1024, 1024, DType::Bf16, world).unwrap();
            let global = Global::new(problem, 1, Numbers::uniform);
            group
                .throughput(Throughput::Elements(problem.flop_per_rank() * u64::from(world.get())));
            group.bench_function(problem.to_string(), |b| {
                b.iter_custom(|iters| calls(&problem, &global, iters));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, executor);
criterion_main!(benches);
