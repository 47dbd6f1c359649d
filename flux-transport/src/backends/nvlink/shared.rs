//! Memory that ranks share: pages of one device, mapped for every rank that uses them.
//!
//! Invariant: an address is valid as long as the rank holds its [`Peer`]. Within a process ranks
//! share one mapping; across processes each has its own, which outlives a killed owner.

use crate::cuda::keep;
use crate::cuda::{Allocation, CudaDevice, CudaError, Handles, Mapping};
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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

// What ranks of one process find each other's memory by; an entry goes with its memory.
static DIRECTORY: Mutex<BTreeMap<u64, Weak<Shared>>> = Mutex::new(BTreeMap::new());
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

fn directory() -> MutexGuard<'static, BTreeMap<u64, Weak<Shared>>> {
    // Every critical section is one call on the map: a panic leaves it whole.
    DIRECTORY.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Allocates at least `bytes` bytes on `device`, mapped for these ordinals of this process.
    /// Uninitialised.
    pub(super) fn new(device: &CudaDevice, bytes: u64, handles: Handles, ordinals: &[u32]) -> Result<Arc<Self>, CudaError> {
        let granularity = Allocation::granularity(device, handles)?;
        let Some(bytes) = crate::cuda::round_up(bytes, granularity) else {
            return Err(CudaError::Call { call: "cuMemCreate", code: 2, name: format!("{bytes} bytes are more than there can be") });
        };
        let allocation = Allocation::new(device, bytes, handles)?;
        let mapping = allocation.map(ordinals)?;
        let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Self { key, bytes, mapping, allocation });
        directory().insert(key, Arc::downgrade(&shared));
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
        directory().remove(&self.key);
    }
}

impl Peer {
    /// The memory of a rank of this process; `None` where there is none with this key and size.
    pub(super) fn local(key: u64, bytes: u64) -> Option<Self> {
        let found = directory().get(&key).and_then(Weak::upgrade);
        found.filter(|shared| shared.bytes == bytes).map(Self::Local)
    }

    /// The memory of a rank of another process, mapped for `device`.
    pub(super) fn import(device: &CudaDevice, fd: BorrowedFd<'_>, bytes: u64) -> Result<Self, CudaError> {
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
