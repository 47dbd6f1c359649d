//! One generation of a rank's workspace: its own memory, its peers', and its control block.
//!
//! Invariant: a generation is complete in itself. A growing communicator makes a new one that
//! continues the epoch; graphs captured on the old one replay as long as it is kept.

use super::offer::Offer;
use super::shared::{Peer, Shared};
use crate::backends::device::lane::Lane;
use crate::backends::view::{WorkspaceView, checked_bytes};
use flux_core::layout::{BROKEN_BYTES, WorkspaceSize, control, pad_bytes};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, Handles, fill_words, host_size, read};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A generation whose peers are not mapped yet.
#[derive(Debug)]
pub(super) struct Candidate {
    shared: Arc<Shared>,
    control: DeviceBlock,
    size: WorkspaceSize,
    epoch: Epoch,
}

#[derive(Debug)]
pub(crate) struct Workspace {
    size: WorkspaceSize,
    data: Vec<u64>,
    pads: Vec<u64>,
    control: DeviceBlock,
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
        let control_bytes = control::bytes(size.counters);
        let control = DeviceBlock::new(device, host_size(control_bytes))?;
        let candidate = Self { shared, control, size, epoch };
        candidate.clear_pad(device, lane)?;
        let at = candidate.control.address();
        let _current = device.enter()?;
        let words = host_size(control_bytes / 4);
        // SAFETY: the control block is `control_bytes` long, a multiple of 4, and lives past the
        // synchronisation below.
        unsafe { fill_words(device, at, 0, words, lane.raw()) }?;
        for (offset, value) in [(control::EPOCH, epoch), (control::PUSHED, epoch.before(1))] {
            // SAFETY: both words are inside the block.
            unsafe { fill_words(device, at + offset, value.get(), 1, lane.raw()) }?;
        }
        lane.synchronize()?;
        Ok(candidate)
    }

    fn clear_pad(&self, device: &CudaDevice, lane: &Lane) -> Result<(), CudaError> {
        clear_pad(
            device,
            lane,
            self.shared.address() + self.size.data_bytes(),
            &self.size,
            self.epoch,
        )
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

/// Sets every word of a pad to its value before the first call, `epoch`, and waits for that.
pub(super) fn clear_pad(
    device: &CudaDevice,
    lane: &Lane,
    pad: u64,
    size: &WorkspaceSize,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let _current = device.enter()?;
    let signals = host_size((pad_bytes(size.signals) - BROKEN_BYTES) / 4);
    // SAFETY: the pad lies behind the data region of an allocation made for both (`checked_bytes`).
    unsafe {
        fill_words(device, pad, 0, host_size(BROKEN_BYTES / 4), lane.raw())?;
        fill_words(device, pad + BROKEN_BYTES, epoch.before(1).get(), signals, lane.raw())?;
    }
    lane.synchronize()
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
    pub(crate) fn read_epoch(&self, device: &CudaDevice) -> Result<Epoch, CudaError> {
        let mut word = [0; 4];
        // SAFETY: the epoch is a word of the control block.
        unsafe { read(device, &mut word, self.control() + control::EPOCH) }?;
        Ok(Epoch::new(u32::from_le_bytes(word)))
    }
}
