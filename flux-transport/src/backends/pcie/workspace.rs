//! One generation of a rank's workspace: its device memory, and all ranks' shared regions.
//!
//! Invariant: nothing on a device is mapped for another. To a kernel, peers' data regions are the
//! outbox and their pads host pads that its own streams read; a scattering kernel gets the regions
//! for both.

use super::layout::Layout;
use super::region::PinnedRegion;
use super::words::Words;
use crate::backends::device::control_block::{ControlBlock, clear_pad};
use crate::backends::device::lane::Lane;
use crate::backends::device::peer_memory::PeerDevices;
use crate::backends::error::TransportError;
use crate::backends::offer::{Offer, keys_at_one_epoch};
use crate::backends::view::{WorkspaceView, checked_bytes};
use crate::bootstrap::control::{Collective, agree, together};
use flux_core::Rank;
use flux_core::layout::{WorkspaceSize, pad_bytes};
use flux_core::signal::Epoch;
use flux_cuda::{
    CudaDevice, CudaError, DeviceBlock, PinnedBlock, WordOp, fill_words, host_size, keep,
};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug)]
pub(super) struct Workspace {
    size: WorkspaceSize,
    rank: u32,
    data: DeviceBlock,
    outbox: DeviceBlock,
    pad: DeviceBlock,
    control: ControlBlock,
    words: Arc<Words>,
    /// The regions for the device, by rank.
    regions: Vec<u64>,
}

/// This rank's part, before it knows of the others'.
struct Own {
    data: DeviceBlock,
    outbox: DeviceBlock,
    pad: DeviceBlock,
    control: ControlBlock,
    local: PinnedBlock,
    region: Arc<PinnedRegion>,
    file: OwnedFd,
}

impl Own {
    fn new(
        device: &CudaDevice,
        lane: &Lane,
        world: u32,
        size: &WorkspaceSize,
        epoch: Epoch,
    ) -> Result<Self, TransportError> {
        let (bytes, _) = checked_bytes(size)?;
        let initial = epoch.before(1).get();
        // an empty workspace still has addresses
        let block = |bytes: u64| DeviceBlock::new(device, host_size(bytes.max(4)));
        let (data, outbox, pad) = (block(bytes)?, block(bytes)?, block(pad_bytes(size.signals))?);
        let control = ControlBlock::new(device, lane.raw(), size.counters, epoch)?;
        // SAFETY: the pad has this size and lives past the synchronisation below.
        unsafe { clear_pad(device, lane.raw(), pad.address(), size.signals, epoch) }?;
        lane.synchronize()?;
        let local =
            PinnedBlock::new(device, host_size(Words::local_bytes(world as usize, size.signals)))?;
        let (region, file) = PinnedRegion::create(device, Layout::new(world, size), initial)?;
        Ok(Self { data, outbox, pad, control, local, region, file })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if self.data.device().is_given_up() {
            // What is on its way there may yet read peers' regions, whoever of them is left.
            self.words.regions().iter().for_each(keep);
        }
    }
}

impl Workspace {
    /// Makes a workspace on every rank, and maps all regions everywhere. Collective.
    pub(super) fn new(
        steps: Collective<'_>,
        deadline: Instant,
        device: &CudaDevice,
        lane: &Lane,
        members: &PeerDevices,
        size: WorkspaceSize,
        epoch: Epoch,
    ) -> Result<Self, TransportError> {
        let (rank, world) = (members.rank, members.world());
        let own = Own::new(device, lane, world, &size, epoch);
        let offer = own.as_ref().map(|own| Offer { key: own.region.key(), epoch }.encode());
        let answers = agree(steps, &offer, deadline);
        // an own failure is told as it is, not as others hear of it
        let own = own?;
        let keys = keys_at_one_epoch(&answers?);
        let alone = (0..world).all(|peer| members.is_local(peer));
        let files =
            if alone { Vec::new() } else { steps.exchange_fds(&[own.file.as_fd()], deadline)? };
        let regions = keys.and_then(|keys| map(device, members, &own.region, &keys, &files));
        // Nobody goes on, and perhaps leaves with its memory, before all have found all of it.
        let regions = together(steps, deadline, regions)?;
        let addresses: Result<_, CudaError> =
            regions.iter().map(|region| region.address(device)).collect();
        let addresses = together(steps, deadline, addresses.map_err(TransportError::from))?;
        let words =
            Arc::new(Words::new(rank, size.signals, regions, own.local, epoch.before(1).get()));
        let Own { data, outbox, pad, control, .. } = own;
        Ok(Self { size, rank, data, outbox, pad, control, words, regions: addresses })
    }

    pub(super) fn size(&self) -> &WorkspaceSize {
        &self.size
    }

    pub(super) fn words(&self) -> &Arc<Words> {
        &self.words
    }

    /// The region of `rank` for the device, of which its words are used.
    pub(super) fn region(&self, rank: u32) -> u64 {
        self.regions[rank as usize]
    }

    /// The region of `rank` for the host, by whose addresses copies are asked for.
    pub(super) fn host_region(&self, rank: u32) -> &PinnedRegion {
        &self.words.regions()[rank as usize]
    }

    pub(super) fn data(&self) -> u64 {
        self.data.address()
    }

    pub(super) fn outbox(&self) -> u64 {
        self.outbox.address()
    }

    pub(super) fn pad(&self) -> u64 {
        self.pad.address()
    }

    pub(super) fn control(&self) -> u64 {
        self.control.address()
    }

    /// What says that nothing of call `epoch` is left to do for the side streams.
    pub(super) fn finished(&self, epoch: Epoch) -> WordOp {
        WordOp::Write { address: self.words.finished_address(), value: epoch.get() }
    }

    /// Brings all awaited words to call `before`, on the caller's stream, before the next call.
    pub(super) fn refresh(
        &self,
        device: &CudaDevice,
        before: u32,
        stream: usize,
    ) -> Result<(), CudaError> {
        let layout = self.host_region(self.rank).layout;
        let flags = layout.flags(0)..layout.flags(self.regions.len() as u32);
        let flags =
            (self.region(self.rank) + flags.start, host_size((flags.end - flags.start) / 4));
        for (address, words) in [self.words.local_words(), flags] {
            // By the stream: an earlier call may still await a word. SAFETY: the words are this
            // generation's, which lives until the device is drained.
            unsafe { fill_words(device, address, before, words, stream) }?;
        }
        Ok(())
    }

    /// The view for an executor that scatters rows to peers' regions, and is signalled on its own.
    pub(super) fn view_of_regions(&self, fault: u64, deadline_ns: u64) -> WorkspaceView {
        let layout = self.host_region(self.rank).layout;
        let own = self.regions[self.rank as usize] + layout.half(0);
        let data = |rank: u32| {
            if rank == self.rank {
                self.data()
            } else {
                self.regions[rank as usize] + layout.half(0)
            }
        };
        let ranks = || 0..self.regions.len() as u32;
        WorkspaceView {
            data: ranks().map(data).collect(),
            pads: self.regions.iter().map(|region| region + layout.pad()).collect(),
            scattered: Some(own),
            ..self.view(fault, deadline_ns)
        }
    }

    /// What an executor needs to know of it, with the rank's fault block.
    pub(super) fn view(&self, fault: u64, deadline_ns: u64) -> WorkspaceView {
        let ranks = || 0..self.regions.len() as u32;
        let own = |rank| rank == self.rank;
        WorkspaceView {
            data: ranks().map(|rank| if own(rank) { self.data() } else { self.outbox() }).collect(),
            pads: ranks()
                .map(|rank| if own(rank) { self.pad() } else { self.words.local_pad(rank) })
                .collect(),
            scattered: None,
            control: self.control.address(),
            fault,
            size: self.size,
            deadline_ns,
        }
    }

    /// The epoch of the next call, read from the device, which must be idle.
    pub(super) fn read_epoch(&self) -> Result<Epoch, CudaError> {
        self.control.read_epoch()
    }
}

/// All ranks' regions, of this process by their numbers, of others by their descriptors.
fn map(
    device: &CudaDevice,
    members: &PeerDevices,
    own: &Arc<PinnedRegion>,
    keys: &[u64],
    files: &[Vec<OwnedFd>],
) -> Result<Vec<Arc<PinnedRegion>>, TransportError> {
    let one = |(peer, &key): (u32, &u64)| {
        let failed = |reason| TransportError::PeerFailed { rank: Rank::new(peer), reason };
        if peer == members.rank {
            return Ok(Arc::clone(own));
        }
        if members.is_local(peer) {
            return PinnedRegion::find(key).ok_or_else(|| failed("its memory is gone".to_owned()));
        }
        match files.get(peer as usize).map(Vec::as_slice) {
            Some([file]) => PinnedRegion::open(device, file.as_fd(), own.layout).map_err(failed),
            other => Err(failed(format!(
                "it gave {} descriptors of memory, not 1",
                other.map_or(0, <[_]>::len)
            ))),
        }
    };
    (0..).zip(keys).map(one).collect()
}
