//! Kernels that measure links.

use crate::abi::{BulkCopy, Exchange, PingPong};
use crate::cuda::LaunchError;
use flux_cuda::{Function, Launch, Module};

/// The loaded kernels.
#[derive(Debug)]
pub struct Links {
    module: Module,
    copy: Function,
    ping_pong: Function,
    exchange: Function,
}

impl Links {
    /// Largest `piece * ring` of [`Self::bulk_copy`]: the shared memory of a CTA beside the
    /// barriers.
    pub const MAX_RING_BYTES: u32 = 196_608;
    /// Bytes that a CTA of [`Self::exchange`] sends in a round.
    pub const CTA_BYTES: u32 = 16 * Self::EXCHANGE_THREADS;
    /// Most bytes of a round of [`Self::exchange`]: its CTAs run at once on any Hopper device.
    pub const MAX_EXCHANGE_BYTES: u32 = 128 * Self::CTA_BYTES;
    const EXCHANGE_THREADS: u32 = 256;

    /// Loads the kernels from their cubin ([`Source::links`](crate::Source::links)) into the
    /// current context.
    ///
    /// # Errors
    /// [`LaunchError`] when the cubin does not suit the device.
    pub fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let copy = module.function(c"flux_bulk_copy", Self::MAX_RING_BYTES + 256)?;
        let ping_pong = module.function(c"flux_ping_pong", 0)?;
        Ok(Self { copy, ping_pong, exchange: module.function(c"flux_exchange", 0)?, module })
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
        let shared_bytes = copy.ring * (copy.piece + 8);
        let launch =
            Launch { grid: (ctas, 1), threads: 32, shared_bytes, stream, programmatic: false };
        // SAFETY: the layout is that of the kernel's parameter; the caller answers for the ranges.
        Ok(unsafe { self.module.launch(self.copy, launch, copy) }?)
    }

    /// Enqueues one side of an exchange of signals.
    ///
    /// # Safety
    /// The words are valid on this device; both sides are launched, one of them `first`.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn ping_pong(&self, side: &PingPong, stream: usize) -> Result<(), LaunchError> {
        let launch =
            Launch { grid: (1, 1), threads: 1, shared_bytes: 0, stream, programmatic: false };
        // SAFETY: the layout is that of the kernel's parameter; the caller answers for the words.
        Ok(unsafe { self.module.launch(self.ping_pong, launch, side) }?)
    }
    /// Enqueues one side of an exchange of data.
    ///
    /// # Safety
    /// The ranges are valid on this device and as the fields say; both sides are launched, with the
    /// same sizes, and nothing else uses the ranges meanwhile. `bytes` is at most
    /// [`Self::MAX_EXCHANGE_BYTES`].
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the launch is refused.
    pub unsafe fn exchange(&self, side: &Exchange, stream: usize) -> Result<(), LaunchError> {
        let grid = (side.bytes / Self::CTA_BYTES, 1);
        let launch = Launch {
            grid,
            threads: Self::EXCHANGE_THREADS,
            shared_bytes: 0,
            stream,
            programmatic: false,
        };
        // SAFETY: the layout is that of the kernel's parameter; the caller answers for the ranges.
        Ok(unsafe { self.module.launch(self.exchange, launch, side) }?)
    }
}
