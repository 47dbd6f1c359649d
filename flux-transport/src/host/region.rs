//! What a rank's peers write to: its data region and its pad.
//!
//! Invariant: whoever has a region's address shares the region, so the memory outlives a peer's last write. A region is found by its number as long
//! as its owner holds it, which it does until all peers have answered.

use super::block::Block;
use crate::TransportError;
use flux_core::layout::{WorkspaceSize, pad_bytes};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A data region and a pad.
#[derive(Debug)]
pub(super) struct Region {
    number: u64,
    pub(super) data: Block,
    pub(super) pad: Block,
}

/// The regions of this process, by number.
static REGIONS: Mutex<Registry> = Mutex::new(Registry { next: 0, live: BTreeMap::new() });

struct Registry {
    next: u64,
    live: BTreeMap<u64, Weak<Region>>,
}

impl Region {
    /// A region of zeros.
    pub(super) fn new(size: WorkspaceSize) -> Result<Arc<Self>, TransportError> {
        let overflow = || TransportError::OutOfMemory { what: "workspace", bytes: u64::MAX };
        let stride = size.half_bytes.checked_next_multiple_of(WorkspaceSize::ALIGN).ok_or_else(overflow)?;
        let data = Block::new("workspace", stride.checked_mul(2).ok_or_else(overflow)?)?;
        let pad = Block::new("signals", pad_bytes(size.signals))?;
        let mut registry = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let number = registry.next;
        registry.next += 1;
        let region = Arc::new(Self { number, data, pad });
        registry.live.insert(number, Arc::downgrade(&region));
        Ok(region)
    }

    /// The number under which peers find it.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The region with this number, if its owner holds it.
    pub(super) fn find(number: u64) -> Option<Arc<Self>> {
        REGIONS.lock().unwrap_or_else(PoisonError::into_inner).live.get(&number).and_then(Weak::upgrade)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        REGIONS.lock().unwrap_or_else(PoisonError::into_inner).live.remove(&self.number);
    }
}
