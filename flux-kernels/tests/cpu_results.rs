//! The results of the CPU executor: the product, whatever the ranks' timing, the schedule and the
//! number of workers.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use flux_core::layout::RowLayout;
use flux_core::layout::WorkspaceSize;
use flux_core::problem::WeightList;
use flux_core::program::{Chunk, Schedule, TileProgram};
use flux_core::signal::Epoch;
use flux_core::{OpKind, Problem, Rank, TileShape, WorldSize};
use flux_kernels::cpu::{Buffers, CpuArgs, CpuWeight, Epilogue, Executor, Rows, RowsMut};
use flux_kernels::harness::data::{RAW_END, raw};
use flux_kernels::{Element, WeightLayout};
use flux_testkit::strategies::{chunks, schedules};
use flux_testkit::{Case, Expected, Values};
use half::{bf16, f16};
use proptest::prelude::*;
use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::time::Duration;
use support::{Member, Memory, alone, run, sums};

const OPS: [OpKind; 3] = OpKind::ALL;
const NO_PAUSE: Duration = Duration::ZERO;

/// A problem with tails on every side: `n` columns and `k` per rank where they are split, and 8
/// more on the first half of the ranks.
fn problem<T: Element>(op: OpKind, world: u32, m: usize, n: usize, k: usize) -> Problem {
    let w = world as usize;
    let (n, k) = match op {
        OpKind::AllGatherGemm => (n * w + w / 2 * 8, k),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (n, k * w + w / 2 * 8),
    };
    Problem::new(op, m, n, k, T::DTYPE, WorldSize::new(world).unwrap()).unwrap()
}

/// Cases of integers, each with its result.
fn integers<T: Element>(problems: impl Iterator<Item = Problem>) -> Vec<(Case<T>, Expected)> {
    let case = |(seed, problem)| Case::of(problem, Values::Integers, seed);
    (0..).zip(problems).map(case).map(|case| (case.clone(), case.expected())).collect()
}

/// One call on a rank's operands.
fn call<T: Element>(member: &mut Member<'_>, case: &Case<T>, pause: Duration) -> Vec<T> {
    let rank = Rank::new(member.rank);
    member.call(&case.x(rank), &case.w(rank), pause).unwrap()
}

/// One call on integers, compared for equality.
fn exact_call<T: Element>(
    member: &mut Member<'_>,
    (case, expected): &(Case<T>, Expected),
    pause: Duration,
) {
    let y = call(member, case, pause);
    let program = member.executor.program();
    case.equals(expected, sums(program), program.rank, &y).unwrap();
}

/// One call on random numbers on each rank, within the bound.
fn close_calls<T: Element>(problem: Problem, schedule: &Schedule) {
    let case = Case::<T>::of(problem, Values::Reals, 7);
    let expected = case.expected();
    run(&problem, schedule, 1, Epoch::FIRST, |mut member: Member<'_>| {
        let y = call(&mut member, &case, NO_PAUSE);
        let program = member.executor.program();
        case.is_close(&expected, sums(program), program.rank, &y).unwrap();
    });
}

fn schedule(tile_m: u32, tile_n: u32, chunk: Chunk) -> Schedule {
    Schedule { chunk, raster_group: 2, ..Schedule::of(TileShape::new(tile_m, tile_n, 16)) }
}

/// `calls` calls on changing integers, each compared for equality; all memory that a call may read
/// is NaN before it.
fn exact_calls<T: Element>(
    problem: Problem,
    schedule: &Schedule,
    workers: usize,
    first: Epoch,
    calls: usize,
) {
    let cases = integers::<T>(std::iter::repeat_n(problem, calls));
    let barrier = Barrier::new(problem.world().index());
    run(&problem, schedule, workers, first, |mut member: Member<'_>| {
        for case in &cases {
            barrier.wait();
            member.memory.fill_with_nan(member.rank);
            barrier.wait();
            exact_call(&mut member, case, NO_PAUSE);
        }
    });
}

/// A tile's buffers are no larger than the operands, however large the tile.
#[test]
fn tiles_that_are_larger_than_the_operands_cost_nothing() {
    let schedule = Schedule::of(TileShape::new(1 << 24, 1 << 24, 1 << 24));
    for workers in [1, 3] {
        exact_calls::<bf16>(
            problem::<bf16>(OpKind::AllGatherGemm, 2, 42, 40, 24),
            &schedule,
            workers,
            Epoch::FIRST,
            2,
        );
        exact_calls::<bf16>(
            problem::<bf16>(OpKind::GemmReduceScatter, 1, 21, 40, 24),
            &schedule,
            workers,
            Epoch::FIRST,
            2,
        );
    }
}

#[test]
fn integers_are_exact_for_every_world_type_and_chunk() {
    for op in OPS {
        for world in 1..=8 {
            for chunk in [Chunk::Shard, Chunk::Tiles(1), Chunk::Tiles(2)] {
                exact_calls::<bf16>(
                    problem::<bf16>(op, world, 21 * world as usize - 1, 40, 24),
                    &schedule(8, 16, chunk),
                    1,
                    Epoch::FIRST,
                    3,
                );
                exact_calls::<f16>(
                    problem::<f16>(op, world, 5 * world as usize, 24, 16),
                    &schedule(8, 16, chunk),
                    2,
                    Epoch::FIRST,
                    3,
                );
            }
        }
    }
}

/// Schedules of small shards: flattened rows, split-K and slices of `k`.
fn small(rows: RowLayout, split_k: u32, k_slices: u32) -> Schedule {
    Schedule {
        rows,
        split_k,
        k_slices,
        chunk: Chunk::Tiles(1),
        group: 2,
        ..Schedule::of(TileShape::new(16, 24, 16))
    }
}

#[test]
fn integers_are_exact_for_small_shards_however_they_are_cut() {
    for op in OPS {
        for world in [1, 2, 3, 4, 8] {
            for m in [1, 2, 5, 8, 21, 31, 64] {
                for schedule in [
                    small(RowLayout::Flattened, 1, 1),
                    small(RowLayout::Flattened, 3, 2),
                    small(RowLayout::Flattened, 2, 5),
                    small(RowLayout::PerShard, 3, 1),
                    small(RowLayout::PerShard, 2, 3),
                ] {
                    // tails of columns and of steps along k
                    exact_calls::<bf16>(
                        problem::<bf16>(op, world, m, 40, 72),
                        &schedule,
                        2,
                        Epoch::FIRST,
                        2,
                    );
                }
            }
        }
    }
}

#[test]
fn random_numbers_stay_within_the_derived_bound_for_small_shards() {
    for op in OPS {
        for (world, m) in [(1, 8), (2, 9), (4, 64), (8, 5), (8, 17)] {
            for schedule in [
                small(RowLayout::Flattened, 1, 1),
                small(RowLayout::Flattened, 3, 4),
                small(RowLayout::PerShard, 4, 2),
            ] {
                close_calls::<bf16>(problem::<bf16>(op, world, m, 40, 136), &schedule);
            }
        }
    }
}

#[test]
fn epochs_run_through_zero() {
    for op in OPS {
        exact_calls::<bf16>(
            problem::<bf16>(op, 3, 50, 24, 16),
            &schedule(8, 16, Chunk::Tiles(1)),
            1,
            Epoch::new(u32::MAX - 2),
            7,
        );
    }
}

#[test]
fn random_numbers_stay_within_the_derived_bound() {
    let schedule = schedule(16, 32, Chunk::Tiles(2));
    for op in OPS {
        close_calls::<bf16>(problem::<bf16>(op, 4, 75, 72, 136), &schedule);
        close_calls::<f16>(problem::<f16>(op, 4, 75, 72, 136), &schedule);
    }
}

/// The outputs of all ranks in three calls without a barrier between them, each rank late by up to
/// `pause` of its own.
fn outputs(
    problem: Problem,
    schedule: &Schedule,
    workers: usize,
    pause: Duration,
) -> Vec<Vec<Vec<bf16>>> {
    let case = Case::<bf16>::of(problem, Values::Reals, 3);
    run(&problem, schedule, workers, Epoch::FIRST, |mut member: Member<'_>| {
        let rank = member.rank;
        let nap = |number| pause.mul_f32(raw(100, rank, number) as f32 / RAW_END as f32);
        (0..3)
            .map(|number| {
                std::thread::sleep(nap(2 * number));
                call(&mut member, &case, nap(2 * number + 1))
            })
            .collect()
    })
}

#[test]
fn results_are_the_same_bits_for_any_run_timing_chunk_and_number_of_workers() {
    for op in OPS {
        let problem = problem::<bf16>(op, 5, 173, 56, 104);
        let expected = outputs(problem, &schedule(16, 16, Chunk::Shard), 1, NO_PAUSE);
        for workers in [1, 2, 3, 7] {
            for (chunk, pause) in
                [(Chunk::Shard, NO_PAUSE), (Chunk::Tiles(1), Duration::from_millis(3))]
            {
                let got = outputs(problem, &schedule(16, 16, chunk), workers, pause);
                assert!(got == expected, "{problem}, {workers} workers, {chunk}");
                let same = got.iter().all(|y| *y == got[0]);
                assert!(
                    same || op != OpKind::GemmAllReduce,
                    "{problem}: ranks have different bits"
                );
            }
        }
    }
}

#[test]
fn small_shards_give_the_same_bits_for_any_run_timing_and_number_of_workers() {
    for op in OPS {
        let problem = problem::<bf16>(op, 5, 35, 56, 104);
        for (rows, split_k) in
            [(RowLayout::Flattened, 1), (RowLayout::Flattened, 3), (RowLayout::PerShard, 3)]
        {
            let expected = outputs(problem, &small(rows, split_k, 1), 1, NO_PAUSE);
            for (workers, k_slices, pause) in [
                (1, 3, NO_PAUSE),
                (2, 1, Duration::from_millis(3)),
                (5, 4, Duration::from_millis(3)),
            ] {
                let got = outputs(problem, &small(rows, split_k, k_slices), workers, pause);
                assert!(
                    got == expected,
                    "{problem}, {workers} workers, {k_slices} slices, {split_k} split_k, {rows:?}"
                );
            }
        }
    }
}

#[test]
fn each_rank_in_turn_may_be_late() {
    for op in OPS {
        let problem = problem::<bf16>(op, 4, 36, 24, 16);
        let cases = integers::<bf16>(std::iter::repeat_n(problem, 8));
        run(
            &problem,
            &schedule(8, 8, Chunk::Tiles(1)),
            1,
            Epoch::FIRST,
            |mut member: Member<'_>| {
                for (call, case) in (0u32..).zip(&cases) {
                    let late = call % 4 == member.rank;
                    let pause = if late { Duration::from_millis(20) } else { NO_PAUSE };
                    if call >= 4 {
                        std::thread::sleep(pause);
                    }
                    exact_call(&mut member, case, pause);
                }
            },
        );
    }
}

#[test]
fn strided_operands_are_read_and_written_in_place() {
    const PAD: usize = 3;
    fn padded(dense: &[bf16], cols: usize) -> Vec<bf16> {
        dense.chunks(cols).flat_map(|row| row.iter().copied().chain([bf16::NAN; PAD])).collect()
    }
    let problem = problem::<bf16>(OpKind::GemmReduceScatter, 1, 13, 24, 16);
    let (case, rank) = (Case::of(problem, Values::Integers, 1), Rank::new(0));
    let (program, memory) = alone(&problem, 0, &schedule(8, 16, Chunk::Shard), Epoch::FIRST);
    let sums = sums(&program);
    let (x, w) = (padded(&case.x(rank), 16), padded(&case.w(rank), 16));
    let mark = bf16::from_f32(77.0);
    let mut y = vec![mark; 13 * (24 + PAD) - PAD];
    let args = CpuArgs {
        scale: None,
        gathered: None,
        x: Rows { elements: &x[..x.len() - PAD], stride: 16 + PAD },
        weights: WeightList::one(CpuWeight {
            scale: None,
            w: Rows { elements: &w, stride: 16 + PAD },
            y: RowsMut { elements: &mut y, stride: 24 + PAD },
        }),
        layout: WeightLayout::Nk,
        epilogue: Epilogue::default(),
        memory: memory.view(0, Duration::from_mins(1)),
        await_pushed: false,
        op_hash: 1,
        stamps: None,
    };
    Executor::new(program, NonZeroUsize::MIN).unwrap().run(&mut Buffers::default(), args).unwrap();
    y.extend([mark; PAD]);
    assert!(
        y.chunks(24 + PAD).all(|row| row[24..] == [mark; PAD]),
        "the columns beyond y were written"
    );
    let dense: Vec<bf16> = y.chunks(24 + PAD).flat_map(|row| row[..24].to_vec()).collect();
    case.equals(&case.expected(), sums, rank, &dense).unwrap();
}

#[test]
fn operations_of_different_sizes_take_turns_on_one_workspace() {
    const WORLD: u32 = 3;
    let schedule = schedule(8, 16, Chunk::Tiles(1));
    let problems = [
        problem::<bf16>(OPS[0], WORLD, 33 * WORLD as usize, 40, 48),
        problem::<bf16>(OPS[1], WORLD, 9 * WORLD as usize - 2, 24, 16),
        problem::<bf16>(OPS[0], WORLD, 7, 16, 8),
        problem::<bf16>(OPS[1], WORLD, 40 * WORLD as usize, 56, 24),
    ];
    let sizes = problems
        .map(|problem| TileProgram::build(&problem, Rank::new(0), &schedule).unwrap().workspace());
    let size = sizes.into_iter().reduce(WorkspaceSize::max).unwrap();
    let memory = Memory::new(WORLD, size, Epoch::new(u32::MAX - 5));
    let cases = integers::<bf16>(problems.into_iter().cycle().take(24));
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let (memory, cases) = (&memory, &cases);
            scope.spawn(move || {
                let mut members = problems.map(|problem| {
                    let program = TileProgram::build(&problem, Rank::new(rank), &schedule).unwrap();
                    let executor = Executor::new(program, NonZeroUsize::MIN).unwrap();
                    Member {
                        rank,
                        memory,
                        executor,
                        buffers: Buffers::default(),
                        deadline: Duration::from_mins(1),
                    }
                });
                for (call, case) in cases.iter().enumerate() {
                    exact_call(&mut members[call % 4], case, NO_PAUSE);
                }
            });
        }
    });
}

fn tiles() -> impl Strategy<Value = TileShape> {
    (1..4_u32, 1..4_u32).prop_map(|(m, n)| TileShape::new(m * 8, n * 8, 8))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 32, ..ProptestConfig::default() })]

    #[test]
    fn any_problem_under_any_schedule_is_exact(
        op in prop::sample::select(&OPS[..]),
        world in 1..=8u32,
        m in 1..300usize,
        n in 1..6usize,
        k in 1..7usize,
        workers in 1..4usize,
        schedule in schedules(tiles(), chunks(), |least| least..=least + 3),
        first in any::<u32>(),
    ) {
        exact_calls::<bf16>(
            problem::<bf16>(op, world, m, n * 8, k * 8),
            &schedule,
            workers,
            Epoch::new(first),
            2,
        );
    }
}
