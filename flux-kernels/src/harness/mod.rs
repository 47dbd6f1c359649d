//! The harness's kernels: operands as a function of position, verification against an fp64
//! reference, and a delay.
//!
//! Invariant: [`Harness::verify`] multiplies what [`Harness::fill`] writes, on any rank. The
//! reference never reads the operands that the tested kernel read.

pub mod data;
mod fill;
mod links;
mod memory;
pub mod scaled;
mod unfused;
mod verify;

pub use crate::abi::{BulkCopy, Exchange, Fill, PingPong};
pub use fill::Window;
pub use links::Links;
pub use memory::{HostBuffer, NoMemory, room};
pub use unfused::UnfusedEpilogue;
pub use verify::{Expected, Seeds, VerifyReport, accumulation_error};

use crate::abi::RawReport;
use crate::cuda::LaunchError;
use flux_cuda::current::ContextMemory;
use flux_cuda::{Function, Launch, Module};

/// The loaded kernels. Every function expects the context that was current at [`Harness::load`].
#[derive(Debug)]
pub struct Harness {
    module: Module,
    fill: Function,
    fill_scales: Function,
    interleave_shards: Function,
    verify: Function,
    unfused_epilogue: Function,
    spin: Function,
    report: ContextMemory,
}

impl Harness {
    /// Loads the kernels from their cubin ([`Source::harness`](crate::Source::harness)) into the
    /// current context.
    ///
    /// # Errors
    /// [`LaunchError`] when the cubin does not suit the device or memory is short.
    pub fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        Ok(Self {
            fill: module.function(c"flux_fill", 0)?,
            fill_scales: module.function(c"flux_fill_scales", 0)?,
            interleave_shards: module.function(c"flux_interleave_shards", 0)?,
            verify: module.function(c"flux_verify", 0)?,
            unfused_epilogue: module.function(c"flux_unfused_epilogue", 0)?,
            spin: module.function(c"flux_spin", 0)?,
            report: ContextMemory::new(size_of::<RawReport>())?,
            module,
        })
    }

    /// Occupies the stream for `ns`.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub fn spin(&self, ns: u64, stream: usize) -> Result<(), LaunchError> {
        let launch =
            Launch { grid: (1, 1), threads: 1, shared_bytes: 0, stream, programmatic: false };
        // SAFETY: the kernel takes one u64 and touches no memory.
        Ok(unsafe { self.module.launch(self.spin, launch, &ns) }?)
    }
}
