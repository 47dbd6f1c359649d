//! Memory that ranks share: pages of one device, mapped for every rank that uses them.
//!
//! Invariant: an address is valid as long as the rank holds its [`Peer`]. Within a process ranks
//! share one mapping; across processes each has its own, which outlives a killed owner.

use crate::backends::registry::Registry;
use flux_cuda::{Allocation, CudaDevice, CudaError, Handles, Mapping, keep};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Shared {
    key: u64,
    bytes: u64,
    // Fields drop in this order: first the mapping, then the reference to the pages.
    mapping: Mapping,
    allocation: Allocation,
}

/// Memory of a peer, as this rank maps it.
#[derive(Debug)]
pub(super) enum Peer {
    /// A rank of this process: its own mapping, held.
    Local(Arc<Shared>),
    Imported(Mapping),
}

static MEMORIES: Registry<Shared> = Registry::new();

impl Shared {
    /// Allocates at least `bytes` bytes on `device`, mapped for these ordinals of this process.
    /// Uninitialised.
    pub(super) fn new(
        device: &CudaDevice,
        bytes: u64,
        handles: Handles,
        ordinals: &[u32],
    ) -> Result<Arc<Self>, CudaError> {
        let granularity = Allocation::granularity(device, handles)?;
        let Some(bytes) = flux_cuda::round_up(bytes, granularity) else {
            return Err(CudaError::Call {
                call: "cuMemCreate",
                code: 2,
                name: format!("{bytes} bytes are more than there can be"),
            });
        };
        let allocation = Allocation::new(device, bytes, handles)?;
        let mapping = allocation.map(ordinals)?;
        let key = MEMORIES.next_key();
        let shared = Arc::new(Self { key, bytes, mapping, allocation });
        MEMORIES.insert(key, &shared);
        Ok(shared)
    }

    /// Names the memory within this process.
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first byte, for every device that it was mapped for.
    pub(super) fn address(&self) -> u64 {
        self.mapping.address()
    }

    /// A descriptor for another process. It can be closed once the other has imported it.
    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        self.allocation.export()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        MEMORIES.remove(self.key);
    }
}

impl Peer {
    /// The memory of a rank of this process; `None` where there is none with this key and size.
    pub(super) fn local(key: u64, bytes: u64) -> Option<Self> {
        MEMORIES.find(key).filter(|shared| shared.bytes == bytes).map(Self::Local)
    }

    /// The memory of a rank of another process, mapped for `device`.
    pub(super) fn import(
        device: &CudaDevice,
        fd: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        // The mapping keeps the pages; the handle is not needed beyond it.
        Allocation::import(device, fd, bytes)?.map(&[device.ordinal()]).map(Self::Imported)
    }

    /// Leaks the memory: this rank's device was given up and may still use it.
    pub(super) fn keep(&self) {
        match self {
            Self::Local(shared) => keep(shared),
            // Mapped for this rank's device alone, of which nothing is freed.
            Self::Imported(_) => {}
        }
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Local(shared) => shared.address(),
            Self::Imported(mapping) => mapping.address(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_memory_is_not_found() {
        assert!(Peer::local(u64::MAX, 1 << 21).is_none());
    }
}
