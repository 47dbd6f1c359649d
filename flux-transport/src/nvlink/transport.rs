//! The NVLink transport of one rank.
//!
//! Invariant: between [`NvLink::begin`] and [`NvLink::finish`] nothing blocks, allocates or waits for the device. The device's context is
//! made current at every entry and the thread's own restored at the exit.

use super::collective::{Members, build, succeed};
use super::error::NvLinkError;
use super::fault::FaultBlock;
use super::link::Link;
use super::mover::{Addresses, CaptureMover, Lanes, MoverJob, by_copy_engine};
use super::order::{Mode, Order};
use super::plan::{Plan, Shard};
use super::workspace::Workspace;
use crate::cuda::{CudaDevice, Handles};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::program::Transfer;
use flux_core::signal::Epoch;

/// One rank's device, memory and side streams.
#[derive(Debug)]
pub(crate) struct NvLink {
    // Dropped in this order, after `Drop` has drained the device.
    lanes: Lanes,
    order: Order,
    current: Workspace,
    // Generations that captured graphs still use.
    retired: Vec<Workspace>,
    fault: FaultBlock,
    members: Members,
    device: CudaDevice,
    // The next call's epoch, as long as no call was captured.
    epoch: Epoch,
    captured: bool,
}

/// What [`NvLink::begin`] found out about a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Enqueued {
    stream: usize,
    mode: Mode,
    forked: bool,
    sms: u32,
}

impl Enqueued {
    /// SMs that a mover kernel beside the fused kernel occupies.
    pub(crate) fn mover_sms(&self) -> u32 {
        self.sms
    }
}

impl NvLink {
    /// Shares memory with the ranks behind `link`: `size` on each, first call `epoch`. Collective.
    pub(crate) fn connect(
        link: &dyn Link,
        device: CudaDevice,
        size: WorkspaceSize,
        epoch: Epoch,
        shared_device: bool,
    ) -> Result<Self, NvLinkError> {
        let _current = device.enter()?;
        let members = Members::meet(link, &device, shared_device)?;
        let made = Lanes::new(&device).and_then(|lanes| Ok((lanes, Order::new(&device)?, FaultBlock::new(&device)?)));
        succeed(link, made.as_ref().map(|_| ()).map_err(|error| error.clone().into()))?;
        let (lanes, order, fault) = made?;
        let (current, _) = build(link, &device, lanes.of(Mode::Eager), &members, size, epoch, false)?;
        Ok(Self { lanes, order, current, retired: Vec::new(), fault, members, device, epoch, captured: false })
    }

    /// Grows the workspace to hold `size` as well. Collective; the size held afterwards is the same on all ranks, also after an error.
    pub(crate) fn reserve(&mut self, link: &dyn Link, size: WorkspaceSize) -> Result<(), NvLinkError> {
        let wanted = self.current.size().max(size);
        if wanted == *self.current.size() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        let drained = self.device.synchronize().and_then(|()| self.current.read_epoch(&self.device));
        // After this step no rank's kernel touches any workspace.
        succeed(link, drained.as_ref().map(|_| ()).map_err(|error| error.clone().into()))?;
        let epoch = drained?;
        let lane = self.lanes.of(Mode::Eager);
        let (grown, captured) = build(link, &self.device, lane, &self.members, wanted, epoch, self.captured)?;
        let old = std::mem::replace(&mut self.current, grown);
        if captured {
            // A graph somewhere holds its addresses, and those of every rank's part of it.
            self.retired.push(old);
        }
        self.epoch = epoch;
        Ok(())
    }

    /// Starts a call on `stream`, a `CUstream` of the device, after the last call.
    pub(crate) fn begin(&mut self, stream: usize) -> Result<Enqueued, NvLinkError> {
        let _current = self.device.enter()?;
        let mode = self.order.begin(stream)?;
        self.captured |= mode == Mode::Captured;
        Ok(Enqueued { stream, mode, forked: false, sms: 0 })
    }

    /// Enqueues the transfers beside the call's stream.
    ///
    /// # Safety
    /// The shard's rows are device memory that stays as it is until the call is over.
    pub(crate) unsafe fn push(
        &self,
        call: &mut Enqueued,
        shard: Shard,
        transfers: &[Transfer],
        mover: Option<&dyn CaptureMover>,
    ) -> Result<(), NvLinkError> {
        if transfers.is_empty() {
            return Ok(());
        }
        let at = &self.current;
        let plan = Plan::new(shard, transfers, (self.members.rank, at.data().len()), at.size())?;
        let mover = if self.captured { Some(mover.ok_or(NvLinkError::NoCaptureMover)?) } else { None };
        let _current = self.device.enter()?;
        let lane = self.lanes.of(call.mode);
        lane.fork(call.stream)?;
        call.forked = true;
        let Some(mover) = mover else {
            let addresses = Addresses { data: at.data(), pads: at.pads(), control: at.control(), size: at.size() };
            // SAFETY: forked above; the caller promised the rows; nothing was captured, so the host's count is the device's epoch.
            return Ok(unsafe { by_copy_engine(&self.device, lane, &plan, addresses, self.epoch) }?);
        };
        let half_stride = at.size().half_stride();
        let job = MoverJob { shard, transfers, data: at.data(), pads: at.pads(), control: at.control(), half_stride };
        call.sms = mover.sms();
        mover.launch(&job, lane.raw()).map_err(|error| NvLinkError::Launch { reason: error.to_string() })
    }

    /// Ends a call: what comes next on its stream comes after the push.
    pub(crate) fn finish(&mut self, call: Enqueued) -> Result<(), NvLinkError> {
        let _current = self.device.enter()?;
        if call.forked {
            self.lanes.of(call.mode).join(call.stream)?;
        }
        self.order.finish(call.stream)?;
        if call.mode == Mode::Eager {
            self.epoch = self.epoch.next();
        }
        Ok(())
    }

    /// Ends a call that launched no kernel. The lane is joined, so that the caller's stream, and a capture, are whole.
    pub(crate) fn abandon(&mut self, call: Enqueued) -> Result<(), NvLinkError> {
        let _current = self.device.enter()?;
        if call.forked { Ok(self.lanes.of(call.mode).join(call.stream)?) } else { Ok(()) }
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    pub(crate) fn workspace(&self) -> &Workspace {
        &self.current
    }

    /// The fault block, which is never replaced.
    pub(crate) fn fault(&self) -> &FaultBlock {
        &self.fault
    }

    pub(crate) fn fault_record(&self) -> Option<FaultRecord> {
        self.fault.record()
    }

    /// What the ranks share and how.
    pub(crate) fn explain(&self) -> String {
        let world = self.members.identities.len();
        let local = self.members.ordinals.len();
        let how = match self.members.handles {
            Handles::None => "one process, one mapping each",
            Handles::PosixFd => "several processes, memory passed as file descriptors",
        };
        let mover = if self.captured { "a mover kernel (a call was captured)" } else { "copy engines, one side stream" };
        format!(
            "nvlink: {world} ranks, {local} in this process ({how}); {}; every rank's write read by every other; push by {mover}; {} bytes a rank",
            self.device.info().name,
            self.current.size().total_bytes(),
        )
    }
}

impl Drop for NvLink {
    fn drop(&mut self) {
        // Nothing may be unmapped while a kernel or a copy of this rank still uses it; the peers hold what theirs use.
        if let Err(error) = self.device.synchronize() {
            tracing::warn!(%error, rank = self.members.rank, "while draining the device");
        }
    }
}
