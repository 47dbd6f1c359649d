//! One generation of a rank's workspace: what its node shares, and what goes along its rail.
//!
//! Invariant: an executor that is shown a [`view`](Workspace::view) stores for a node peer in the
//! node peer's memory, and for the rail's rank in another node in the outbox. For the other ranks
//! there it stores nothing but what it says of itself, which nobody reads.

use crate::backends::device::peer_memory;
use crate::backends::held::HeldBytes;
use crate::backends::nccl::{Memory, Outbox, Outgoing, Storing};
use crate::backends::view::WorkspaceView;
use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use flux_cuda::CudaError;

/// A generation in use.
#[derive(Debug)]
pub(super) struct Workspace {
    pub(super) node_peers: peer_memory::Workspace,
    pub(super) outbox: Outbox,
    rank: Rank,
}

impl Workspace {
    pub(super) const fn new(
        node_peers: peer_memory::Workspace,
        outbox: Outbox,
        rank: Rank,
    ) -> Self {
        Self { node_peers, outbox, rank }
    }

    pub(super) fn size(&self) -> WorkspaceSize {
        *self.node_peers.size()
    }

    fn nodes(&self) -> Nodes {
        self.outbox.nodes()
    }

    /// What it holds in all.
    pub(super) fn held(&self) -> HeldBytes {
        let outbox = self.outbox.held();
        HeldBytes { device: self.size().total_bytes() + outbox.device, ..outbox }
    }

    /// The own memory, for what comes along the rail and goes there.
    pub(super) fn memory(&self) -> Memory<'_> {
        let own = self.rank.index();
        Memory {
            data: self.node_peers.data()[own],
            pad: self.node_peers.pads()[own],
            control: self.node_peers.control(),
            size: self.size(),
            rank: self.rank,
            outbox: &self.outbox,
        }
    }

    /// The epoch of the next call, read from the device, which must be idle.
    pub(super) fn read_epoch(&self) -> Result<Epoch, CudaError> {
        self.node_peers.read_epoch()
    }
}

impl Outgoing for Workspace {
    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn view(&self, storing: Storing, half: u64, fault: u64, deadline_ns: u64) -> WorkspaceView {
        let mut view = self.node_peers.view(fault, deadline_ns);
        let half_bytes = half * self.size().half_stride();
        for peer in
            self.nodes().world().ranks().filter(|&peer| !self.nodes().together(self.rank, peer))
        {
            view.data[peer.index()] = self.outbox.data_of(peer, storing, half_bytes);
            view.pads[peer.index()] = self.outbox.pad_of(peer);
        }
        view
    }
}
