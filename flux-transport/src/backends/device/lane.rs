//! A side stream, forked from the caller's and joined to it by events.
//!
//! Invariant: work between [`Lane::fork`] and [`Lane::join`] starts after the caller's stream at
//! the fork; what follows the join starts after that work.

use flux_cuda::{CudaDevice, CudaError, Event, SideStream};

/// A stream with its two events.
#[derive(Debug)]
pub(crate) struct Lane {
    stream: SideStream,
    forked: Event,
    joined: Event,
}

impl Lane {
    pub(crate) fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self {
            stream: SideStream::new(device)?,
            forked: Event::new(device)?,
            joined: Event::new(device)?,
        })
    }

    pub(crate) fn raw(&self) -> usize {
        self.stream.raw()
    }

    pub(crate) fn fork(&self, caller: usize) -> Result<(), CudaError> {
        self.forked.record(caller)?;
        self.forked.make_wait(self.raw())
    }

    pub(crate) fn join(&self, caller: usize) -> Result<(), CudaError> {
        self.joined.record(self.raw())?;
        self.joined.make_wait(caller)
    }

    /// Whether everything on the lane is done.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        self.stream.is_idle()
    }

    /// Waits on this thread until the lane is empty.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}
