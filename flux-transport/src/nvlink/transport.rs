//! The NVLink transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing blocks, allocates or waits for the device. The device's context is made current at every
//! entry and the thread's own restored at the exit. The fault block is never replaced, and is used without a lock or a driver call.

use super::collective::{Meeting, Members, Wanted, build};
use super::error::NvLinkError;
use super::fault::FaultBlock;
use super::mover::{Addresses, CaptureMover, Lanes, MoverJob, by_copy_engine};
use super::order::{Mode, Order};
use super::workspace::Workspace;
use crate::control::ControlPlane;
use crate::cuda::{CudaDevice, CudaError, Handles};
use crate::{Capabilities, Device, Mover, Options, Push, Stream, Transport, TransportError, TransportKind, WorkspaceView, World};
use flux_core::Rank;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One rank's device, memory and side streams.
#[derive(Debug)]
pub(crate) struct NvLink {
    // Fields drop in this order, after `Drop` has drained the device.
    state: Mutex<State>,
    fault: FaultBlock,
    members: Members,
    deadline_ns: u64,
    device: CudaDevice,
    // The same, as callers know it: made once, so that asking allocates nothing.
    place: Device,
}

#[derive(Debug)]
struct State {
    lanes: Lanes,
    order: Order,
    current: Workspace,
    // Generations that captured graphs still use.
    retired: Vec<Workspace>,
    view: Arc<WorkspaceView>,
    // The next call's epoch, as long as no call was captured.
    epoch: Epoch,
    captured: bool,
    call: Option<InCall>,
}

/// The call in progress.
#[derive(Clone, Copy, Debug)]
struct InCall {
    mode: Mode,
    forked: bool,
    sms: u32,
}

impl NvLink {
    /// Shares memory with the ranks that this one has met. Collective.
    pub(crate) fn connect(world: &World, options: &Options, members: Members) -> Result<Self, NvLinkError> {
        let meeting = Meeting::of(world, options);
        let device = meeting.succeed(CudaDevice::open(members.info.ordinal).map_err(NvLinkError::from))?;
        let make = || Ok::<_, CudaError>((Lanes::new(&device)?, Order::new(&device)?, FaultBlock::new(&device)?));
        let (lanes, order, fault) = meeting.succeed(make().map_err(NvLinkError::from))?;
        let epoch = options.first_epoch;
        let wanted = Wanted { size: options.reserve, epoch, captured: false };
        let (workspace, _) = build(meeting, &device, lanes.of(Mode::Eager), &members, wanted)?;
        let deadline_ns = u64::try_from(options.deadline.as_nanos()).unwrap_or(u64::MAX);
        let view = Arc::new(workspace.view(fault.address(), deadline_ns));
        let state = State { lanes, order, current: workspace, retired: Vec::new(), view, epoch, captured: false, call: None };
        let place = Device::from(device.info().clone());
        Ok(Self { state: Mutex::new(state), fault, members, deadline_ns, device, place })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked inside left a call half enqueued; the communicator aborts then, and the state is only good for dropping.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wrong_stream(&self, stream: Stream) -> TransportError {
        TransportError::WrongStream { stream, device: self.device() }
    }

    /// Enqueues the transfers beside the call's stream: by copy engines, or by `mover` once a call was captured.
    ///
    /// # Safety
    /// As [`Transport::push`].
    unsafe fn enqueue(&self, stream: Stream, push: &Push<'_>, mover: Option<&dyn CaptureMover>) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let Some(call) = &mut state.call else {
            return Err(TransportError::MoverUnusable { why: "no call is in progress" });
        };
        if call.forked {
            return Err(TransportError::MoverUnusable { why: "it was used in this call before" });
        }
        let at = &state.current;
        push.check(Rank::new(self.members.rank), self.members.world(), *at.size())?;
        if push.transfers.is_empty() {
            return Ok(());
        }
        if state.captured && mover.is_none() {
            let why = "a call was captured on this communicator, so the host no longer knows which half is next: a kernel must move";
            return Err(TransportError::MoverUnusable { why });
        }
        let _current = self.device.enter()?;
        let lane = state.lanes.of(call.mode);
        lane.fork(caller)?;
        call.forked = true;
        match mover.filter(|_| state.captured) {
            None => {
                let addresses = Addresses { data: at.data(), pads: at.pads(), control: at.control(), size: at.size() };
                // SAFETY: checked and forked above; the caller promises the rows; nothing was captured, so the host's count of calls is
                // the device's epoch.
                Ok(unsafe { by_copy_engine(&self.device, lane, push, addresses, state.epoch) }?)
            }
            Some(mover) => {
                let half_stride = at.size().half_stride();
                let job = MoverJob { push: *push, data: at.data(), pads: at.pads(), control: at.control(), half_stride };
                call.sms = mover.sms();
                mover.launch(&job, lane.raw()).map_err(|error| {
                    tracing::error!(%error, rank = self.members.rank, "mover kernel");
                    TransportError::MoverUnusable { why: "its kernel could not be launched" }
                })
            }
        }
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
        Capabilities { peer_stores: true, mover: Mover::CopyEngine, graphs: true, processes: true }
    }

    fn explain(&self) -> String {
        let state = self.state();
        let (world, local) = (self.members.world(), self.members.ordinals.len());
        let how = match self.members.handles {
            Handles::None => "all in this process, which maps each memory once",
            Handles::PosixFd => "the others import descriptors of memory",
        };
        let mover = if state.captured { "a kernel, as a call was captured" } else { "copy engines on one side stream" };
        format!(
            "nvlink: {world} ranks, {local} in this process ({how}); this rank on {}; what each rank wrote was read by every other; \
             moved by {mover}; {} bytes of device memory a rank",
            self.device(),
            state.current.size().total_bytes(),
        )
    }

    fn reserve(&self, size: WorkspaceSize, control: &dyn ControlPlane, deadline: Instant) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let meeting = Meeting { control, deadline };
        let drained = self.device.synchronize().and_then(|()| state.current.read_epoch(&self.device));
        // After this step no rank's kernel or copy touches any rank's workspace.
        let epoch = meeting.succeed(drained.map_err(NvLinkError::from))?;
        let wanted = Wanted { size, epoch, captured: state.captured };
        let (grown, captured) = build(meeting, &self.device, state.lanes.of(Mode::Eager), &self.members, wanted)?;
        state.view = Arc::new(grown.view(self.fault.address(), self.deadline_ns));
        let old = std::mem::replace(&mut state.current, grown);
        if captured {
            // A graph of some rank holds addresses of every rank's part.
            state.retired.push(old);
        }
        state.epoch = epoch;
        Ok(())
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&self.state().view)
    }

    fn begin(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let _current = self.device.enter()?;
        let mode = state.order.begin(caller)?;
        if mode == Mode::Eager && !self.device.owns_stream(caller)? {
            return Err(self.wrong_stream(stream));
        }
        state.captured |= mode == Mode::Captured;
        state.call = Some(InCall { mode, forked: false, sms: 0 });
        Ok(())
    }

    fn capturing(&self) -> bool {
        self.state().call.is_some_and(|call| call.mode == Mode::Captured)
    }

    fn copy_engine_usable(&self) -> bool {
        let state = self.state();
        self.members.world() > 1 && !state.captured && state.call.is_some_and(|call| !call.forked)
    }

    unsafe fn push(&self, stream: Stream, push: &Push<'_>) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(stream, push, None) }
    }

    unsafe fn push_with(&self, stream: Stream, push: &Push<'_>, mover: &dyn CaptureMover) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(stream, push, Some(mover)) }
    }

    fn mover_sms(&self) -> u32 {
        self.state().call.map_or(0, |call| call.sms)
    }

    fn abandon(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let Some(call) = state.call.take() else { return Ok(()) };
        // A lane that was drawn into a capture must come back to it.
        if call.forked { Ok(state.lanes.of(call.mode).join(caller)?) } else { Ok(()) }
    }

    fn finish(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let Some(call) = state.call.take() else { return Ok(()) };
        let _current = self.device.enter()?;
        if call.forked {
            state.lanes.of(call.mode).join(caller)?;
        }
        state.order.finish(caller)?;
        if call.mode == Mode::Eager {
            state.epoch = state.epoch.next();
        }
        Ok(())
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.fault.record()
    }

    fn set_abort(&self, reason: u32) {
        self.fault.abort(reason);
    }

    fn drain(&self, _deadline: Instant) -> Result<(), TransportError> {
        // Kernels' waits end by the communicator's deadline, so this does.
        Ok(self.device.synchronize()?)
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
