//! Heap memory shared by address.
//!
//! Invariant: a block starts zeroed, never moves, and lives until its last owner drops it. Its
//! address is exposed.

use crate::backends::error::TransportError;
use flux_core::layout::LINE;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

#[derive(Debug)]
pub(super) struct Block {
    memory: NonNull<u8>,
    layout: Layout,
    address: u64,
}

// SAFETY: a block is only an allocation; access to its bytes is by address and under the signal
// protocol.
unsafe impl Send for Block {}
// SAFETY: as for `Send`.
unsafe impl Sync for Block {}

impl Block {
    /// `bytes` zeroed bytes; untouched ones take no memory.
    pub(super) fn new(what: &'static str, bytes: u64) -> Result<Self, TransportError> {
        let none = || TransportError::OutOfMemory { what, bytes };
        // Aligned by hand: for large alignments `alloc_zeroed` writes zeros instead of taking fresh
        // pages.
        let size =
            bytes.checked_add(LINE).and_then(|size| usize::try_from(size).ok()).ok_or_else(none)?;
        let layout = Layout::from_size_align(size, 16).map_err(|_| none())?;
        // SAFETY: the size is at least `LINE`, so not 0.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(none)?;
        let address = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(LINE);
        Ok(Self { memory, layout, address })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout; whoever uses its address shares the block.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

/// A pointer to memory whose address was exposed.
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(
        usize::try_from(address).expect("addresses of this process fit its words"),
    )
}
