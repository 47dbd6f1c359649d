//! One generation of a rank's workspace: its own memory, its peers', and its control block.
//!
//! Invariant: a generation is complete in itself. A growing communicator makes a new one that
//! continues the epoch; graphs captured on the old one replay as long as it is kept.

use super::offer::Offer;
use super::shared::{Peer, Shared};
use crate::backends::device::control_block::{ControlBlock, clear_pad};
use crate::backends::device::lane::Lane;
use crate::backends::view::{WorkspaceView, checked_bytes};
use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, Handles};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A generation whose peers are not mapped yet.
#[derive(Debug)]
pub(super) struct Candidate {
    shared: Arc<Shared>,
    control: ControlBlock,
    size: WorkspaceSize,
    epoch: Epoch,
}

#[derive(Debug)]
pub(crate) struct Workspace {
    size: WorkspaceSize,
    data: Vec<u64>,
    pads: Vec<u64>,
    control: ControlBlock,
    // What the addresses point into, by rank.
    memory: Vec<Option<Peer>>,
}

impl Candidate {
    /// Makes and initialises this rank's part: signals and `pushed` hold the epoch before `epoch`,
    /// the control block's epoch is `epoch`, other words of pad and control block are 0. The data
    /// region stays undefined.
    pub(super) fn new(
        device: &CudaDevice,
        lane: &Lane,
        size: WorkspaceSize,
        epoch: Epoch,
        handles: Handles,
        ordinals: &[u32],
    ) -> Result<Self, CudaError> {
        let too_large = || CudaError::Call {
            call: "cuMemCreate",
            code: 1,
            name: format!("no workspace can be as large as {size:?}"),
        };
        let (_, bytes) = checked_bytes(&size).map_err(|_| too_large())?;
        let shared = Shared::new(device, bytes, handles, ordinals)?;
        let control = ControlBlock::new(device, lane.raw(), size.counters, epoch)?;
        let pad = shared.address() + size.data_bytes();
        // SAFETY: the pad lies behind the data region of an allocation made for both.
        unsafe { clear_pad(device, lane.raw(), pad, size.signals, epoch) }?;
        lane.synchronize()?;
        Ok(Self { shared, control, size, epoch })
    }

    pub(super) fn offer(&self, captured: bool) -> Offer {
        Offer {
            key: self.shared.key(),
            bytes: self.shared.bytes(),
            size: self.size,
            epoch: self.epoch.get(),
            captured,
        }
    }

    /// A descriptor of the memory for one other process.
    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        self.shared.export()
    }

    /// This rank's own memory, in the list of all.
    pub(super) fn own(&self) -> Peer {
        Peer::Local(Arc::clone(&self.shared))
    }

    /// Takes the memory of all ranks that share it, in rank order, each as large as this rank's.
    pub(super) fn complete(self, memory: Vec<Option<Peer>>) -> Workspace {
        let address =
            |peer: &Option<Peer>, offset| peer.as_ref().map_or(0, |peer| peer.address() + offset);
        let data = memory.iter().map(|peer| address(peer, 0)).collect();
        let pads = memory.iter().map(|peer| address(peer, self.size.data_bytes())).collect();
        Workspace { size: self.size, data, pads, control: self.control, memory }
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if self.control.device().is_given_up() {
            // What runs there may yet store to peers of this process, whoever of them is left.
            self.memory.iter().flatten().for_each(Peer::keep);
        }
    }
}

impl Workspace {
    pub(crate) fn size(&self) -> &WorkspaceSize {
        &self.size
    }

    /// Addresses of the data regions, by rank; 0 for a rank of another node.
    pub(crate) fn data(&self) -> &[u64] {
        &self.data
    }

    /// Addresses of the pads, by rank; 0 for a rank of another node.
    pub(crate) fn pads(&self) -> &[u64] {
        &self.pads
    }

    pub(crate) fn control(&self) -> u64 {
        self.control.address()
    }

    /// What an executor needs to know of it, with the rank's fault block.
    pub(crate) fn view(&self, fault: u64, deadline_ns: u64) -> WorkspaceView {
        WorkspaceView {
            data: self.data.clone(),
            pads: self.pads.clone(),
            scattered: None,
            control: self.control(),
            fault,
            size: self.size,
            deadline_ns,
        }
    }

    /// The epoch of the next call, read from the device, which must be idle.
    pub(crate) fn read_epoch(&self) -> Result<Epoch, CudaError> {
        self.control.read_epoch()
    }

    /// Sets every word of this rank's pad to its value before call `epoch`, and waits for that.
    pub(super) fn clear_pad(
        &self,
        device: &CudaDevice,
        lane: &Lane,
        rank: u32,
        epoch: Epoch,
    ) -> Result<(), CudaError> {
        // SAFETY: the pad lies behind the data region of an allocation made for both.
        unsafe {
            clear_pad(device, lane.raw(), self.pads[rank as usize], self.size.signals, epoch)
        }?;
        lane.synchronize()
    }
}
