//! One generation of a rank's memory, none of which any other rank reaches.
//!
//! Invariant: a generation is complete in itself, with its own epoch, pad and control block.

use super::generation::Outgoing;
use super::outbox::{Outbox, Storing};
use super::rounds::Memory;
use crate::backends::device::control_block::{ControlBlock, clear_pad};
use crate::backends::error::TransportError;
use crate::backends::held::HeldBytes;
use crate::backends::view::{WorkspaceView, checked_bytes};
use flux_core::layout::{WorkspaceSize, pad_bytes};
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank, WorldSize};
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, SideStream, host_size};

/// Memory of this rank's device.
#[derive(Debug)]
pub(super) struct Workspace {
    size: WorkspaceSize,
    rank: Rank,
    world: WorldSize,
    data: DeviceBlock,
    pad: DeviceBlock,
    control: ControlBlock,
    /// What is on its way to the peers.
    outbox: Outbox,
}

impl Workspace {
    /// Makes and initialises it for calls from `epoch` on.
    pub(super) fn new(
        device: &CudaDevice,
        stream: &SideStream,
        (rank, world): (Rank, WorldSize),
        size: WorkspaceSize,
        epoch: Epoch,
    ) -> Result<Self, TransportError> {
        let (data_bytes, _) = checked_bytes(&size)?;
        // The driver makes no block of nothing.
        let block = |bytes: u64| DeviceBlock::new(device, host_size(bytes.max(256)));
        let this = Self {
            size,
            rank,
            world,
            data: block(data_bytes)?,
            pad: block(pad_bytes(size.signals))?,
            control: ControlBlock::new(device, stream.raw(), size.counters, epoch)?,
            outbox: Outbox::new(device, stream, (rank, Nodes::apart(world)), size, epoch)?,
        };
        // SAFETY: the pad is this generation's, which lives past the synchronisation below.
        unsafe { clear_pad(device, stream.raw(), this.pad.address(), size.signals, epoch) }?;
        stream.synchronize()?;
        Ok(this)
    }

    pub(super) const fn size(&self) -> WorkspaceSize {
        self.size
    }

    /// What it holds in all.
    pub(super) fn held(&self) -> HeldBytes {
        let own = self.data.bytes() + self.pad.bytes() + self.control.bytes();
        let outbox = self.outbox.held();
        HeldBytes { device: own as u64 + outbox.device, ..outbox }
    }

    /// The own memory, for what messages bring and take.
    pub(super) fn memory(&self) -> Memory<'_> {
        Memory {
            data: self.data.address(),
            pad: self.pad.address(),
            control: self.control.address(),
            size: self.size,
            rank: self.rank,
            outbox: &self.outbox,
        }
    }

    /// The epoch of the next call, read from the device, which must be idle.
    pub(super) fn read_epoch(&self) -> Result<Epoch, CudaError> {
        self.control.read_epoch()
    }
}

impl Outgoing for Workspace {
    fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    fn view(&self, storing: Storing, half: u64, fault: u64, deadline_ns: u64) -> WorkspaceView {
        let half_bytes = half * self.size.half_stride();
        let data = |peer: Rank| {
            if peer == self.rank {
                self.data.address()
            } else {
                self.outbox.data_of(peer, storing, half_bytes)
            }
        };
        let pad = |peer: Rank| {
            if peer == self.rank { self.pad.address() } else { self.outbox.pad_of(peer) }
        };
        WorkspaceView {
            data: self.world.ranks().map(data).collect(),
            pads: self.world.ranks().map(pad).collect(),
            scattered: None,
            control: self.control.address(),
            fault,
            size: self.size,
            deadline_ns,
        }
    }
}
