//! The host-staged transport of one rank.
//!
//! Invariant: every call's data is carried by [`Transport::carry`], enqueued between `begin` and `finish`; nothing there waits for the device unless its
//! queues are full, and then only for what earlier calls, or sending streams, do. Calls are not captured: the half of host memory that copies use would be
//! frozen in the graph.

use super::carry::Streams;
use super::proof::prove;
use super::watch::Watch;
use super::workspace::Workspace;
use crate::control::ControlPlane;
use crate::cuda::{CudaDevice, CudaError};
use crate::nvlink::{FaultBlock, Lane, Meeting, Members, NvLinkError, Order, Turn};
use crate::transport::nanoseconds;
use crate::{
    Capabilities, Carry, ConnectError, Device, Mover, Options, Push, Select, Stream, Transport, TransportError, TransportKind,
    WorkspaceView, World,
};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One rank's device, memory and side streams.
#[derive(Debug)]
pub(crate) struct Pcie {
    // Fields drop in this order, after `Drop` has drained the device: the watch ends waits until then.
    watch: Watch,
    state: Mutex<State>,
    members: Members,
    deadline_ns: u64,
    device: CudaDevice,
    place: Device,
}

#[derive(Debug)]
struct State {
    out: Lane,
    back: Lane,
    order: Order,
    current: Workspace,
    view: Arc<WorkspaceView>,
    epoch: Epoch,
    call: Option<InCall>,
}

/// The call in progress.
#[derive(Clone, Copy, Debug)]
struct InCall {
    turn: Turn,
    carried: bool,
}

/// Why a call cannot be captured.
const NO_GRAPHS: &str = "the half of host memory that its copies use would be frozen in the graph: capture with the nvlink transport";

impl Pcie {
    /// Connects ranks that have met. Collective.
    pub(crate) fn connect(world: &World, options: &Options, members: Members) -> Result<Self, ConnectError> {
        let meeting = Meeting::of(world, options);
        let unusable = |error: NvLinkError| match ConnectError::from(error) {
            ConnectError::Unusable { why, .. } => ConnectError::Unusable { select: Select::Pcie, why },
            other => other,
        };
        let device = meeting.succeed(CudaDevice::open(members.info.ordinal).map_err(NvLinkError::from)).map_err(unusable)?;
        let make = || Ok::<_, CudaError>((Lane::new(&device)?, Lane::new(&device)?, Order::new(&device)?, FaultBlock::new(&device)?));
        let (out, back, order, fault) = meeting.succeed(make().map_err(NvLinkError::from)).map_err(unusable)?;
        let epoch = options.first_epoch;
        let workspace = Workspace::new(meeting, &device, &out, &members, (options.reserve, epoch))?;
        meeting.succeed(prove(&device, (&out, &back), &workspace, members.rank, epoch).map_err(NvLinkError::from)).map_err(unusable)?;
        let deadline_ns = nanoseconds(options.deadline);
        let view = Arc::new(workspace.view(fault.address(), deadline_ns));
        let watch = Watch::start(members.rank, fault, Arc::clone(workspace.words()), epoch.before(1).get());
        let watch = meeting.succeed(watch).map_err(unusable)?;
        let state = State { out, back, order, current: workspace, view, epoch, call: None };
        let place = Device::from(device.info().clone());
        Ok(Self { watch, state: Mutex::new(state), members, deadline_ns, device, place })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked inside left a call half enqueued; the communicator aborts then, and the state is only good for dropping.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wrong_stream(&self, stream: Stream) -> TransportError {
        TransportError::WrongStream { stream, device: self.device() }
    }
}

impl Transport for Pcie {
    fn kind(&self) -> TransportKind {
        TransportKind::Pcie
    }

    fn device(&self) -> Device {
        self.place.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { peer_stores: false, mover: Mover::CopyEngine, graphs: false, processes: true }
    }

    fn explain(&self) -> String {
        let state = self.state();
        let size = state.current.size();
        format!(
            "pcie: {} ranks; this rank on {}; what a rank sends is copied to pinned memory of the host and from there by each reader, by copy engines on two \
             side streams; {} bytes of device memory and {} of pinned memory a rank",
            self.members.world(),
            self.device(),
            size.total_bytes() + size.data_bytes(),
            state.current.host_region(self.members.rank).layout.bytes().unwrap_or(u64::MAX),
        )
    }

    fn reserve(&self, size: WorkspaceSize, control: &dyn ControlPlane, deadline: Instant) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let meeting = Meeting { control, deadline };
        let drained = self.device.synchronize().and_then(|()| state.current.read_epoch(&self.device));
        // After this step no rank's kernel or copy touches any rank's workspace.
        let epoch = meeting.succeed(drained.map_err(NvLinkError::from))?;
        let grown = Workspace::new(meeting, &self.device, &state.out, &self.members, (size, epoch))?;
        state.view = Arc::new(grown.view(self.watch.fault().address(), self.deadline_ns));
        self.watch.replace(Arc::clone(grown.words()));
        state.current = grown;
        state.epoch = epoch;
        // The old memory is gone by now, on every rank after this step. Unpinning waits for all devices of the process, so it may not come beside a
        // peer's next call, which waits for this rank.
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
        let turn = state.order.begin_eager(caller, TransportKind::Pcie, NO_GRAPHS)?;
        // Here, not where the call is carried: that comes after the kernel's launch, which it runs beside.
        state.out.fork(caller)?;
        state.back.fork(caller)?;
        state.call = Some(InCall { turn, carried: false });
        Ok(())
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(self.state().epoch)
    }

    fn capturing(&self) -> bool {
        false
    }

    fn copy_engine_usable(&self) -> bool {
        false
    }

    unsafe fn push(&self, _stream: Stream, _push: &Push<'_>) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "peers' gather buffers cannot be reached: a call is carried as a whole" })
    }

    unsafe fn carry(&self, stream: Stream, carry: &Carry<'_>) -> Result<(), TransportError> {
        let state = &mut *self.state();
        stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let why = match &state.call {
            None => Some("no call is in progress"),
            Some(call) if call.carried => Some("this call was carried before"),
            Some(_) => None,
        };
        if let Some(why) = why {
            return Err(TransportError::MoverUnusable { why });
        }
        let (rank, world) = (self.members.rank, self.members.world());
        carry.route.check(world, *state.current.size())?;
        let _current = self.device.enter()?;
        if let Some(call) = &mut state.call {
            call.carried = true;
        }
        self.watch.begin(state.epoch.get());
        let State { out, back, current, epoch, .. } = &*state;
        let streams = Streams { device: &self.device, at: current, rank, world, epoch: *epoch, out, back };
        // SAFETY: checked above, forked at the call's begin; the caller promises the rows; no call is captured, so the host's count of calls is the
        // device's epoch.
        Ok(unsafe { streams.carry(carry) }?)
    }

    fn abandon(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        match state.call.take() {
            // What was handed out still reads the caller's rows.
            Some(call) if call.carried => Ok(state.back.join(caller)?),
            _ => Ok(()),
        }
    }

    fn finish(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = stream.raw().ok_or_else(|| self.wrong_stream(stream))?;
        let Some(call) = state.call.take() else { return Ok(()) };
        // The executor is on its way and will advance the device's epoch, whatever becomes of the events below.
        state.epoch = state.epoch.next();
        let _current = self.device.enter()?;
        if call.carried {
            state.back.join(caller)?;
        }
        Ok(state.order.finish(call.turn, caller)?)
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        // A peer that has given up may have sent anything before; while calls are under way they will come to that, or to the deadline, by themselves.
        let of_a_peer = || if self.watch.idle() { self.watch.fault_of_a_peer() } else { None };
        self.watch.fault().record().or_else(of_a_peer)
    }

    fn set_abort(&self, reason: u32) {
        self.watch.abort(reason);
    }

    fn drain(&self, _deadline: Instant) -> Result<(), TransportError> {
        // Kernels' waits end by the communicator's deadline, and what streams wait for a moment later, so this does.
        Ok(self.device.synchronize()?)
    }
}

impl Drop for Pcie {
    fn drop(&mut self) {
        // Nothing may be unmapped while a kernel or a copy of this rank still uses it; the peers hold what theirs use.
        if let Err(error) = self.device.synchronize() {
            tracing::warn!(%error, rank = self.members.rank, "while draining the device");
        }
    }
}
