//! One rank's executor: a call of it runs on this thread and on as many as it can start.

use super::call::{Call, Output, Scratch};
use super::check;
use super::epilogue::Epilogue;
use super::error::ExecuteError;
use super::memory::HostMemory;
use super::operands::{Rows, RowsMut, fits, zeroed};
use crate::element::Element;
use flux_core::program::TileProgram;
use flux_core::signal::{Left, Poisoned, Protocol, read_fault};
use std::num::NonZeroUsize;
use std::sync::OnceLock;

/// What one call works on; shapes are those of the problem.
#[derive(Debug)]
pub struct CpuArgs<'a, T> {
    /// `x`, `[m/W, k]` (AllGather-GEMM) or `[m, k/W]` (GEMM-ReduceScatter).
    pub x: Rows<'a, T>,
    /// `w`, `[n/W, k]` or `[n, k/W]`.
    pub w: Rows<'a, T>,
    /// `y`, `[m, n/W]` or `[m/W, n]`.
    pub y: RowsMut<'a, T>,
    /// What becomes of a sum before it is stored to `y`.
    pub epilogue: Epilogue<'a, T>,
    /// The communicator's workspace.
    pub memory: HostMemory<'a>,
    /// Whether a mover reads `x` in this call, so that it must have finished before the call
    /// returns.
    pub await_pushed: bool,
    /// The number of the op that the call is of, by which ranks find that their calls are of
    /// different ones; 0 where they do not tell each other.
    pub op_hash: u32,
}

/// One rank's program with the buffers that executing it takes; a call allocates nothing (beyond
/// what starting further workers takes).
#[derive(Debug)]
pub struct Executor<T> {
    program: TileProgram,
    weights: Vec<f32>,
    first: Scratch<T>,
    others: Vec<Scratch<T>>,
}

impl<T: Element> Executor<T> {
    /// Checks the program and takes the buffers: operands in fp32 (`w` once; for each worker a
    /// shard of A, or all of it where tiles span shards) and, for each worker, a tile. Where a call
    /// finds no thread for a worker, those that there are do its work.
    ///
    /// # Errors
    /// [`ExecuteError::DType`], [`ExecuteError::Program`] or [`ExecuteError::OutOfMemory`].
    pub fn new(program: TileProgram, workers: NonZeroUsize) -> Result<Self, ExecuteError> {
        let problem = &program.problem;
        if problem.dtype() != T::DTYPE {
            return Err(ExecuteError::DType { program: problem.dtype(), operands: T::DTYPE });
        }
        check::check(&program)?;
        let weights = zeroed("weights in fp32", problem.n_local() as usize * problem.k_local() as usize)?;
        let first = Scratch::new(&program)?;
        let others = (1..workers.get()).map(|_| Scratch::new(&program)).collect::<Result<_, _>>()?;
        Ok(Self { program, weights, first, others })
    }

    /// The program.
    pub const fn program(&self) -> &TileProgram {
        &self.program
    }

    /// Executes the program once, in the epoch that the control block holds, and closes the call:
    /// on return `y` is written, the peers may reuse the half of the workspace that they share with
    /// the next call but one, and the epoch is advanced.
    ///
    /// # Errors
    /// [`ExecuteError::Operand`], [`ExecuteError::Activation`] and [`ExecuteError::Workspace`]
    /// before anything is touched. [`ExecuteError::Timeout`] and [`ExecuteError::Aborted`] when a
    /// wait failed, [`ExecuteError::Disagreed`] when a peer is in another op's call, with the fault
    /// record and the poison word written; `y` is then undefined.
    pub fn run(&mut self, args: CpuArgs<'_, T>) -> Result<(), ExecuteError> {
        let CpuArgs { x, w, y, epilogue, memory, await_pushed, op_hash } = args;
        let problem = self.program.problem;
        fits("x", problem.x_shape(), x.elements.len(), x.stride)?;
        fits("w", problem.w_shape(), w.elements.len(), w.stride)?;
        fits("y", problem.y_shape(), y.elements.len(), y.stride)?;
        epilogue.fits(&problem)?;
        self.holds(&memory)?;
        let failed = || ExecuteError::from_record(read_fault(&memory), self.program.rank);
        let protocol = Protocol::open(&memory, self.program.rank).of(op_hash, problem.world());
        if protocol.poisoned() {
            return Err(failed());
        }
        protocol.announce();

        let k = problem.k_local() as usize;
        for (row, to) in self.weights.chunks_exact_mut(k).enumerate() {
            T::widen(w.row(row, k), to);
        }
        let call = Call {
            program: &self.program,
            x,
            weights: &self.weights,
            y: Output::new(y),
            epilogue,
            memory: &memory,
            protocol,
            await_pushed,
        };
        // A scope allocates, even one without threads.
        let done =
            if self.others.is_empty() { call.work(0, 1, &mut self.first) } else { together(&call, &mut self.first, &mut self.others) };
        match done {
            Ok(_) => Ok(()),
            Err(Poisoned) => Err(failed()),
        }
    }

    fn holds(&self, memory: &HostMemory<'_>) -> Result<(), ExecuteError> {
        let (need, have) = (self.program.workspace(), memory.size());
        let world = self.program.problem.world();
        if need.max(have) != have || memory.ranks() < world.index() {
            return Err(ExecuteError::Workspace { need, world: world.get(), have, ranks: memory.ranks() });
        }
        Ok(())
    }
}

/// The work of a call on as many workers as there are threads for, of which this one is the first.
/// Nobody begins before their number is known: where the system has no more threads there are fewer
/// workers, and no call that has begun lacks one.
fn together<T: Element>(call: &Call<'_, T>, first: &mut Scratch<T>, others: &mut [Scratch<T>]) -> Result<Left, Poisoned> {
    let count = OnceLock::new();
    std::thread::scope(|scope| {
        let count = &count;
        let start = |(i, scratch)| {
            let started = std::thread::Builder::new().spawn_scoped(scope, move || call.work(i, *count.wait(), scratch));
            started.inspect_err(|error| tracing::warn!(%error, "there is no thread for worker {i}, so there are {i} workers")).ok()
        };
        let others: Vec<_> = (1..).zip(others).map_while(start).collect();
        let first = call.work(0, *count.get_or_init(|| 1 + others.len()), first);
        others.into_iter().fold(first, |all, other| match other.join() {
            Ok(one) => all.and(one),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
