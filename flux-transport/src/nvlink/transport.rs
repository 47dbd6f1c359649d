//! The NVLink transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing blocks, allocates or waits for the device. The device's context is made current at every
//! entry and the thread's own restored at the exit. The fault block is never replaced, and is used without a lock or a driver call.

use super::collective::{Meeting, Members, Wanted, build};
use super::error::NvLinkError;
use super::fault::FaultBlock;
use super::lane::Lane;
use super::mover::{Addresses, by_copy_engine};
use super::order::{Order, Turn};
use super::workspace::Workspace;
use crate::control::{ControlPlane, together};
use crate::cuda::{CudaDevice, CudaError, Handles, write_value_async};
use crate::drain::Drain;
use crate::transport::nanoseconds;
use crate::{Capabilities, Device, Mover, Options, Push, Stream, Transport, TransportError, TransportKind, WorkspaceView, World};
use flux_core::layout::{FaultRecord, WorkspaceSize, control};
use flux_core::signal::Epoch;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One rank's device, memory and side stream.
#[derive(Debug)]
pub(crate) struct NvLink {
    // Fields drop in this order, after `Drop` has drained the device.
    state: Mutex<State>,
    fault: FaultBlock,
    members: Members,
    deadline_ns: u64,
    drain: Drain,
    device: CudaDevice,
    // The same, as callers know it: made once, so that asking allocates nothing.
    place: Device,
}

#[derive(Debug)]
struct State {
    lane: Lane,
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
    turn: Turn,
    // Whether the side stream has a part in it.
    forked: bool,
}

impl InCall {
    fn captured(&self) -> bool {
        matches!(self.turn, Turn::Captured { .. })
    }
}

impl NvLink {
    /// Shares memory with the ranks that this one has met. Collective.
    pub(crate) fn connect(world: &World, options: &Options, members: Members) -> Result<Self, NvLinkError> {
        let meeting = Meeting::of(world, options);
        let device = meeting.succeed(CudaDevice::open(members.info.ordinal).map_err(NvLinkError::from))?;
        let make = || Ok::<_, CudaError>((Lane::new(&device)?, Order::new(&device)?, FaultBlock::new(&device)?));
        let (lane, order, fault) = meeting.succeed(make().map_err(NvLinkError::from))?;
        let epoch = options.first_epoch;
        let wanted = Wanted { size: options.reserve, epoch, captured: false };
        let (workspace, _) = build(meeting, &device, &lane, &members, wanted)?;
        let deadline_ns = nanoseconds(options.deadline);
        let view = Arc::new(workspace.view(fault.address(), deadline_ns));
        let state = State { lane, order, current: workspace, retired: Vec::new(), view, epoch, captured: false, call: None };
        let place = Device::from(device.info().clone());
        let drain = Drain::new(device.clone(), options.deadline);
        Ok(Self { state: Mutex::new(state), fault, members, deadline_ns, drain, device, place })
    }

    /// Waits for this rank's calls, and replays of graphs.
    fn drained(&self) -> Result<(), TransportError> {
        self.drain.wait(|| self.fault.has_failed())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked inside left a call half enqueued; the communicator aborts then, and the state is only good for dropping.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wrong_stream(&self, stream: Stream) -> TransportError {
        TransportError::WrongStream { stream, device: self.device() }
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
        format!(
            "nvlink: {world} ranks, {local} in this process ({how}); this rank on {}; what each rank wrote was read by every other; \
             copy engines push on one side stream where an op asks for them and no call was captured; {} bytes of device memory a rank",
            self.device(),
            state.current.size().total_bytes(),
        )
    }

    fn reserve(&self, size: WorkspaceSize, control: &dyn ControlPlane, deadline: Instant) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let meeting = Meeting { control, deadline };
        let drained = self.drained().and_then(|()| Ok(state.current.read_epoch(&self.device)?));
        // After this step no rank's kernel or copy touches any rank's workspace.
        let epoch = together(control, deadline, drained)?;
        let wanted = Wanted { size, epoch, captured: state.captured };
        let (grown, captured) = build(meeting, &self.device, &state.lane, &self.members, wanted)?;
        state.view = Arc::new(grown.view(self.fault.address(), self.deadline_ns));
        let old = std::mem::replace(&mut state.current, grown);
        if captured {
            // A graph of some rank holds addresses of every rank's part.
            state.retired.push(old);
        } else {
            drop(old);
        }
        state.epoch = epoch;
        // Unmapping may wait for devices, so it is done on all ranks before any rank's next call waits for this one.
        Ok(meeting.succeed(Ok(()))?)
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&self.state().view)
    }

    fn begin(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let _current = self.device.enter()?;
        if !self.device.owns_stream(caller)? {
            return Err(self.wrong_stream(stream));
        }
        let call = InCall { turn: state.order.begin(caller)?, forked: false };
        state.captured |= call.captured();
        state.call = Some(call);
        Ok(())
    }

    fn epoch(&self) -> Option<Epoch> {
        let state = self.state();
        (!state.captured).then_some(state.epoch)
    }

    fn capturing(&self) -> bool {
        self.state().call.is_some_and(|call| call.captured())
    }

    fn copy_engine_usable(&self) -> bool {
        let state = self.state();
        self.members.world() > 1 && !state.captured && state.call.is_some_and(|call| !call.forked)
    }

    unsafe fn push(&self, stream: Stream, push: &Push<'_>) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let why = match &state.call {
            None => Some("no call is in progress"),
            Some(_) if self.members.world() == 1 => Some("a world of one rank has no peers to move to"),
            Some(_) if state.captured => {
                Some("a call was captured on this communicator, so the host no longer knows which half is next: the kernel must move")
            }
            Some(call) if call.forked => Some("it was used in this call before"),
            Some(_) if !push.forwards.is_empty() => Some("all ranks reach each other, so nothing is passed on"),
            Some(_) => None,
        };
        if let Some(why) = why {
            return Err(TransportError::MoverUnusable { why });
        }
        let at = &state.current;
        push.check(self.members.world(), *at.size())?;
        if push.transfers.is_empty() {
            return Ok(());
        }
        let _current = self.device.enter()?;
        state.lane.fork(caller)?;
        if let Some(call) = &mut state.call {
            call.forked = true;
        }
        let addresses = Addresses { data: at.data(), pads: at.pads(), word: at.control() + control::EPOCH, size: at.size() };
        // SAFETY: checked and forked above; the caller promises the rows; nothing was captured, so the host's count of calls is the device's
        // epoch.
        unsafe { by_copy_engine(&self.device, &state.lane, push, push.transfers.iter(), addresses, state.epoch) }?;
        // Not a copy: within one device the driver may copy by a kernel, and the fused kernel that awaits this word may hold every SM.
        // SAFETY: the word is in the control block.
        Ok(unsafe { write_value_async(&self.device, at.control() + control::PUSHED, state.epoch.get(), state.lane.raw()) }?)
    }

    fn abandon(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        match state.call.take() {
            // What was handed out still reads the caller's rows.
            Some(call) if call.forked => Ok(state.lane.join(caller)?),
            _ => Ok(()),
        }
    }

    fn finish(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let Some(call) = state.call.take() else { return Ok(()) };
        if !call.captured() {
            // The executor is on its way and will advance the device's epoch, whatever becomes of the events below.
            state.epoch = state.epoch.next();
        }
        let _current = self.device.enter()?;
        if call.forked {
            state.lane.join(caller)?;
        }
        Ok(state.order.finish(call.turn, caller)?)
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.fault.record()
    }

    fn set_abort(&self, reason: u32) {
        self.fault.abort(reason);
    }

    fn drain(&self, _deadline: Instant) -> Result<(), TransportError> {
        self.drained()
    }
}

impl Drop for NvLink {
    fn drop(&mut self) {
        // Nothing may be unmapped while a kernel or a copy of this rank still uses it; the peers hold what theirs use.
        self.drain.leave(self.members.rank, || self.fault.has_failed());
    }
}
