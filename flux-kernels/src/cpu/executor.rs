//! One rank's executor. A call runs on this thread and on as many others as start.

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

/// The operands and memory of one call. Shapes are those of the problem.
#[derive(Debug)]
pub struct CpuArgs<'a, T> {
    /// `x`, `[m/W, k]` (AllGather-GEMM) or `[m, k/W]` (GEMM-ReduceScatter).
    pub x: Rows<'a, T>,
    /// `w`, `[n/W, k]` or `[n, k/W]`.
    pub w: Rows<'a, T>,
    /// `y`, `[m, n/W]` or `[m/W, n]`.
    pub y: RowsMut<'a, T>,
    /// Applied to a sum before it is stored to `y`.
    pub epilogue: Epilogue<'a, T>,
    /// The communicator's workspace.
    pub memory: HostMemory<'a>,
    /// Whether a mover reads `x`, so that the call ends after it.
    pub await_pushed: bool,
    /// This rank's op-sequence hash; 0 where ranks compare none.
    pub op_hash: u32,
}

/// One rank's program and the buffers of its calls. A call allocates nothing but its threads.
#[derive(Debug)]
pub struct Executor<T> {
    program: TileProgram,
    weights: Vec<f32>,
    first: Scratch<T>,
    others: Vec<Scratch<T>>,
}

impl<T: Element> Executor<T> {
    /// Checks the program and allocates the buffers: `w` in fp32, and for each worker a tile and a
    /// shard of A, or all of A with flattened rows. Workers without a thread leave their work to
    /// the others.
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

    /// Executes the program once, in the epoch of the control block, and closes the call. On return
    /// `y` is written and the epoch advanced.
    ///
    /// # Errors
    /// [`ExecuteError::Operand`], [`ExecuteError::Activation`] and [`ExecuteError::Workspace`]
    /// before anything is touched. [`ExecuteError::Timeout`], [`ExecuteError::Aborted`] and
    /// [`ExecuteError::Disagreed`] when a wait failed: the fault record and the poison word are
    /// written, and `y` is undefined.
    pub fn run(&mut self, args: CpuArgs<'_, T>) -> Result<(), ExecuteError> {
        let CpuArgs { x, w, y, epilogue, memory, await_pushed, op_hash } = args;
        let problem = self.program.problem;
        fits("x", problem.x_shape(self.program.rank), x.elements.len(), x.stride)?;
        fits("w", problem.w_shape(), w.elements.len(), w.stride)?;
        fits("y", problem.y_shape(self.program.rank), y.elements.len(), y.stride)?;
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

/// Runs the call on as many workers as there are threads for, this one included. None begins before
/// their number is known, so no call that has begun lacks one.
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
