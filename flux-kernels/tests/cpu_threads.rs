//! The CPU executor where the system has no threads for its workers. A test binary of its own,
//! because the limit is the process's.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use flux_core::problem::WeightList;
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
use flux_kernels::cpu::{Buffers, CpuArgs, CpuWeight, Epilogue, Executor, Rows, RowsMut};
use flux_kernels::{Stamps, WeightLayout};
use flux_testkit::{Case, Values};
use half::bf16;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::num::NonZeroUsize;
use std::time::Duration;
use support::{alone, sums};

const MIB: u64 = 1 << 20;

/// Address space of this process.
fn address_space() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// What `body` returns where the process may take so much more address space.
fn with_room<R>(bytes: u64, body: impl FnOnce() -> R) -> R {
    let before = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(address_space() + bytes), ..before }).unwrap();
    let result = body();
    setrlimit(Resource::As, before).unwrap();
    result
}

#[test]
fn a_call_for_whose_workers_there_are_no_threads_is_done_by_those_that_there_are() {
    let schedule = Schedule { chunk: Chunk::Tiles(3), ..Schedule::of(TileShape::new(8, 16, 16)) };
    let problem = Problem::new(
        OpKind::GemmReduceScatter,
        40,
        64,
        16,
        DType::Bf16,
        WorldSize::new(1).unwrap(),
    )
    .unwrap();
    let case = Case::<bf16>::of(problem, Values::Integers, 1);
    let (expected, rank) = (case.expected(), Rank::new(0));
    let (x, w) = (case.x(rank), case.w(rank));
    let (program, memory) = alone(&problem, 0, &schedule, Epoch::FIRST);
    let (sums, items) = (sums(&program), program.items.len());
    let executor = Executor::new(program, NonZeroUsize::new(7).unwrap()).unwrap();
    let mut buffers = Buffers::default();
    executor.reserve(&mut buffers).unwrap();
    // A thread takes 2 MiB and a little: there is room for none, for two, and for all.
    for (room, workers) in [(MIB, 1), (5 * MIB, 3), (4096 * MIB, 7)] {
        let mut y = vec![bf16::NAN; 40 * 64];
        let mut stamps = Stamps::default();
        let args = CpuArgs {
            scale: None,
            gathered: None,
            x: Rows { elements: &x, stride: 16 },
            weights: WeightList::one(CpuWeight {
                w: Rows { elements: &w, stride: 16 },
                scale: None,
                y: RowsMut { elements: &mut y, stride: 64 },
            }),
            layout: WeightLayout::Nk,
            epilogue: Epilogue::default(),
            memory: memory.view(0, Duration::from_mins(1)),
            await_pushed: false,
            op_hash: 0,
            stamps: Some(&mut stamps),
        };
        with_room(room, || executor.run(&mut buffers, args)).unwrap();
        case.equals(&expected, sums, rank, &y).unwrap();
        assert_eq!((stamps.workers.len(), stamps.items.len()), (workers, items));
        for (worker, life) in stamps.workers.iter().enumerate() {
            let mut at = life.entered;
            for item in stamps.items.iter().skip(worker).step_by(workers) {
                assert!(at <= item.opened && item.opened <= item.sent, "{item:?} after {at}");
                at = item.sent;
            }
            assert!(at <= life.left, "{life:?} after {at}");
        }
    }
    assert_eq!(memory.epoch(0), Epoch::FIRST.next().next().next(), "each call was closed");
}
