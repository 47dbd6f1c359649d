//! The NVLink transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing blocks, allocates or waits for the device. Every
//! entry makes the device's context current and restores the thread's own. The fault block is never
//! replaced.

use crate::backends::device::calls::{Calls, Captures, Transfers};
use crate::backends::device::drain::Drain;
use crate::backends::device::fault_block::FaultBlock;
use crate::backends::device::lane::Lane;
use crate::backends::device::peer_memory::{
    Addresses, PeerDevices, PeerMemoryError, Request, Workspace, build, by_copy_engine,
};
use crate::backends::error::TransportError;
use crate::backends::jobs::{Job, RowTransfers, Started};
use crate::backends::kind::{Capabilities, Mover, PeerStores, TransportKind};
use crate::backends::options::Options;
use crate::backends::transport::Transport;
use crate::backends::view::{WorkspaceView, nanoseconds};
use crate::bootstrap::control::{Collective, together};
use crate::bootstrap::world::World;
use crate::device::{Device, Stream};
use crate::sync::locked;
use flux_core::layout::{FaultRecord, WorkspaceSize, control};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, Handles, write_value_async};
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
    ) -> Result<Self, PeerMemoryError> {
        let mig = members.mig();
        Self::share(world, options, members).map_err(|error| mig.advised(error))
    }

    fn share(
        world: &World,
        options: &Options,
        members: PeerDevices,
    ) -> Result<Self, PeerMemoryError> {
        let (steps, deadline) = (world.steps(), Instant::now() + options.deadline);
        let opened = CudaDevice::open(members.info.ordinal).map_err(PeerMemoryError::from);
        let device = together(steps, deadline, opened)?;
        let epoch = options.first_epoch;
        let make = || {
            let calls = Calls::new(&device, epoch, Captures::Taken(false))?;
            Ok::<_, PeerMemoryError>((Lane::new(&device)?, calls, FaultBlock::new(&device)?))
        };
        let (lane, calls, fault) = together(steps, deadline, make())?;
        let request = Request { size: options.reserve, epoch, captured: false };
        let (workspace, _) = build(steps, deadline, &device, &lane, &members, request)?;
        let deadline_ns = nanoseconds(options.deadline);
        let view = Arc::new(workspace.view(fault.address(), deadline_ns));
        let state = State { lane, calls, current: workspace, retired: Vec::new(), view };
        let place = Device::from(device.info().clone());
        let drain = Drain::new(device.clone(), options.deadline);
        Ok(Self { state: Mutex::new(state), fault, members, deadline_ns, drain, device, place })
    }

    /// Has copy engines carry `rows` on the side stream, then set the control block's word.
    ///
    /// # Safety
    /// As [`Transport::start`], of rows that were checked; no call was captured, so the host's
    /// count is the device's epoch.
    unsafe fn push(
        &self,
        State { lane, calls, current: at, .. }: &mut State,
        caller: usize,
        rows: &RowTransfers<'_>,
    ) -> Result<(), TransportError> {
        if !rows.forwards.is_empty() {
            let why = "all ranks reach each other, so nothing is passed on";
            return Err(TransportError::MoverUnusable { why });
        }
        let _current = self.device.enter()?;
        lane.fork(caller)?;
        calls.note(Transfers::OnSideStreams);
        let epoch = calls.epoch();
        let addresses = Addresses {
            data: at.data(),
            pads: at.pads(),
            word: at.control() + control::EPOCH,
            size: at.size(),
        };
        // SAFETY: forked above; the rest is this function's promise.
        unsafe {
            by_copy_engine(&self.device, lane, rows, rows.transfers.iter(), addresses, epoch)
        }?;
        // Not a copy: within one device that may be a kernel, and the fused kernel may hold every
        // SM. SAFETY: the word is in the control block.
        Ok(unsafe {
            write_value_async(&self.device, at.control() + control::PUSHED, epoch.get(), lane.raw())
        }?)
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
        Capabilities { peer_stores: PeerStores::All, mover: Mover::CopyEngine, graphs: true }
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
        let drained = self.drained().and_then(|()| Ok(state.current.read_epoch()?));
        // After this step no rank's kernel or copy touches any rank's workspace.
        let epoch = together(steps, deadline, drained)?;
        let request = Request { size, epoch, captured: state.calls.any_captured() };
        let (grown, captured) =
            build(steps, deadline, &self.device, &state.lane, &self.members, request)?;
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
        together(steps, deadline, Ok(()))
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&locked(&self.state).view)
    }

    fn begin(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        locked(&self.state).calls.begin(stream)
    }

    fn epoch(&self) -> Option<Epoch> {
        let state = locked(&self.state);
        (!state.calls.any_captured()).then(|| state.calls.epoch())
    }

    fn capturing(&self) -> bool {
        locked(&self.state).calls.capturing()
    }

    unsafe fn start(&self, stream: Stream<'_>, job: &Job<'_>) -> Result<Started, TransportError> {
        let state = &mut *locked(&self.state);
        let caller = state.calls.unstarted(stream)?;
        job.check(self.members.world(), *state.current.size())?;
        let pushes = match job {
            // After a capture the host no longer knows which half is next.
            Job::Rows(rows) if !rows.transfers.is_empty() && !state.calls.any_captured() => {
                // SAFETY: checked above; the caller promises the rows; nothing was captured.
                unsafe { self.push(state, caller, rows) }?;
                true
            }
            Job::Nothing | Job::Rows(_) => {
                state.calls.note(Transfers::InOrder);
                false
            }
            other => return Err(other.unusable()),
        };
        Ok(Started { view: Arc::clone(&state.view), pushes })
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
        self.drain.close(self.members.rank, || self.fault.has_failed());
    }
}
