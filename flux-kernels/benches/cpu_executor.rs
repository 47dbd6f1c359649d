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
use flux_core::{OpKind, Rank};
use flux_testkit::{Case, Values};
use half::bf16;
use std::sync::Barrier;
use std::time::{Duration, Instant};
use support::Member;

fn calls(case: &Case<bf16>, iters: u64) -> Duration {
    let problem = &case.problem;
    let barrier = Barrier::new(problem.world().index());
    let target = Target::peer_memory(Machine::H100, problem);
    let schedule = Plan::ranked(problem, &target)[0].schedule(problem, &target);
    let times = support::run(problem, &schedule, 1, Epoch::FIRST, |mut member: Member<'_>| {
        let (x, w) = (case.x(Rank::new(member.rank)), case.w(Rank::new(member.rank)));
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
            let case = Case::new(op, [1024; 3], world, Values::Reals, 1);
            let flop = case.problem.flop_per_rank() * u64::from(world);
            group.throughput(Throughput::Elements(flop));
            group.bench_function(case.problem.to_string(), |b| {
                b.iter_custom(|iters| calls(&case, iters));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, executor);
criterion_main!(benches);
