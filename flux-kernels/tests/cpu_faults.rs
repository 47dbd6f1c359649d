//! The CPU executor's errors: data that does not arrive, and programs that it refuses.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use flux_core::layout::RowLayout;
use flux_core::layout::{FaultRecord, WorkspaceSize, fault};
use flux_core::problem::WeightList;
use flux_core::program::{NONE, RowSource, Schedule, Sink, TileProgram, WorkItem};
use flux_core::signal::Epoch;
use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
use flux_kernels::cpu::{
    Buffers, CpuArgs, CpuWeight, Epilogue, ExecuteError, Executor, HostMemory, Rows, RowsMut,
};
use flux_kernels::{Element, WeightLayout};
use half::{bf16, f16};
use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::{Memory, alone};

const SCHEDULE: Schedule = Schedule::of(TileShape::new(8, 16, 16));
const NEVER: Duration = Duration::from_hours(1);
const SOON: Duration = Duration::from_millis(50);
const FIRST: Epoch = Epoch::new(41);

fn problem(op: OpKind, world: u32) -> Problem {
    let w = world as usize;
    Problem::new(op, 24 * w, 32 * w, 16 * w, DType::Bf16, WorldSize::new(world).unwrap()).unwrap()
}

/// One call of a rank whose peers do nothing, on zeros.
fn call(
    program: &TileProgram,
    memory: HostMemory<'_>,
    workers: usize,
    await_pushed: bool,
) -> Result<(), ExecuteError> {
    call_of::<bf16>(program, memory, workers, await_pushed)
}

fn call_of<T: Element>(
    program: &TileProgram,
    memory: HostMemory<'_>,
    workers: usize,
    await_pushed: bool,
) -> Result<(), ExecuteError> {
    let p = &program.problem;
    let zeros = |shape: flux_core::problem::Shape| {
        vec![T::from_f32(0.0); (shape.rows * shape.cols) as usize]
    };
    let (x, w, mut y) = (
        zeros(p.x_shape(Rank::new(0))),
        zeros(p.w_shape(Rank::new(0))),
        zeros(p.y_shape(Rank::new(0))),
    );
    Executor::new(program.clone(), NonZeroUsize::new(workers).unwrap())?.run(
        &mut Buffers::default(),
        CpuArgs {
            scale: None,
            gathered: None,
            x: Rows { elements: &x, stride: p.x_shape(Rank::new(0)).cols as usize },
            weights: WeightList::one(CpuWeight {
                scale: None,
                w: Rows { elements: &w, stride: p.w_shape(Rank::new(0)).cols as usize },
                y: RowsMut { elements: &mut y, stride: p.y_shape(Rank::new(0)).cols as usize },
            }),
            layout: WeightLayout::Nk,
            epilogue: Epilogue::default(),
            memory,
            await_pushed,
            op_hash: 0,
            stamps: None,
        },
    )
}

/// Raises every signal that `rank` may wait for in call `epoch`.
fn raise_all(program: &TileProgram, memory: &Memory, epoch: Epoch) {
    for signal in 0..program.signals {
        memory.signal(program.rank.get(), signal, epoch).store(epoch.get(), Ordering::Release);
    }
}

#[test]
fn a_late_rank_gets_a_timeout_that_names_it() {
    for (op, workers) in
        [(OpKind::AllGatherGemm, 1), (OpKind::AllGatherGemm, 3), (OpKind::GemmReduceScatter, 2)]
    {
        let (program, memory) = alone(&problem(op, 3), 1, &SCHEDULE, FIRST);
        // rank 2 has shard slot 1 at rank 1, rank 0 slot 0; only rank 0's rows have arrived
        let signal_of_0 = memory.signal(1, 0, FIRST);
        signal_of_0.store(FIRST.get(), Ordering::Release);
        let started = Instant::now();
        let error = call(&program, memory.view(1, SOON), workers, false).unwrap_err();
        assert!(started.elapsed() >= SOON);
        let expected = ExecuteError::Timeout {
            rank: 1,
            peer: 2,
            wait: fault::SIGNAL,
            signal: 1,
            expected: 41,
            seen: 40,
            epoch: 41,
        };
        assert_eq!(error, expected);
        assert_eq!(
            error.to_string(),
            "rank 1: signal 1 of rank 2 did not come: epoch 41 expected, 40 seen, in call 41"
        );
        let record = FaultRecord {
            state: 1,
            code: fault::TIMEOUT,
            wait: fault::SIGNAL,
            rank: 1,
            peer: 2,
            signal: 1,
            expected: 41,
            seen: 40,
            epoch: 41,
            ..FaultRecord::default()
        };
        assert_eq!(memory.record(1), record);
        assert_eq!((memory.poison(1), memory.epoch(1)), (1, FIRST));
    }
}

#[test]
fn what_there_is_no_memory_for_is_refused_with_its_size() {
    // More than a process can address.
    let big = Problem::new(
        OpKind::AllGatherGemm,
        1 << 24,
        16,
        1 << 24,
        DType::Bf16,
        WorldSize::new(2).unwrap(),
    )
    .unwrap();
    let wide = Problem::new(
        OpKind::GemmReduceScatter,
        2,
        1 << 24,
        1 << 24,
        DType::Bf16,
        WorldSize::new(1).unwrap(),
    )
    .unwrap();
    for (problem, what, bytes) in
        [(big, "a worker's rows of x in fp32", 1_usize << 49), (wide, "weights in fp32", 1 << 50)]
    {
        let program = TileProgram::build(
            &problem,
            Rank::new(0),
            &Schedule::of(TileShape::new(1 << 20, 1 << 20, 1 << 20)),
        )
        .unwrap();
        let refused = Executor::new(program, NonZeroUsize::MIN)
            .unwrap()
            .reserve(&mut Buffers::default())
            .unwrap_err();
        assert_eq!(refused, ExecuteError::OutOfMemory { what, bytes });
        assert!(
            refused.to_string().starts_with(&format!("{bytes} bytes of {what} cannot be had")),
            "{refused}"
        );
    }
}

/// However large the tile, which may be beyond what a process can address.
#[test]
fn a_tiles_buffers_are_no_larger_than_the_operands() {
    for [m, n] in [[1 << 24, 16], [2, 1 << 24]] {
        let problem =
            Problem::new(OpKind::AllGatherGemm, m, n, 8, DType::Bf16, WorldSize::new(2).unwrap())
                .unwrap();
        let program = TileProgram::build(
            &problem,
            Rank::new(0),
            &Schedule::of(TileShape::new(1 << 24, 1 << 24, 1 << 24)),
        )
        .unwrap();
        let executor = Executor::new(program, NonZeroUsize::MIN).unwrap();
        assert!(executor.reserve(&mut Buffers::default()).is_ok(), "{problem}");
    }
}

#[test]
fn a_poisoned_rank_gives_up_at_once_and_publishes_nothing_more() {
    let (program, memory) = alone(&problem(OpKind::GemmReduceScatter, 2), 0, &SCHEDULE, FIRST);
    let first = call(&program, memory.view(0, SOON), 1, false).unwrap_err();
    // Everything has arrived now, and the deadline is far away: the rank stays broken all the same.
    raise_all(&program, &memory, FIRST);
    memory.signal(1, 0, FIRST).store(7, Ordering::Release);
    let started = Instant::now();
    let second = call(&program, memory.view(0, NEVER), 2, false).unwrap_err();
    assert!(started.elapsed() < Duration::from_mins(1));
    assert_eq!(second, first);
    assert_eq!(
        memory.signal(1, 0, FIRST).load(Ordering::Acquire),
        7,
        "a signal after a failed call"
    );
    assert_eq!(memory.epoch(0), FIRST);
}

#[test]
fn the_abort_word_ends_a_wait() {
    let (program, memory) = alone(&problem(OpKind::AllGatherGemm, 2), 0, &SCHEDULE, FIRST);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(SOON);
            memory.abort(0).store(9, Ordering::Release);
        });
        call(&program, memory.view(0, NEVER), 2, false).unwrap_err()
    });
    assert_eq!(
        error,
        ExecuteError::Aborted {
            rank: 0,
            peer: 1,
            wait: fault::SIGNAL,
            signal: 0,
            abort: 9,
            epoch: 41
        }
    );
    let record = memory.record(0);
    assert_eq!((record.state, record.code, record.abort), (1, fault::ABORTED, 9));
}

#[test]
fn a_mover_that_does_not_finish_keeps_the_call_open() {
    let (program, memory) = alone(&problem(OpKind::AllGatherGemm, 2), 1, &SCHEDULE, FIRST);
    raise_all(&program, &memory, FIRST);
    let error = call(&program, memory.view(1, SOON), 1, true).unwrap_err();
    let expected = ExecuteError::Timeout {
        rank: 1,
        peer: 1,
        wait: fault::PUSHED,
        signal: 0,
        expected: 41,
        seen: 40,
        epoch: 41,
    };
    assert_eq!(error, expected);
}

#[test]
fn a_signal_of_any_other_time_is_not_taken_for_this_call() {
    for stale in [
        FIRST.before(1),
        FIRST.before(2),
        FIRST.before(1 << 31),
        FIRST.before((1 << 31) + 7),
        FIRST.before(u32::MAX),
    ] {
        let (program, memory) = alone(&problem(OpKind::AllGatherGemm, 2), 0, &SCHEDULE, FIRST);
        for signal in 0..program.signals {
            memory.signal(0, signal, FIRST).store(stale.get(), Ordering::Release);
        }
        let error = call(&program, memory.view(0, SOON), 1, false).unwrap_err();
        assert!(
            matches!(error, ExecuteError::Timeout { seen, .. } if seen == stale.get()),
            "{stale}: {error}"
        );
    }
}

#[test]
fn operands_that_do_not_fit_are_refused_before_anything_is_touched() {
    let p = problem(OpKind::GemmReduceScatter, 1);
    let (program, memory) = alone(&p, 0, &SCHEDULE, FIRST);
    let (x, w) = (vec![bf16::ONE; 24 * 16], vec![bf16::ONE; 32 * 16]);
    let run = |x_len: usize, x_stride: usize, y_len: usize| {
        let mut y = vec![bf16::ZERO; y_len];
        let result = Executor::new(program.clone(), NonZeroUsize::MIN).unwrap().run(
            &mut Buffers::default(),
            CpuArgs {
                scale: None,
                gathered: None,
                x: Rows { elements: &x[..x_len], stride: x_stride },
                weights: WeightList::one(CpuWeight {
                    scale: None,
                    w: Rows { elements: &w, stride: 16 },
                    y: RowsMut { elements: &mut y, stride: 32 },
                }),
                layout: WeightLayout::Nk,
                epilogue: Epilogue::default(),
                memory: memory.view(0, SOON),
                await_pushed: false,
                op_hash: 0,
                stamps: None,
            },
        );
        assert!(result.is_ok() || y.iter().all(|&y| y == bf16::ZERO));
        result
    };
    let text = run(24 * 16 - 1, 16, 24 * 32).unwrap_err().to_string();
    assert_eq!(text, "x holds 383 elements with a row stride of 16; 24 rows of 16 need 384");
    assert!(matches!(run(24 * 16, 15, 24 * 32), Err(ExecuteError::Operand { operand: "x", .. })));
    assert!(matches!(
        run(24 * 16, usize::MAX, 24 * 32),
        Err(ExecuteError::Operand { operand: "x", .. })
    ));
    assert!(matches!(
        run(24 * 16, 16, 24 * 32 - 1),
        Err(ExecuteError::Operand { operand: "y", .. })
    ));
    assert_eq!(memory.epoch(0), FIRST);
    run(24 * 16, 16, 24 * 32).unwrap();
    assert_eq!(memory.epoch(0), FIRST.next());
}

#[test]
fn a_workspace_or_type_that_does_not_fit_is_refused() {
    let (program, _) = alone(&problem(OpKind::GemmReduceScatter, 2), 0, &SCHEDULE, FIRST);
    let small = WorkspaceSize { signals: program.signals - 1, ..program.workspace() };
    let memory = Memory::new(2, small, FIRST);
    assert!(matches!(
        call(&program, memory.view(0, SOON), 1, false),
        Err(ExecuteError::Workspace { .. })
    ));
    let memory = Memory::new(1, program.workspace(), FIRST);
    assert!(matches!(
        call(&program, memory.view(0, SOON), 1, false),
        Err(ExecuteError::Workspace { ranks: 1, world: 2, .. })
    ));
    let memory = Memory::new(2, program.workspace(), FIRST);
    let error = call_of::<f16>(&program, memory.view(0, SOON), 1, false).unwrap_err();
    assert_eq!(
        error,
        ExecuteError::DType {
            program: DType::Bf16.into(),
            operands: DType::F16,
            outputs: DType::F16
        }
    );
}

/// A name and a way to break a program.
type Mutation = (&'static str, fn(&mut TileProgram));

#[test]
fn a_program_with_an_index_that_does_not_exist_is_refused() {
    let mutations: [Mutation; 13] = [
        ("rows", |p| p.items[0].rows = 9),
        ("row", |p| p.items[0].row = 24),
        ("unaligned row", |p| p.items[0].row = 4),
        ("column", |p| p.items[0].col = 1 << 20),
        ("source", |p| p.items[0].a_outer = 2),
        ("gather place", |p| (p.items[0].a_source, p.items[0].a_outer) = (RowSource::Gather, 1)),
        ("slot", |p| p.items[0].slot = p.slots_per_source),
        ("added slot", |p| {
            p.items.iter_mut().for_each(|item| item.partial_slot = p.slots_per_source);
        }),
        ("signal", |p| p.items[0].raise = p.signals),
        ("counter", |p| p.items[0].counter = p.counters),
        ("sink", |p| p.items[0].sink = Sink::Copy),
        ("double store", |p| {
            let last = p.items.len() - 1;
            p.items[last] = p.items[last - 1];
            assert_eq!(p.items[last].sink, Sink::Reduce);
        }),
        ("await", |p| p.awaits[0].signal = p.signals),
    ];
    refuses_all(&SCHEDULE, &mutations);
}

#[test]
fn folds_that_store_the_same_rows_are_refused() {
    // 24 rows of a shard are reduced 16 and 8 at a time, in two column blocks.
    let mutations: [Mutation; 5] = [
        ("again", |p| {
            let [first, second] = reductions(p);
            *second = *first;
        }),
        ("from the first's last row on", |p| reductions(p)[1].row = 15),
        ("from a row of the first on, to its end", |p| reductions(p)[1].row = 8),
        ("over the second's first row", |p| reductions(p)[0].rows = 17),
        ("around an earlier reduction", |p| {
            (reductions(p)[0].row, reductions(p)[0].rows) = (8, 4);
            (reductions(p)[1].row, reductions(p)[1].rows) = (0, 24);
        }),
    ];
    refuses_all(&Schedule { rows: RowLayout::Flattened, ..SCHEDULE }, &mutations);
}

/// Its copies are of rows that a GEMM-ReduceScatter's `y` does not have.
#[test]
fn a_program_of_another_op_is_refused() {
    let schedule = Schedule { rows: RowLayout::FlattenedTwoExchanges, ..SCHEDULE };
    let (mut program, _) = alone(&problem(OpKind::GemmAllReduce, 2), 0, &schedule, FIRST);
    Executor::new(program.clone(), NonZeroUsize::MIN).unwrap();
    program.problem = problem(OpKind::GemmReduceScatter, 2);
    for item in program.items.iter_mut().filter(|item| item.sink == Sink::ReduceRows) {
        (item.raise, item.counter) = (NONE, NONE);
    }
    let result = Executor::new(program, NonZeroUsize::MIN);
    assert!(matches!(result, Err(ExecuteError::Program(_))), "{result:?}");
}

/// The reductions of a program's first columns.
fn reductions(program: &mut TileProgram) -> [&mut WorkItem; 2] {
    let mut reductions =
        program.items.iter_mut().filter(|item| item.sink == Sink::ReduceRows && item.col == 0);
    [reductions.next().unwrap(), reductions.next().unwrap()]
}

/// Fails unless an executor takes the program of this schedule, and refuses each of these changes
/// to it.
fn refuses_all(schedule: &Schedule, mutations: &[Mutation]) {
    let (program, _) = alone(&problem(OpKind::GemmReduceScatter, 2), 0, schedule, FIRST);
    Executor::new(program.clone(), NonZeroUsize::MIN).unwrap();
    for (name, mutate) in mutations {
        let mut broken = program.clone();
        mutate(&mut broken);
        let result = Executor::new(broken, NonZeroUsize::MIN);
        assert!(matches!(result, Err(ExecuteError::Program(_))), "{name}");
    }
}
