//! Host time of a call besides its work: of a first call with an `m` at the largest shapes, and of
//! a call with a known `m` at the smallest.
//!
//! The ranks are on the host transport, which plans as for an H100. Another `m` is taken each time.

#![allow(missing_docs, reason = "criterion's macros generate undocumented functions")]
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run should stop")]

use criterion::{Criterion, criterion_group, criterion_main};
use flux_ops::{AllGatherGemm, GemmAllReduce, GemmReduceScatter, TensorMut, TensorRef, bf16};
use flux_transport::{Communicator, Select, Stream, World};
use std::hint::black_box;

const MAX_M: usize = 8192;

/// Rank 0's op of 4, whose peers are gone when it is only asked for programs.
macro_rules! of_rank_0 {
    ($op:ty, $n:expr, $k:expr) => {{
        let rank = |world: World| {
            let comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
            <$op>::builder(MAX_M, $n, $k).build(&comm).unwrap()
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = World::local(4)
                .unwrap()
                .into_iter()
                .map(|world| scope.spawn(move || rank(world)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).next().unwrap()
        })
    }};
}

fn rows(c: &mut Criterion) {
    let gather = of_rank_0!(AllGatherGemm<bf16>, 57344, 8192);
    let scatter = of_rank_0!(GemmReduceScatter<bf16>, 12288, 49152);
    let all = of_rank_0!(GemmAllReduce<bf16>, 8192, 28672);
    let mut m = 0;
    let mut next = || {
        m = (m + 1) % 256;
        MAX_M - m
    };
    c.bench_function("new m, ag_gemm n=57344 k=8192 tp=4", |b| {
        b.iter(|| gather.execution(black_box(next())).unwrap());
    });
    c.bench_function("new m, gemm_rs n=12288 k=49152 tp=4", |b| {
        b.iter(|| scatter.execution(black_box(next())).unwrap());
    });
    c.bench_function("new m, gemm_ar n=8192 k=28672 tp=4", |b| {
        b.iter(|| all.execution(black_box(next())).unwrap());
    });

    let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
    let op = AllGatherGemm::<bf16>::builder(MAX_M, 8, 8).workers(1).build(&comm).unwrap();
    let (x, w, mut y) = ([bf16::ONE; 64], [bf16::ONE; 64], [bf16::ZERO; 64]);
    let mut m = 0;
    c.bench_function("known m, a call of 1 to 8 rows on the host", |b| {
        b.iter(|| {
            m = m % 8 + 1;
            let (x, w) = (
                TensorRef::host(&x[..8 * m], (m, 8)).unwrap(),
                TensorRef::host(&w, (8, 8)).unwrap(),
            );
            op.forward(
                &x,
                &w,
                &mut TensorMut::host(&mut y[..8 * m], (m, 8)).unwrap(),
                Stream::Host,
            )
            .unwrap();
        });
    });
}

criterion_group!(benches, rows);
criterion_main!(benches);
