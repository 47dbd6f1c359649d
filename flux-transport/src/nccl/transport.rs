//! The NCCL transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing waits for a peer or for the device; the host waits for NCCL's threads to put messages on the stream.
//! The host counts the epochs: no call is captured. The guard ends before the memory and the stream that it lets go of.

use super::carry::{Memory, carry};
use super::guard::{Guard, Watched};
use super::join::join;
use super::members::{Members, together};
use super::views::Views;
use super::workspace::Workspace;
use crate::control::{ControlPlane, agree};
use crate::cuda::{CudaDevice, SideStream};
use crate::nvlink::{Lane, Order, Turn};
use crate::transport::{nanoseconds, same_epoch};
use crate::{
    Capabilities, ConnectError, Device, Exchange, Mover, Options, Push, Source, Stream, Transport, TransportError, TransportKind,
    WorkspaceView, World,
};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Least bytes of a message: some 40 us of an NVLink, as long as it takes NCCL to begin one.
pub(crate) const MESSAGE_BYTES: u64 = 4 << 20;
/// Why no call can be captured.
const NO_GRAPHS: &str = "what carries its messages cannot be replayed; make the call outside the capture";

/// One rank's device, memory, side stream and communicator.
#[derive(Debug)]
pub(crate) struct NcclTransport {
    // Fields drop in this order, after `Drop` has drained the device.
    guard: Guard,
    state: Mutex<State>,
    watched: Arc<Watched>,
    members: Members,
    rank: Rank,
    world: WorldSize,
    deadline: Duration,
    device: CudaDevice,
    place: Device,
}

#[derive(Debug)]
struct State {
    lane: Lane,
    order: Order,
    // For what is not part of a call.
    aside: SideStream,
    current: Workspace,
    views: Views,
    epoch: Epoch,
    // Flags are at most this old.
    refreshed: Epoch,
    call: Option<InCall>,
}

/// The call in progress.
#[derive(Clone, Copy, Debug)]
struct InCall {
    turn: Turn,
    forked: bool,
}

impl NcclTransport {
    /// Makes a communicator of the ranks that have met. Collective.
    pub(crate) fn connect(world: &World, options: &Options, members: Members) -> Result<Self, ConnectError> {
        let until = Instant::now() + options.deadline;
        let (rank, size, control) = (world.rank(), world.size(), world.control());
        let make = || {
            let device = CudaDevice::open(members.info.ordinal)?;
            Ok::<_, ConnectError>((Lane::new(&device)?, Order::new(&device)?, SideStream::new(&device)?, device))
        };
        let (lane, order, aside, device) = together(control, until, make())?;
        let link = join(&device, &aside, &members, control, (options.deadline, until))?;
        // From here on the guard has the communicator: dropped, it is given up.
        let make = || {
            let current = Workspace::new(&device, &aside, (rank, size), options.reserve, options.first_epoch)?;
            let watched = Arc::new(Watched::new(&device, rank, link)?);
            watched.await_flags(current.outbox(), options.first_epoch);
            let guard = Guard::new(&watched).map_err(|source| ConnectError::Io { what: "starting a thread to watch messages", source })?;
            Ok((current, watched, guard))
        };
        let (current, watched, guard) = together(control, until, make())?;
        let place = Device::from(device.info().clone());
        let epoch = options.first_epoch;
        let views = Views::new(current.view(0, 0, watched.fault.address(), nanoseconds(options.deadline)));
        let state = State { lane, order, aside, current, views, epoch, refreshed: epoch, call: None };
        let (state, deadline, world) = (Mutex::new(state), options.deadline, size);
        Ok(Self { guard, state, watched, members, rank, world, deadline, device, place })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked inside left a call half enqueued; the communicator aborts then, and the state is only good for dropping.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raw(&self, stream: Stream) -> Result<usize, TransportError> {
        stream.raw().ok_or_else(|| self.wrong_stream(stream))
    }

    fn wrong_stream(&self, stream: Stream) -> TransportError {
        TransportError::WrongStream { stream, device: self.device() }
    }
}

impl Transport for NcclTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Nccl
    }

    fn device(&self) -> Device {
        self.place.clone()
    }

    fn capabilities(&self) -> Capabilities {
        let mover = Mover::Messages { multiprocessors: self.members.ctas, bytes: MESSAGE_BYTES };
        Capabilities { peer_stores: false, mover, graphs: false, processes: true }
    }

    fn explain(&self) -> String {
        let Members { ctas, version, .. } = self.members;
        let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
        format!(
            "nccl: {} ranks, messages by NCCL {major}.{minor}.{patch}; this rank on {}; every rank has received what each other sent; {ctas} multiprocessors \
             are left to NCCL; no call can be captured in a graph; {} bytes of device memory a rank, besides NCCL's own",
            self.world,
            self.device(),
            self.state().current.bytes(),
        )
    }

    fn reserve(&self, size: WorkspaceSize, control: &dyn ControlPlane, until: Instant) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let drained = self.device.synchronize().and_then(|()| state.current.read_epoch());
        let answers = agree(control, &drained.as_ref().map(|epoch| epoch.get().to_le_bytes()), until);
        let epoch = drained?;
        let epochs =
            answers?.iter().map(|answer| Epoch::new(answer.as_array().map_or(0, |bytes| u32::from_le_bytes(*bytes)))).collect::<Vec<_>>();
        let made = Workspace::new(&self.device, &state.aside, (self.rank, self.world), size, epoch).map_err(TransportError::from);
        let made = made.and_then(|made| same_epoch(&epochs).map(|()| made));
        let answers = agree(control, &made.as_ref().map(|_| []), until);
        let grown = made?;
        answers?;
        self.watched.await_flags(grown.outbox(), epoch);
        state.views = Views::new(grown.view(0, 0, self.watched.fault.address(), nanoseconds(self.deadline)));
        state.current = grown;
        (state.epoch, state.refreshed) = (epoch, epoch);
        // The old memory is gone on every rank before any rank's next call waits for this one: freeing may wait for devices.
        agree(control, &Ok::<_, TransportError>([]), until)?;
        Ok(())
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&self.state().views.plain)
    }

    fn begin(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = self.raw(stream)?;
        let _current = self.device.enter()?;
        if !self.device.owns_stream(caller)? {
            return Err(self.wrong_stream(stream));
        }
        let turn = state.order.begin_eager(caller, TransportKind::Nccl, NO_GRAPHS)?;
        state.call = Some(InCall { turn, forked: false });
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
        Err(TransportError::MoverUnusable { why: "this transport carries what is pushed as messages: it is handed over as an exchange" })
    }

    unsafe fn exchange(&self, stream: Stream, exchange: &Exchange<'_>) -> Result<Arc<WorkspaceView>, TransportError> {
        let state = &mut *self.state();
        let caller = self.raw(stream)?;
        let Some(call) = state.call.as_mut().filter(|call| !call.forked) else {
            return Err(TransportError::MoverUnusable { why: "no call is in progress, or it was used in this call before" });
        };
        exchange.check(self.world.get(), *state.current.size())?;
        let place_bytes = if matches!(exchange.source, Source::Stored) { exchange.place_bytes } else { 0 };
        if exchange.rounds.is_empty() {
            return Ok(Arc::clone(&state.views.plain));
        }
        let _current = self.device.enter()?;
        let epoch = state.epoch;
        state.current.outbox().keep_fresh(&mut state.refreshed, caller, epoch)?;
        state.lane.fork(caller)?;
        call.forked = true;
        self.watched.await_flags(state.current.outbox(), epoch);
        let at = &state.current;
        let memory = Memory { data: at.data(), pad: at.pad(), size: *at.size(), rank: self.rank, outbox: at.outbox() };
        // SAFETY: checked and forked above; the caller promises the rows.
        unsafe { carry(&self.device, state.lane.raw(), &self.watched.link, memory, exchange, epoch, |_| Ok(())) }?;
        let (fault, deadline_ns) = (state.views.plain.fault, state.views.plain.deadline_ns);
        Ok(state.views.storing(place_bytes, epoch, |place_bytes, half| state.current.view(place_bytes, half, fault, deadline_ns)))
    }

    fn abandon(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = self.raw(stream)?;
        match state.call.take() {
            Some(call) if call.forked => Ok(state.lane.join(caller)?),
            _ => Ok(()),
        }
    }

    fn finish(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = self.raw(stream)?;
        let Some(call) = state.call.take() else { return Ok(()) };
        state.epoch = state.epoch.next();
        let _current = self.device.enter()?;
        if call.forked {
            state.lane.join(caller)?;
        }
        Ok(state.order.finish(call.turn, caller)?)
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.watched.record()
    }

    fn set_abort(&self, reason: u32) {
        self.watched.fault.abort(reason);
        self.guard.wake();
    }

    fn drain(&self, _deadline: Instant) -> Result<(), TransportError> {
        // Kernels' waits end by the communicator's deadline; what the side stream waits for then, by the guard. So this does.
        Ok(self.device.synchronize()?)
    }
}

impl Drop for NcclTransport {
    fn drop(&mut self) {
        // The guard is needed until nothing waits any more.
        if let Err(error) = self.device.synchronize() {
            tracing::warn!(%error, rank = self.rank.get(), "while draining the device");
        }
        self.guard.leave(self.deadline);
    }
}
