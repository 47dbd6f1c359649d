//! Bias, activation and gates of the CPU executor: once for each element, in fp32, whatever the
//! world, the tails and who stores the tile.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use flux_core::problem::WeightList;
use flux_core::program::{Chunk, Schedule, TileProgram};
use flux_core::signal::Epoch;
use flux_core::{OpKind, Problem, Rank, TileShape, WorldSize};
use flux_kernels::cpu::{
    Buffers, CpuArgs, CpuWeight, Epilogue, ExecuteError, Executor, Residual, Rows, RowsMut,
};
use flux_kernels::{Activation, Element, GateLayout, WeightLayout};
use half::{bf16, f16};
use std::num::NonZeroUsize;
use std::time::Duration;
use support::oracle::{Global, Numbers};
use support::{Member, alone, run};

const OPS: [OpKind; 3] = OpKind::ALL;
const WORLDS: [u32; 5] = [1, 2, 3, 4, 8];

/// Two row blocks and three column blocks a shard, the last of each a tail, but in a split extent
/// on the first half of the ranks.
fn problem<T: Element>(op: OpKind, world: u32) -> Problem {
    of_columns::<T>(op, 40, world / 2, world)
}

/// The same with `n` columns a rank, and 8 more on the first `more` ranks.
fn of_columns<T: Element>(op: OpKind, n: usize, more: u32, world: u32) -> Problem {
    let (w, more) = (world as usize, 8 * more as usize);
    let (n, k) = match op {
        OpKind::AllGatherGemm => (n * w + more, 24),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (n, 24 * w + more),
    };
    Problem::new(op, 13 * w, n, k, T::DTYPE, WorldSize::new(world).unwrap()).unwrap()
}

const SCHEDULE: Schedule =
    Schedule { chunk: Chunk::Tiles(2), raster_group: 2, ..Schedule::of(TileShape::new(8, 16, 16)) };

/// Runs every rank and hands each result to `check`.
fn each_rank<T: Element>(
    global: &Global<T>,
    workers: usize,
    check: impl Fn(&TileProgram, &[T]) + Sync,
) {
    run(&global.problem, &SCHEDULE, workers, Epoch::FIRST, |mut member: Member<'_>| {
        let (x, w) = global.shard(member.rank);
        for _ in 0..2 {
            let (bias, epilogue) = (global.bias(member.rank), global.epilogue());
            let y = member.call_with(&x, &w, bias, epilogue, Duration::ZERO).unwrap();
            assert_eq!(y.len(), global.y_shape(Rank::new(member.rank)).elements());
            check(member.executor.program(), &y);
        }
    });
}

#[test]
fn integer_biases_are_added_exactly_once() {
    fn check<T: Element>() {
        // Larger than any sum of products, so that a bias that is missing, doubled or of another
        // column shows.
        let bias = |numbers: &mut Numbers| (numbers.next() % 129) as f32 - 64.0;
        for (op, world) in OPS.into_iter().flat_map(|op| WORLDS.map(|world| (op, world))) {
            for activation in Activation::of(op).iter().filter(|activation| activation.is_exact()) {
                let global = Global::<T>::new(problem::<T>(op, world), 5, Numbers::unit)
                    .with_epilogue(5, bias, *activation);
                each_rank(&global, 2, |program, y| global.verify_exact(program.rank.get(), y));
            }
        }
    }
    check::<bf16>();
    check::<f16>();
}

#[test]
fn every_activation_stays_within_the_derived_bound() {
    fn check<T: Element>() {
        for (op, world) in OPS.into_iter().flat_map(|op| WORLDS.map(|world| (op, world))) {
            for &activation in Activation::of(op) {
                // Sums reach both ends of the gates.
                let global = Global::<T>::new(problem::<T>(op, world), 9, |n| 2.0 * n.uniform());
                let global = global.with_epilogue(9, |n| 4.0 * n.uniform(), activation);
                each_rank(&global, 1, |program, y| global.verify(program, y));
                let unbiased = Global { bias: None, ..global };
                each_rank(&unbiased, 1, |program, y| unbiased.verify(program, y));
            }
        }
    }
    check::<bf16>();
    check::<f16>();
}

/// Of one tile's columns of gates and ups, and of several with a tail of half a tile's.
#[test]
fn gates_multiply_their_ups_in_both_layouts() {
    fn check<T: Element>() {
        let bias = |numbers: &mut Numbers| (numbers.next() % 9) as f32 - 4.0;
        for (layout, world) in
            GateLayout::ALL.into_iter().flat_map(|layout| [1, 3, 4].map(|world| (layout, world)))
        {
            for (n, activation) in
                [16, 80].into_iter().flat_map(|n| Activation::ALL.map(|activation| (n, activation)))
            {
                let problem = of_columns::<T>(OpKind::AllGatherGemm, n, 0, world);
                if activation.is_exact() {
                    let global = Global::<T>::new(problem, 7, Numbers::unit)
                        .with_epilogue(7, bias, activation)
                        .gated(layout);
                    each_rank(&global, 2, |program, y| global.verify_exact(program.rank.get(), y));
                }
                let global = Global::<T>::new(problem, 11, |n| 2.0 * n.uniform()).with_epilogue(
                    11,
                    |n| 4.0 * n.uniform(),
                    activation,
                );
                let global = global.gated(layout);
                each_rank(&global, 1, |program, y| global.verify(program, y));
                let unbiased = Global { bias: None, ..global };
                each_rank(&unbiased, 1, |program, y| unbiased.verify(program, y));
            }
        }
    }
    check::<bf16>();
    check::<f16>();
}

#[test]
fn an_epilogue_that_does_not_fit_is_refused_before_anything_is_touched() {
    let p = problem::<bf16>(OpKind::GemmReduceScatter, 1);
    let (program, memory) = alone(&p, 0, &SCHEDULE, Epoch::FIRST);
    let (x, w, bias) = (vec![bf16::ONE; 13 * 24], vec![bf16::ONE; 40 * 24], vec![bf16::ONE; 40]);
    let call = |bias: Option<&[bf16]>, epilogue: Epilogue<'_, bf16>| {
        let mut y = vec![bf16::NAN; 13 * 40];
        let result = Executor::new(program.clone(), NonZeroUsize::MIN).unwrap().run(
            &mut Buffers::default(),
            CpuArgs {
                gathered: None,
                x: Rows { elements: &x, stride: 24 },
                weights: WeightList::one(CpuWeight {
                    w: Rows { elements: &w, stride: 24 },
                    y: RowsMut { elements: &mut y, stride: 40 },
                    bias,
                }),
                layout: WeightLayout::Nk,
                epilogue,
                memory: memory.view(0, Duration::from_mins(1)),
                await_pushed: false,
                op_hash: 0,
            },
        );
        assert!(result.is_ok() || y.iter().all(|y| y.is_nan()));
        result
    };
    let text = call(Some(&bias[..39]), Epilogue::default()).unwrap_err().to_string();
    assert_eq!(text, "bias holds 39 elements with a row stride of 40; 1 rows of 40 need 40");
    let refused =
        call(None, Epilogue { activation: Activation::Gelu, ..Epilogue::default() }).unwrap_err();
    assert_eq!(refused, ExecuteError::Activation { op: p.op(), activation: Activation::Gelu });
    assert_eq!(refused.to_string(), "gemm_rs takes no activation, and gelu was asked for");
    let refused =
        call(None, Epilogue { gates: Some(GateLayout::Interleaved), ..Epilogue::default() })
            .unwrap_err();
    assert!(matches!(refused, ExecuteError::Gates { n: 40, .. }), "{refused}");
    let rows = |elements| Residual::Rows(Rows { elements, stride: 40 });
    let text = call(None, Epilogue { residual: Some(rows(&w[..519])), ..Epilogue::default() })
        .unwrap_err()
        .to_string();
    assert_eq!(text, "residual holds 519 elements with a row stride of 40; 13 rows of 40 need 520");
    assert_eq!(memory.epoch(0), Epoch::FIRST);
    call(Some(&bias), Epilogue { residual: Some(rows(&w[..520])), ..Epilogue::default() }).unwrap();
}
