//! What belongs to one process.
//!
//! Invariant: a forked child neither uses nor drops what its parent has made, so it sends no
//! goodbye in its parent's name and closes nothing that the parent needs.

use crate::error::Error;
use std::mem::ManuallyDrop;

/// A value of the process that made it.
pub(crate) struct OfProcess<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// The value.
    ///
    /// # Errors
    /// In a forked child.
    pub(crate) fn get(&self) -> Result<&T, Error> {
        if self.is_here() {
            return Ok(&self.value);
        }
        Err(Error::new(
            "FluxError",
            format!(
                "this communicator belongs to process {}, and this is process {}, forked from it: call flux_tp.init in each process, or start workers with spawn",
                self.process,
                std::process::id()
            ),
        ))
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
