//! `forward` on the host allocates nothing once it has run, on the caller's thread or the mover's.
//! The GEMM crate packs the operands of a tile in a buffer of its own.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

use flux_ops::{
    AllGatherGemm, GemmReduceScatter, KSplit, Plan, RowMapping, TensorMut, TensorRef, TileShape,
};
use flux_transport::{Communicator, Select, Stream, World};
use half::bf16;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counting what all threads take.
struct Counting;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: usize = 2;
const M: usize = 34;
const N: usize = 48;
const K: usize = 32;

const CALLS: usize = 20;
/// Products of one rank's call: one for every shard.
const TILES: usize = RANKS;
/// A tile for each shard.
const WHOLE: Plan = Plan::of(TileShape::new(128, 256, 64));
/// Flattened rows, each tile of two items: 3 row blocks, and column blocks of 24 columns (AG) or
/// 48 (RS).
const CUT: Plan = Plan {
    k_slices: 2,
    k: KSplit::SplitK(2),
    rows: RowMapping::Flattened,
    ..Plan::of(TileShape::new(16, 16, 8))
};

/// One rank's calls: a few to warm up, then counted ones.
fn count(aligned: &Barrier, products: usize, mut forward: impl FnMut()) {
    for _ in 0..3 {
        forward();
    }
    aligned.wait();
    let before = TAKEN.load(Ordering::Relaxed);
    aligned.wait();
    for _ in 0..CALLS {
        forward();
    }
    aligned.wait();
    let taken = TAKEN.load(Ordering::Relaxed) - before;
    aligned.wait();
    assert_eq!(taken, RANKS * CALLS * products, "one packing buffer a product");
}

#[test]
fn forward_allocates_nothing() {
    let aligned = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        for world in World::local(RANKS as u32).unwrap() {
            let aligned = &aligned;
            scope.spawn(move || {
                let comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
                let ones = |elements: usize| vec![bf16::ONE; elements];

                for (plan, products) in [(WHOLE, TILES), (CUT, 3 * 2 * 2)] {
                    let builder = AllGatherGemm::<bf16>::builder(M, N, K).workers(1);
                    let op = builder.plan(plan).build(&comm).unwrap();
                    let (x, w, mut y) =
                        (ones(M / RANKS * K), ones(N / RANKS * K), ones(M * N / RANKS));
                    count(aligned, products, || {
                        let (x, w) = (
                            TensorRef::host(&x, (M / RANKS, K)).unwrap(),
                            TensorRef::host(&w, (N / RANKS, K)).unwrap(),
                        );
                        op.forward(
                            &x,
                            &w,
                            &mut TensorMut::host(&mut y, (M, N / RANKS)).unwrap(),
                            Stream::Host,
                        )
                        .unwrap();
                    });
                    assert!(y.iter().all(|&y| y == bf16::from_f32(K as f32)));
                }

                for (plan, products) in [(WHOLE, TILES), (CUT, 3 * 3 * 2)] {
                    let builder = GemmReduceScatter::<bf16>::builder(M, N, K).workers(1);
                    let op = builder.plan(plan).build(&comm).unwrap();
                    let (x, w, mut y) =
                        (ones(M * K / RANKS), ones(N * K / RANKS), ones(M / RANKS * N));
                    count(aligned, products, || {
                        let (x, w) = (
                            TensorRef::host(&x, (M, K / RANKS)).unwrap(),
                            TensorRef::host(&w, (N, K / RANKS)).unwrap(),
                        );
                        op.forward(
                            &x,
                            &w,
                            &mut TensorMut::host(&mut y, (M / RANKS, N)).unwrap(),
                            Stream::Host,
                        )
                        .unwrap();
                    });
                    assert!(y.iter().all(|&y| y == bf16::from_f32(K as f32)));
                }
            });
        }
    });
}
