//! The kernel that hands out the gathered rows of an AllGather-GEMM, behind the op's kernel.

use super::args::Matrix;
use super::error::LaunchError;
use super::row_wise::row_wise;
use crate::abi::GatheredRowsParams;
use flux_core::layout::control;
use flux_core::numerics::VECTOR_BYTES;
use flux_core::{Problem, Rank};
use flux_cuda::{Function, Module};

/// The loaded kernel.
#[derive(Debug)]
pub struct GatheredRows {
    module: Module,
    function: Function,
}

/// The operands of one launch.
#[derive(Clone, Copy, Debug)]
pub struct GatheredRowsArgs<'a> {
    /// Of the call.
    pub problem: &'a Problem,
    /// This rank, whose rows are those of `x`.
    pub rank: Rank,
    /// The call's operand.
    pub x: Matrix,
    /// The gather buffer of even epochs, in the own data region.
    pub buffer: u64,
    /// Bytes from there to that of odd epochs.
    pub half_stride: u64,
    /// Whether the buffer has all rows without gaps, and not a place for each peer.
    pub flattened: bool,
    /// The control block.
    pub control: u64,
    /// All rows, `[m, k]`.
    pub out: Matrix,
    /// Whether it may begin before the launch ahead on the stream has ended.
    pub programmatic: bool,
    /// The stream.
    pub stream: usize,
}

impl GatheredRows {
    /// Loads the kernel from its cubin ([`Source::gathered_rows`](crate::Source::gathered_rows))
    /// into the current context. [`loaded_gathered_rows`](super::loaded_gathered_rows) shares it.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks an entry point.
    pub fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let function = module.function(c"flux_gathered_rows", 0)?;
        Ok(Self { module, function })
    }

    /// Enqueues the copy of all rows of the call before it on the stream. The device reads which
    /// half that call used, so the launch may be captured. Does not wait for the device and
    /// allocates nothing.
    ///
    /// # Safety
    /// Every address is valid on the current device for these extents, until the launch has
    /// completed. Nothing writes `x` and that half of the buffer meanwhile, and `out` overlaps
    /// neither.
    ///
    /// # Errors
    /// [`LaunchError`], before anything is enqueued.
    pub unsafe fn launch(&self, args: &GatheredRowsArgs<'_>) -> Result<(), LaunchError> {
        let GatheredRowsArgs {
            problem,
            rank,
            x,
            buffer,
            half_stride,
            flattened,
            control: block,
            out,
            programmatic,
            stream,
        } = *args;
        let row_bytes = problem.gathered_row_bytes();
        let params = GatheredRowsParams {
            x: x.address,
            x_row_bytes: x.row_bytes,
            buffer,
            half_stride,
            epoch: block + control::EPOCH,
            out: out.address,
            out_row_bytes: out.row_bytes,
            row_bytes,
            m_shard: problem.m_shard(),
            full_shards: problem.full_shards(),
            rank: rank.get(),
            flattened: u32::from(flattened),
        };
        let vectors = row_bytes as u32 / VECTOR_BYTES;
        let launch = row_wise(problem.m(), vectors, stream, programmatic);
        // SAFETY: the kernel takes `GatheredRowsParams`; the caller answers for the addresses in
        // it.
        Ok(unsafe { self.module.launch(self.function, launch, &params) }?)
    }
}
