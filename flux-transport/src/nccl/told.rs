//! What the ranks of a rail say of their calls, in pinned host memory: the own stream of its own, and messages of the peers'.
//!
//! Invariant: the host only loads. What a rank says goes ahead of all that it sends in a call, so whoever has that has been told.

use crate::calls::{SAID_BYTES, disagreement, said_offset};
use crate::cuda::{CudaDevice, CudaError, PinnedBlock, host_size};
use flux_core::layout::FaultRecord;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::sync::atomic::{AtomicU32, Ordering};

/// Words for each rank of the rail.
#[derive(Debug)]
pub(super) struct Told {
    block: PinnedBlock,
    rank: Rank,
    nodes: Nodes,
}

impl Told {
    /// Of calls that are still to come.
    pub(super) fn new(device: &CudaDevice, rank: Rank, nodes: Nodes) -> Result<Self, CudaError> {
        let bytes = u64::from(nodes.count()) * SAID_BYTES;
        let this = Self { block: PinnedBlock::new(device, host_size(bytes))?, rank, nodes };
        (0..bytes).step_by(4).for_each(|offset| this.word(offset).store(0, Ordering::Release));
        Ok(this)
    }

    /// Where the rank of the rail in `node` says what call `epoch` is, for the device.
    pub(super) fn address(&self, node: u32, epoch: Epoch) -> u64 {
        self.block.address() + u64::from(node) * SAID_BYTES + said_offset(epoch)
    }

    /// A rank of the rail whose calls are of other ops than this one's.
    pub(super) fn disagreement(&self) -> Option<FaultRecord> {
        let Self { rank, nodes, .. } = *self;
        let (own, local) = (nodes.node_of(rank), nodes.local_of(rank));
        let others = (0..nodes.count()).filter(|&node| node != own);
        disagreement(rank, self.said(own), others.map(|node| (nodes.rank(node, local), self.said(node))))
    }

    fn said(&self, node: u32) -> impl Fn(u64) -> u32 {
        move |offset| self.word(u64::from(node) * SAID_BYTES + offset).load(Ordering::Acquire)
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        assert!(host_size(offset) < self.block.bytes(), "{offset} is no offset of a word");
        // SAFETY: in bounds and aligned, as the block begins at a page; it lives as long as `self`, and is only accessed by whole words.
        unsafe { AtomicU32::from_ptr(self.block.host().byte_add(host_size(offset)).cast()) }
    }
}
