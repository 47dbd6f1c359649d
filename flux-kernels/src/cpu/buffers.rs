//! The buffers of calls: what all programs of a rank share.
//!
//! Invariant: a call finds nothing in them that it reads before it has written it, so they belong
//! to nobody between calls.

use super::error::ExecuteError;
use super::operands::grow;
use super::panel::Panel;
use flux_core::problem::Shape;
use flux_core::program::TileProgram;

/// Buffers that grow to the largest program: `w` in fp32, and for each worker a tile and a shard of
/// A, or all of A with flattened rows.
#[derive(Debug, Default)]
pub struct Buffers {
    pub(super) weights: Vec<f32>,
    pub(super) workers: Vec<Scratch>,
}

/// One worker's buffers.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Operand A of the current shard.
    pub(super) a: Panel,
    /// Accumulators of a tile, its rows [`stride`] apart.
    pub(super) acc: Vec<f32>,
    /// One row of a partial tile.
    pub(super) partial: Vec<f32>,
    /// As `acc`, of one block along `k`, where blocks have scales.
    pub(super) block: Vec<f32>,
}

impl Buffers {
    /// Makes room for calls of `program` by so many workers.
    ///
    /// # Errors
    /// [`ExecuteError::OutOfMemory`].
    pub fn reserve(&mut self, program: &TileProgram, workers: usize) -> Result<(), ExecuteError> {
        let problem = &program.problem;
        grow("weights in fp32", &mut self.weights, problem.w_shape(program.rank).elements())?;
        if self.workers.len() < workers {
            self.workers.resize_with(workers, Scratch::default);
        }
        self.workers[..workers].iter_mut().try_for_each(|scratch| scratch.reserve(program))
    }

    /// Bytes that are held.
    pub fn bytes(&self) -> usize {
        let of = |scratch: &Scratch| {
            scratch.a.bytes()
                + size_of_val(&scratch.acc[..])
                + size_of_val(&scratch.partial[..])
                + size_of_val(&scratch.block[..])
        };
        size_of_val(&self.weights[..]) + self.workers.iter().map(of).sum::<usize>()
    }
}

impl Scratch {
    fn reserve(&mut self, program: &TileProgram) -> Result<(), ExecuteError> {
        let problem = &program.problem;
        let rows = if program.rows.is_flattened() { problem.m() } else { problem.m_shard() };
        let (tile, stride) = (program.tile, stride(program));
        self.a.reserve(
            Shape { rows, cols: problem.k_local(program.rank) },
            Shape { rows: tile.m, cols: tile.k },
        )?;
        let acc = tile.m.min(rows) as usize * stride;
        grow("a worker's accumulators of a tile", &mut self.acc, acc)?;
        if problem.numerics().scales.along_k().is_some() {
            grow("a worker's accumulators of a block", &mut self.block, acc)?;
        }
        grow("a worker's row of a partial tile", &mut self.partial, stride)
    }
}

/// Elements between the rows of a worker's accumulators: a tile may be wider than the output.
pub(super) fn stride(program: &TileProgram) -> usize {
    program.tile.n.min(program.problem.n_local(program.rank)) as usize
}
