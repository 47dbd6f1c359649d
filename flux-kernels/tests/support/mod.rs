//! Ranks as threads over plain memory: what the executor needs of a transport, and nothing else.
//!
//! Invariant: words are written only as the signal protocol says, so a test that passes here needs
//! nothing that a real transport lacks.

#![allow(dead_code, unreachable_pub, reason = "each test program and benchmark uses its part")]
#![allow(clippy::cast_possible_truncation, reason = "offsets in memory that these tests allocate")]
#![allow(clippy::unwrap_used, reason = "test support, also of a benchmark")]
#![allow(clippy::large_types_passed_by_value, reason = "epilogues are made where they are used")]

use flux_core::layout::{self, FaultRecord, WorkspaceSize, control};
use flux_core::problem::WeightList;
use flux_core::program::{Schedule, TileProgram};
use flux_core::signal::{Epoch, initialise};
use flux_core::{OpKind, Problem, Rank, WorldSize};
use flux_kernels::cpu::{
    Buffers, CpuArgs, CpuWeight, Epilogue, ExecuteError, Executor, HostMemory, Rows, RowsMut,
};
use flux_kernels::{Element, GateLayout, WeightLayout};
use flux_testkit::Sums;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// One line of memory; atomics, because other threads write it too.
#[repr(align(128))]
#[derive(Default)]
struct Line([AtomicU32; WORDS]);

const WORDS: usize = layout::LINE as usize / 4;

struct Block {
    lines: Box<[Line]>,
    address: u64,
}

impl Block {
    fn new(bytes: u64) -> Self {
        let lines: Box<[Line]> =
            (0..bytes.div_ceil(layout::LINE)).map(|_| Line::default()).collect();
        Self { address: lines.as_ptr().expose_provenance() as u64, lines }
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        let index = offset as usize / 4;
        &self.lines[index / WORDS].0[index % WORDS]
    }
}

/// A communicator's memory, on all ranks.
pub struct Memory {
    data: Vec<Block>,
    pads: Vec<Block>,
    control: Vec<Block>,
    fault: Vec<Block>,
    data_addresses: Vec<u64>,
    pad_addresses: Vec<u64>,
    size: WorkspaceSize,
}

impl Memory {
    /// Fresh memory, its data all NaN, whose first call is `first`.
    pub fn new(ranks: u32, size: WorkspaceSize, first: Epoch) -> Self {
        let blocks = |bytes: u64| -> Vec<Block> { (0..ranks).map(|_| Block::new(bytes)).collect() };
        let memory = Self {
            data: blocks(size.data_bytes()),
            pads: blocks(layout::pad_bytes(size.signals)),
            control: blocks(control::bytes(size.counters)),
            fault: blocks(layout::FAULT_BYTES),
            data_addresses: Vec::new(),
            pad_addresses: Vec::new(),
            size,
        };
        let addresses = |blocks: &[Block]| blocks.iter().map(|block| block.address).collect();
        let memory = Self {
            data_addresses: addresses(&memory.data),
            pad_addresses: addresses(&memory.pads),
            ..memory
        };
        let world = WorldSize::new(ranks).unwrap();
        for rank in world.ranks() {
            memory.fill_with_nan(rank.get());
            initialise(memory.view(rank.get(), Duration::ZERO).words(), rank, size, first);
        }
        memory
    }

    /// As `rank` sees it.
    pub fn view(&self, rank: u32, deadline: Duration) -> HostMemory<'_> {
        let rank = rank as usize;
        // SAFETY: the blocks live as long as `self`, have these sizes, and tests touch them by the
        // protocol.
        unsafe {
            HostMemory::new(
                &self.data_addresses,
                &self.pad_addresses,
                self.control[rank].address,
                self.fault[rank].address,
                self.size,
                deadline,
            )
        }
    }

    pub fn epoch(&self, rank: u32) -> Epoch {
        Epoch::new(self.control[rank as usize].word(control::EPOCH).load(Ordering::Acquire))
    }

    /// Signal `index` of `rank`'s pad in call `epoch`.
    pub fn signal(&self, rank: u32, index: u32, epoch: Epoch) -> &AtomicU32 {
        self.pads[rank as usize].word(layout::signal_offset(index, epoch.half()))
    }

    pub fn pushed(&self, rank: u32) -> &AtomicU32 {
        self.control[rank as usize].word(control::PUSHED)
    }

    pub fn abort(&self, rank: u32) -> &AtomicU32 {
        self.fault[rank as usize].word(layout::ABORT_OFFSET)
    }

    pub fn poison(&self, rank: u32) -> u32 {
        self.control[rank as usize].word(control::POISON).load(Ordering::Acquire)
    }

    pub fn record(&self, rank: u32) -> FaultRecord {
        let words: [u32; 16] = std::array::from_fn(|i| {
            self.fault[rank as usize].word(i as u64 * 4).load(Ordering::Acquire)
        });
        bytemuck::cast(words)
    }

    /// Fills a rank's data with NaN: only while no rank is in a call.
    pub fn fill_with_nan(&self, rank: u32) {
        for half in [0, self.size.half_stride()] {
            for offset in (0..self.size.half_bytes.next_multiple_of(4)).step_by(4) {
                self.data[rank as usize].word(half + offset).store(u32::MAX, Ordering::Relaxed);
            }
        }
    }

    /// The mover of call `epoch` of `program`'s rank: copies its rows to the gather buffers, and
    /// raises the signal of each slice of a chunk.
    pub fn push<T: Element>(&self, program: &TileProgram, x: &[T], epoch: Epoch) {
        let k = program.problem.k() as usize;
        let row_bytes = (k * size_of::<T>()) as u64;
        for transfer in &program.transfers {
            for row in transfer.row..transfer.row + transfer.rows {
                let from = &x[row as usize * k + transfer.col as usize..][..transfer.cols as usize];
                let offset = epoch.half() as u64 * self.size.half_stride()
                    + program.gather_place_offset(transfer.place)
                    + u64::from(row) * row_bytes
                    + u64::from(transfer.col) * size_of::<T>() as u64;
                let to = (self.data_addresses[transfer.dest as usize] + offset) as usize;
                // SAFETY: inside the destination's half, which is this rank's to write: all others
                // have ended the call that used it last.
                unsafe {
                    std::ptr::with_exposed_provenance_mut::<T>(to)
                        .copy_from_nonoverlapping(from.as_ptr(), from.len());
                };
            }
            self.signal(transfer.dest, transfer.raise, epoch).store(epoch.get(), Ordering::Release);
        }
        self.pushed(program.rank.get()).store(epoch.get(), Ordering::Release);
    }
}

/// One rank of a running world.
pub struct Member<'a> {
    pub rank: u32,
    pub memory: &'a Memory,
    pub executor: Executor,
    pub buffers: Buffers,
    pub deadline: Duration,
}

impl Member<'_> {
    /// One call on dense operands; `y` is NaN before.
    pub fn call<T: Element>(
        &mut self,
        x: &[T],
        w: &[T],
        pause: Duration,
    ) -> Result<Vec<T>, ExecuteError> {
        self.call_with(x, w, Epilogue::default(), pause)
    }

    /// One call on dense operands with an epilogue.
    pub fn call_with<T: Element>(
        &mut self,
        x: &[T],
        w: &[T],
        epilogue: Epilogue<'_, T>,
        pause: Duration,
    ) -> Result<Vec<T>, ExecuteError> {
        let problem = self.executor.program().problem;
        let rank = Rank::new(self.rank);
        let ys = GateLayout::result_shape(epilogue.gates, problem.y_shape(rank));
        let (xs, ws) = (problem.x_shape(rank), problem.w_shape(rank));
        let mut y = vec![T::from_f32(f32::NAN); (ys.rows * ys.cols) as usize];
        let pushes = problem.op() == OpKind::AllGatherGemm && problem.world().get() > 1;
        let (memory, epoch) = (self.memory, self.memory.epoch(self.rank));
        let program = self.executor.program().clone();
        std::thread::scope(|scope| {
            if pushes {
                scope.spawn(move || {
                    std::thread::sleep(pause);
                    memory.push(&program, x, epoch);
                });
            }
            self.executor.run(
                &mut self.buffers,
                CpuArgs {
                    scale: None,
                    gathered: None,
                    x: Rows { elements: x, stride: xs.cols as usize },
                    weights: WeightList::one(CpuWeight {
                        w: Rows { elements: w, stride: ws.cols as usize },
                        scale: None,
                        y: RowsMut { elements: &mut y, stride: ys.cols as usize },
                    }),
                    layout: WeightLayout::Nk,
                    epilogue,
                    memory: memory.view(self.rank, self.deadline),
                    await_pushed: pushes,
                    op_hash: 1,
                    stamps: None,
                },
            )
        })?;
        Ok(y)
    }
}

/// Runs `member` on every rank of `problem`'s world, each on its thread; the results by rank.
pub fn run<R: Send>(
    problem: &Problem,
    schedule: &Schedule,
    workers: usize,
    first: Epoch,
    member: impl Fn(Member<'_>) -> R + Sync,
) -> Vec<R> {
    let programs: Vec<TileProgram> = problem
        .world()
        .ranks()
        .map(|rank| TileProgram::build(problem, rank, schedule).unwrap())
        .collect();
    let memory = Memory::new(problem.world().get(), programs[0].workspace(), first);
    let workers = NonZeroUsize::new(workers).unwrap();
    std::thread::scope(|scope| {
        let (memory, member) = (&memory, &member);
        let ranks: Vec<_> = programs
            .into_iter()
            .map(|program| {
                scope.spawn(move || {
                    let rank = program.rank.get();
                    let executor = Executor::new(program, workers).unwrap();
                    member(Member {
                        rank,
                        memory,
                        executor,
                        buffers: Buffers::default(),
                        deadline: Duration::from_mins(1),
                    })
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// How a program's ranks add partial sums.
pub fn sums(program: &TileProgram) -> Sums {
    if program.rows.is_flattened() { Sums::Flattened } else { Sums::PerShard }
}

/// A program of `rank` and fresh memory for its world.
pub fn alone(
    problem: &Problem,
    rank: u32,
    schedule: &Schedule,
    first: Epoch,
) -> (TileProgram, Memory) {
    let program = TileProgram::build(problem, Rank::new(rank), schedule).unwrap();
    let memory = Memory::new(problem.world().get(), program.workspace(), first);
    (program, memory)
}
