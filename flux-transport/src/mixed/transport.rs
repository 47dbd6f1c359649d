//! The mixed transport of one rank.
//!
//! Invariant: that of nccl, with two side streams: none waits for the kernel but the rail's, for flags, and the mates' waits for the rail's only.

use super::check::fault;
use super::members::Members;
use super::passing::Passing;
use super::workspace::Workspace;
use crate::control::{ControlPlane, agree};
use crate::cuda::{CudaDevice, CudaError, Event, SideStream};
use crate::nccl::{Guard, MESSAGE_BYTES, Outbox, Views, Watched, carry, join, together};
use crate::nvlink::{Lane, Meeting, Order, Turn, Wanted, build};
use crate::transport::nanoseconds;
use crate::{
    Capabilities, ConnectError, Device, Exchange, Mover, Options, Push, Source, Stream, Transport, TransportError, TransportKind,
    WorkspaceView, World,
};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Why no call can be captured.
const NO_GRAPHS: &str = "what carries its messages cannot be replayed; make the call outside the capture";

/// One rank's device, memory, side streams and communicator.
#[derive(Debug)]
pub(crate) struct Mixed {
    // Fields drop in this order, after `Drop` has drained the device.
    guard: Guard,
    state: Mutex<State>,
    watched: Arc<Watched>,
    members: Members,
    rank: Rank,
    deadline: Duration,
    device: CudaDevice,
    place: Device,
}

#[derive(Debug)]
struct State {
    rail: Lane,
    mates: Lane,
    /// What the mates' stream waits for, round by round.
    arrived: Event,
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

impl State {
    fn fork(&self, caller: usize) -> Result<(), CudaError> {
        self.rail.fork(caller)?;
        self.mates.fork(caller)
    }

    fn join(&self, caller: usize) -> Result<(), CudaError> {
        self.rail.join(caller)?;
        self.mates.join(caller)
    }
}

impl Mixed {
    /// Makes a communicator of the ranks that have met. Collective.
    pub(crate) fn connect(world: &World, options: &Options, members: Members) -> Result<Self, ConnectError> {
        let until = Instant::now() + options.deadline;
        let (rank, control, epoch) = (world.rank(), world.control(), options.first_epoch);
        let make = || {
            let device = CudaDevice::open(members.rail.info.ordinal)?;
            let lanes = (Lane::new(&device)?, Lane::new(&device)?, Event::new(&device)?);
            Ok::<_, ConnectError>((lanes, Order::new(&device)?, SideStream::new(&device)?, device))
        };
        let ((rail, mates, arrived), order, aside, device) = together(control, until, make())?;
        let link = join(&device, &aside, &members.rail, control, (options.deadline, until))?;
        let wanted = Wanted { size: options.reserve, epoch, captured: false };
        let (shared, _) = build(Meeting { control, deadline: until }, &device, &mates, &members.mates, wanted)?;
        // From here on the guard has the communicator: dropped, it is given up.
        let make = || {
            let outbox = outbox(&device, &aside, (rank, members.nodes), options.reserve, epoch)?;
            let watched = Arc::new(Watched::new(&device, rank, link)?);
            watched.await_flags(&outbox, epoch);
            let guard = Guard::new(&watched).map_err(|source| ConnectError::Io { what: "starting a thread to watch messages", source })?;
            Ok((Workspace::new(shared, outbox, rank), watched, guard))
        };
        let (current, watched, guard) = together(control, until, make())?;
        let views = Views::new(current.view(0, 0, watched.fault.address(), nanoseconds(options.deadline)));
        let place = Device::from(device.info().clone());
        let state = State { rail, mates, arrived, order, aside, current, views, epoch, refreshed: epoch, call: None };
        Ok(Self { guard, state: Mutex::new(state), watched, members, rank, deadline: options.deadline, device, place })
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

/// An outbox that is initialised.
fn outbox(device: &CudaDevice, stream: &SideStream, whose: (Rank, Nodes), size: WorkspaceSize, epoch: Epoch) -> Result<Outbox, CudaError> {
    let outbox = Outbox::new(device, stream, whose, size, epoch)?;
    stream.synchronize()?;
    Ok(outbox)
}

impl Transport for Mixed {
    fn kind(&self) -> TransportKind {
        TransportKind::Mixed
    }

    fn device(&self) -> Device {
        self.place.clone()
    }

    fn capabilities(&self) -> Capabilities {
        let mover = Mover::Messages { multiprocessors: self.members.rail.ctas, bytes: MESSAGE_BYTES };
        Capabilities { peer_stores: false, mover, graphs: false, processes: true }
    }

    fn nodes(&self) -> Option<Nodes> {
        Some(self.members.nodes)
    }

    fn explain(&self) -> String {
        let Members { nodes, rail, .. } = &self.members;
        let (major, minor, patch) = (rail.version / 10_000, rail.version / 100 % 100, rail.version % 100);
        format!(
            "mixed: {} ranks in {nodes}; this rank is number {} of node {}, on {}; within a node ranks store into each other's memory and copy engines pass on what \
             came from other nodes, {} rails between them carry messages by NCCL {major}.{minor}.{patch}; what each rank wrote or sent was read by its mates and its \
             rail; {} multiprocessors are left to NCCL; no call can be captured in a graph; {} bytes of device memory a rank, besides NCCL's own",
            nodes.world(),
            nodes.local_of(self.rank),
            nodes.node_of(self.rank),
            self.device(),
            nodes.per_node(),
            rail.ctas,
            self.state().current.bytes(),
        )
    }

    fn reserve(&self, size: WorkspaceSize, control: &dyn ControlPlane, until: Instant) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let drained = self.device.synchronize().and_then(|()| state.current.read_epoch(&self.device));
        // After this step no rank's kernel, copy or message touches any rank's workspace.
        let answers = agree(control, &drained.as_ref().map(|_| []), until);
        let epoch = drained?;
        answers?;
        // The ranks compare their epochs there.
        let wanted = Wanted { size, epoch, captured: false };
        let (shared, _) = build(Meeting { control, deadline: until }, &self.device, &state.mates, &self.members.mates, wanted)?;
        let made = outbox(&self.device, &state.aside, (self.rank, self.members.nodes), size, epoch);
        let answers = agree(control, &made.as_ref().map(|_| []), until);
        let grown = Workspace::new(shared, made?, self.rank);
        answers?;
        self.watched.await_flags(&grown.outbox, epoch);
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
        let turn = state.order.begin_eager(caller, TransportKind::Mixed, NO_GRAPHS)?;
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
        Err(TransportError::MoverUnusable {
            why: "this transport carries what is pushed as messages too: it is handed over as an exchange",
        })
    }

    unsafe fn exchange(&self, stream: Stream, exchange: &Exchange<'_>) -> Result<Arc<WorkspaceView>, TransportError> {
        let state = &mut *self.state();
        let caller = self.raw(stream)?;
        if state.call.is_none_or(|call| call.forked) {
            return Err(TransportError::MoverUnusable { why: "no call is in progress, or it was used in this call before" });
        }
        let (world, size) = (self.members.nodes.world(), state.current.size());
        exchange.check(world.get(), size)?;
        if let Some(why) = fault(exchange, self.rank, self.members.nodes) {
            return Err(TransportError::MoverUnusable { why });
        }
        let _current = self.device.enter()?;
        let epoch = state.epoch;
        state.current.outbox.keep_fresh(&mut state.refreshed, caller, epoch)?;
        state.fork(caller)?;
        if let Some(call) = &mut state.call {
            call.forked = true;
        }
        self.watched.await_flags(&state.current.outbox, epoch);
        let State { rail, mates, arrived, current, views, .. } = state;
        let (mut passing, place_bytes) = match &exchange.source {
            // SAFETY: checked and forked above; the caller promises the rows.
            Source::Rows(push) => (Some(unsafe { Passing::begin(&self.device, mates, current, push, epoch) }?), 0),
            Source::Stored => (None, exchange.place_bytes),
        };
        // SAFETY: as above.
        unsafe {
            carry(&self.device, rail.raw(), &self.watched.link, current.memory(), exchange, epoch, |round| match &mut passing {
                Some(passing) => passing.arrived(round, rail, arrived),
                None => Ok(()),
            })
        }?;
        let (fault, deadline_ns) = (views.plain.fault, views.plain.deadline_ns);
        Ok(views.storing(place_bytes, epoch, |place_bytes, half| current.view(place_bytes, half, fault, deadline_ns)))
    }

    fn abandon(&self, stream: Stream) -> Result<(), TransportError> {
        let state = &mut *self.state();
        let caller = self.raw(stream)?;
        match state.call.take() {
            Some(call) if call.forked => Ok(state.join(caller)?),
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
            state.join(caller)?;
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
        // Kernels' waits end by the communicator's deadline; what the rail's stream waits for then, by the guard. So this does.
        Ok(self.device.synchronize()?)
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        // The guard is needed until nothing waits any more. Nothing may be unmapped before.
        if let Err(error) = self.device.synchronize() {
            tracing::warn!(%error, rank = self.rank.get(), "while draining the device");
        }
        self.guard.leave(self.deadline);
    }
}
