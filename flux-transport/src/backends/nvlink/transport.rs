//! The NVLink transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing blocks, allocates or waits for the device. Every
//! entry makes the device's context current and restores the thread's own. The fault block is never
//! replaced.

use super::collective::{Meeting, PeerDevices, Wanted, build};
use super::error::NvLinkError;
use super::fault::FaultBlock;
use super::lane::Lane;
use super::mover::{Addresses, by_copy_engine};
use super::workspace::Workspace;
use crate::backends::Transport;
use crate::backends::calls::{Calls, Captures};
use crate::backends::drain::Drain;
use crate::backends::view::nanoseconds;
use crate::bootstrap::control::{Collective, together};
use crate::cuda::{CudaDevice, CudaError, Handles, write_value_async};
use crate::sync::locked;
use crate::{
    Capabilities, Device, Mover, Options, PeerStores, RowTransfers, Stream, TransportError,
    TransportKind, WorkspaceView, World,
};
use flux_core::layout::{FaultRecord, WorkspaceSize, control};
use flux_core::signal::Epoch;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// One rank's device, memory and side stream.
#[derive(Debug)]
pub(crate) struct NvLink {
    // Fields drop in this order, after `Drop` has drained the device.
    state: Mutex<State>,
    fault: FaultBlock,
    members: PeerDevices,
    deadline_ns: u64,
    drain: Drain,
    device: CudaDevice,
    // The same, as callers know it: made once, so that asking allocates nothing.
    place: Device,
}

#[derive(Debug)]
struct State {
    lane: Lane,
    calls: Calls,
    current: Workspace,
    // Generations that captured graphs still use.
    retired: Vec<Workspace>,
    view: Arc<WorkspaceView>,
}

impl NvLink {
    /// Shares memory with the ranks that this one has met. Collective.
    pub(crate) fn connect(
        world: &World,
        options: &Options,
        members: PeerDevices,
    ) -> Result<Self, NvLinkError> {
        let mig = members.mig();
        Self::share(world, options, members).map_err(|error| mig.advised(error))
    }

    fn share(world: &World, options: &Options, members: PeerDevices) -> Result<Self, NvLinkError> {
        let meeting = Meeting::of(world, options);
        let device =
            meeting.succeed(CudaDevice::open(members.info.ordinal).map_err(NvLinkError::from))?;
        let epoch = options.first_epoch;
        let make = || {
            let calls = Calls::new(&device, epoch, Captures::Taken(false))?;
            Ok::<_, CudaError>((Lane::new(&device)?, calls, FaultBlock::new(&device)?))
        };
        let (lane, calls, fault) = meeting.succeed(make().map_err(NvLinkError::from))?;
        let wanted = Wanted { size: options.reserve, epoch, captured: false };
        let (workspace, _) = build(meeting, &device, &lane, &members, wanted)?;
        let deadline_ns = nanoseconds(options.deadline);
        let view = Arc::new(workspace.view(fault.address(), deadline_ns));
        let state = State { lane, calls, current: workspace, retired: Vec::new(), view };
        let place = Device::from(device.info().clone());
        let drain = Drain::new(device.clone(), options.deadline);
        Ok(Self { state: Mutex::new(state), fault, members, deadline_ns, drain, device, place })
    }

    /// Waits for this rank's calls, and replays of graphs.
    fn drained(&self) -> Result<(), TransportError> {
        self.drain.wait(|| self.fault.has_failed())
    }
}

impl Transport for NvLink {
    fn kind(&self) -> TransportKind {
        TransportKind::NvLink
    }

    fn device(&self) -> Device {
        self.place.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            peer_stores: PeerStores::All,
            mover: Mover::CopyEngine,
            graphs: true,
            processes: true,
        }
    }

    fn explain(&self) -> String {
        let state = locked(&self.state);
        let (world, local) = (self.members.world(), self.members.ordinals.len());
        let how = match self.members.handles {
            Handles::None => "all in this process, which maps each memory once",
            Handles::PosixFd => "the others import descriptors of memory",
        };
        format!(
            "nvlink: {world} ranks, {local} in this process ({how}); this rank on {}; what each \
             rank wrote was read by every other; copy engines push on one side stream where an op \
             asks for them and no call was captured; {} bytes of device memory a rank",
            self.device(),
            state.current.size().total_bytes(),
        )
    }

    fn reserve(
        &self,
        size: WorkspaceSize,
        steps: Collective<'_>,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let state = &mut *locked(&self.state);
        let meeting = Meeting { steps, deadline };
        let drained = self.drained().and_then(|()| Ok(state.current.read_epoch(&self.device)?));
        // After this step no rank's kernel or copy touches any rank's workspace.
        let epoch = together(steps, deadline, drained)?;
        let wanted = Wanted { size, epoch, captured: state.calls.any_captured() };
        let (grown, captured) = build(meeting, &self.device, &state.lane, &self.members, wanted)?;
        state.view = Arc::new(grown.view(self.fault.address(), self.deadline_ns));
        let old = std::mem::replace(&mut state.current, grown);
        if captured {
            // A graph of some rank holds addresses of every rank's part.
            state.retired.push(old);
        } else {
            drop(old);
        }
        state.calls.go_on_at(epoch);
        // Unmapping may wait for devices, so all ranks do it before any rank's next call.
        Ok(meeting.succeed(Ok(()))?)
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&locked(&self.state).view)
    }

    fn begin(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        locked(&self.state).calls.begin(stream, |_| Ok(()))
    }

    fn epoch(&self) -> Option<Epoch> {
        let state = locked(&self.state);
        (!state.calls.any_captured()).then(|| state.calls.epoch())
    }

    fn capturing(&self) -> bool {
        locked(&self.state).calls.capturing()
    }

    fn copy_engine_usable(&self) -> bool {
        let state = locked(&self.state);
        self.members.world() > 1 && !state.calls.any_captured() && state.calls.is_uncarried()
    }

    unsafe fn push(
        &self,
        stream: Stream<'_>,
        push: &RowTransfers<'_>,
    ) -> Result<(), TransportError> {
        let State { lane, calls, current: at, .. } = &mut *locked(&self.state);
        let caller = calls.uncarried(stream)?;
        let why = if self.members.world() == 1 {
            Some("a world of one rank has no peers to move to")
        } else if calls.any_captured() {
            Some(
                "a call was captured on this communicator, so the host no longer knows which half \
                 is next: the kernel must move",
            )
        } else if !push.forwards.is_empty() {
            Some("all ranks reach each other, so nothing is passed on")
        } else {
            None
        };
        if let Some(why) = why {
            return Err(TransportError::MoverUnusable { why });
        }
        push.check(self.members.world(), *at.size())?;
        if push.transfers.is_empty() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        lane.fork(caller)?;
        calls.carried();
        let epoch = calls.epoch();
        let addresses = Addresses {
            data: at.data(),
            pads: at.pads(),
            word: at.control() + control::EPOCH,
            size: at.size(),
        };
        // SAFETY: checked and forked above; the caller promises the rows; nothing was captured, so
        // the host's count is the device's epoch.
        unsafe {
            by_copy_engine(&self.device, lane, push, push.transfers.iter(), addresses, epoch)
        }?;
        // Not a copy: within one device that may be a kernel, and the fused kernel may hold every
        // SM. SAFETY: the word is in the control block.
        Ok(unsafe {
            write_value_async(&self.device, at.control() + control::PUSHED, epoch.get(), lane.raw())
        }?)
    }

    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lane, calls, .. } = &mut *locked(&self.state);
        calls.abandon(stream, |caller| lane.join(caller))
    }

    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lane, calls, .. } = &mut *locked(&self.state);
        calls.finish(stream, |caller| lane.join(caller))
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.fault.record()
    }

    fn set_abort(&self, reason: u32) {
        self.fault.abort(reason);
    }

    fn drain(&self) -> Result<(), TransportError> {
        self.drained()
    }
}

impl Drop for NvLink {
    fn drop(&mut self) {
        // Nothing is unmapped while this rank uses it; peers hold what theirs use.
        self.drain.leave(self.members.rank, || self.fault.has_failed());
    }
}
