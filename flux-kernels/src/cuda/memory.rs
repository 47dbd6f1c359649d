//! Device memory that a value owns.

use super::call::{check, current_context, release_in};
use super::error::LaunchError;
use cudarc::driver::sys;

/// Device memory of the context that was current. It goes with the value.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    address: u64,
    context: sys::CUcontext,
}

// SAFETY: the context handle and the address are plain values; the driver's calls on them are
// thread-safe.
unsafe impl Send for OwnMemory {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for OwnMemory {}

impl OwnMemory {
    /// Memory of at least one byte.
    pub(crate) fn new(bytes: usize) -> Result<Self, LaunchError> {
        let (context, mut address) = (current_context()?, 0);
        // SAFETY: the out pointer is valid; the driver refuses a size of zero.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        Ok(Self { address, context })
    }

    /// Its first byte.
    pub(crate) const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        release_in(self.context, || {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        });
    }
}
