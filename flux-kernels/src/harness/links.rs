//! Kernels that measure links.

use crate::abi::{BulkCopy, PingPong};
use crate::cuda::LaunchError;
use crate::cuda::module::Module;
use cudarc::driver::sys;

/// The loaded kernels.
#[derive(Debug)]
pub struct Links {
    module: Module,
    copy: sys::CUfunction,
    ping_pong: sys::CUfunction,
}

// SAFETY: handles are plain values; the driver's calls on them are thread-safe.
unsafe impl Send for Links {}

impl Links {
    /// Largest `piece * ring` of [`Self::bulk_copy`]: the shared memory of a CTA beside the
    /// barriers.
    pub const MAX_RING_BYTES: u32 = 196_608;

    /// Loads the kernels from their cubin ([`Source::links`](crate::Source::links)) into the
    /// current context.
    ///
    /// # Errors
    /// [`LaunchError`] when the cubin does not suit the device.
    pub fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let copy = module.function(c"flux_bulk_copy")?;
        module.allow_shared(copy, Self::MAX_RING_BYTES + 256)?;
        Ok(Self { copy, ping_pong: module.function(c"flux_ping_pong")?, module })
    }

    /// Enqueues a copy by `ctas` CTAs.
    ///
    /// # Safety
    /// Both ranges are valid on this device, nothing else uses the destination meanwhile, and sizes
    /// are as the fields say.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn bulk_copy(
        &self,
        copy: &BulkCopy,
        ctas: u32,
        stream: usize,
    ) -> Result<(), LaunchError> {
        let shared = copy.ring * (copy.piece + 8);
        // SAFETY: the layout is that of the kernel's parameter; the caller answers for the ranges.
        unsafe { self.module.launch(self.copy, (ctas, 1), 32, shared, copy, stream) }
    }

    /// Enqueues one side of an exchange.
    ///
    /// # Safety
    /// The words are valid on this device; both sides are launched, one of them `first`.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn ping_pong(&self, side: &PingPong, stream: usize) -> Result<(), LaunchError> {
        // SAFETY: the layout is that of the kernel's parameter; the caller answers for the words.
        unsafe { self.module.launch(self.ping_pong, (1, 1), 1, 0, side, stream) }
    }
}
