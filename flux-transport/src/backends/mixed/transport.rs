//! The mixed transport of one rank.
//!
//! Invariant: that of nccl, with two side streams: none waits for the kernel but the rail's, for
//! flags, and the node peers' waits for the rail's only. A collective is on the caller's stream.

use super::check::fault;
use super::members::Members;
use super::passing::Passing;
use super::workspace::Workspace;
use crate::backends::connect_error::ConnectError;
use crate::backends::device::calls::{Calls, Captures, Transfers};
use crate::backends::device::lane::Lane;
use crate::backends::device::peer_memory::{Request, build};
use crate::backends::error::TransportError;
use crate::backends::held::HeldBytes;
use crate::backends::jobs::{Job, Source, Started};
use crate::backends::kind::{Capabilities, TransportKind};
use crate::backends::nccl::{
    CallWatch, Generation, Link, NO_GRAPHS, Outbox, Watchdog, deferred, enqueue_collective,
    enqueue_rounds,
};
use crate::backends::options::{Options, Select};
use crate::backends::transport::Transport;
use crate::backends::view::WorkspaceView;
use crate::bootstrap::control::{Collective, together};
use crate::bootstrap::world::World;
use crate::device::{Device, Stream};
use crate::sync::locked;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::program::Round;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use flux_cuda::{CudaDevice, CudaError, Event, SideStream};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One rank's device, memory, side streams and communicator.
#[derive(Debug)]
pub(crate) struct Mixed {
    // `Drop` drains the device, ends this, and hands what NCCL may use to who frees it.
    watchdog: Watchdog,
    state: ManuallyDrop<Mutex<State>>,
    watch: Arc<CallWatch>,
    members: Members,
    rank: Rank,
    deadline: Duration,
    device: CudaDevice,
    place: Device,
}

#[derive(Debug)]
struct State {
    lanes: Lanes,
    calls: Calls,
    // For what is not part of a call.
    setup: SideStream,
    generation: Generation<Workspace>,
}

/// The side streams.
#[derive(Debug)]
struct Lanes {
    rail: Lane,
    node_peers: Lane,
    /// What the node peers' stream waits for, round by round.
    arrived: Event,
}

impl Lanes {
    fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self {
            rail: Lane::new(device)?,
            node_peers: Lane::new(device)?,
            arrived: Event::new(device)?,
        })
    }

    fn fork(&self, caller: usize) -> Result<(), CudaError> {
        self.rail.fork(caller)?;
        self.node_peers.fork(caller)
    }

    fn join(&self, caller: usize) -> Result<(), CudaError> {
        self.rail.join(caller)?;
        self.node_peers.join(caller)
    }
}

impl Mixed {
    /// Makes a communicator of the ranks that have met. Collective.
    pub(crate) fn connect(
        world: &World,
        options: &Options,
        members: Members,
    ) -> Result<Self, ConnectError> {
        let until = Instant::now() + options.deadline;
        let (rank, steps, epoch) = (world.rank(), world.steps(), options.first_epoch);
        let make = || {
            let device = CudaDevice::open(members.rail.info.ordinal)?;
            // Before memory is taken; of this thread's calls none is under way.
            deferred::release_when_ended(&device, options.deadline);
            let lanes = Lanes::new(&device)?;
            let calls =
                Calls::new(&device, epoch, Captures::Refused(TransportKind::Mixed, NO_GRAPHS))?;
            Ok::<_, ConnectError>((lanes, calls, SideStream::new(&device)?, device))
        };
        let (lanes, calls, setup, device) = together(steps, until, make())?;
        let (link, setup) = Link::join(&device, setup, &members.rail, steps, until)?;
        let request = Request { size: options.reserve, epoch, captured: false };
        let (lane, node_peers) = (&lanes.node_peers, &members.node_peers);
        let shared = build(steps, until, &device, lane, node_peers, request);
        let (shared, _) = shared
            .map_err(|error| node_peers.mig().advised(error).into_connect_error(Select::Mixed))?;
        // From here on the watchdog has the communicator: dropped, it is given up.
        let make = || {
            let outbox = outbox(&device, &setup, (rank, members.nodes), options.reserve, epoch)?;
            let watch = Arc::new(CallWatch::new(&device, world, link, epoch, options.deadline)?);
            let generation = Generation::new(
                Workspace::new(shared, outbox, rank),
                &watch,
                epoch,
                options.deadline,
            );
            let watchdog = Watchdog::new(&watch, world)?;
            Ok::<_, ConnectError>((generation, watch, watchdog))
        };
        let (generation, watch, watchdog) = together(steps, until, make())?;
        let place = Device::from(device.info().clone());
        let state = ManuallyDrop::new(Mutex::new(State { lanes, calls, setup, generation }));
        let deadline = options.deadline;
        Ok(Self { watchdog, state, watch, members, rank, deadline, device, place })
    }

    /// Waits for this rank's calls. Kernels' waits end by the communicator's deadline; what the
    /// rail's stream waits for then, by the watchdog.
    fn drained(
        &self,
        State { lanes: Lanes { rail, node_peers, .. }, calls, .. }: &State,
    ) -> Result<(), TransportError> {
        self.watch.drain(|| Ok(calls.are_done()? && rail.is_idle()? && node_peers.is_idle()?))
    }
}

/// An outbox that is initialised.
fn outbox(
    device: &CudaDevice,
    stream: &SideStream,
    whose: (Rank, Nodes),
    size: WorkspaceSize,
    epoch: Epoch,
) -> Result<Outbox, CudaError> {
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
        self.members.rail.capabilities()
    }

    fn nodes(&self) -> Option<Nodes> {
        Some(self.members.nodes)
    }

    fn explain(&self) -> String {
        let Members { nodes, rail, .. } = &self.members;
        format!(
            "mixed: {} ranks in {nodes}; this rank is number {} of node {}, on {}; within a node \
             ranks store into each other's memory and copy engines pass on what came from other \
             nodes, {} rails between them carry messages by NCCL {}{}; what each rank wrote or \
             sent was read by its intra-node peers and its rail; {}; no call can be captured in a \
             graph; {} bytes of device memory a rank, besides NCCL's own{}",
            nodes.world(),
            nodes.local_of(self.rank),
            nodes.node_of(self.rank),
            self.device(),
            nodes.per_node(),
            rail.version(),
            rail.reach(),
            rail.sharing,
            locked(&self.state).generation.workspace.held().device,
            rail.advice(),
        )
    }

    fn reserve(
        &self,
        size: WorkspaceSize,
        steps: Collective<'_>,
        until: Instant,
    ) -> Result<(), TransportError> {
        let state = &mut *locked(&self.state);
        let drained =
            self.drained(state).and_then(|()| Ok(state.generation.workspace.read_epoch()?));
        let State { lanes, calls, setup, generation } = state;
        // After this step no rank's kernel, copy or message touches any rank's workspace.
        let epoch = together(steps, until, drained)?;
        // The ranks compare their epochs there.
        let request = Request { size, epoch, captured: false };
        let (lane, node_peers) = (&lanes.node_peers, &self.members.node_peers);
        let (shared, _) = build(steps, until, &self.device, lane, node_peers, request)?;
        let made = outbox(&self.device, setup, (self.rank, self.members.nodes), size, epoch);
        let outbox = together(steps, until, made.map_err(TransportError::from))?;
        *generation = Generation::new(
            Workspace::new(shared, outbox, self.rank),
            &self.watch,
            epoch,
            self.deadline,
        );
        calls.go_on_at(epoch);
        deferred::release(&self.device);
        // The old memory is gone on every rank before any rank's next call waits for this one:
        // freeing may wait for devices.
        together(steps, until, Ok(()))
    }

    fn view(&self) -> Arc<WorkspaceView> {
        locked(&self.state).generation.plain()
    }

    fn held(&self) -> HeldBytes {
        locked(&self.state).generation.workspace.held()
    }

    fn begin(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { calls, .. } = &mut *locked(&self.state);
        calls.begin(stream)
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(locked(&self.state).calls.epoch())
    }

    unsafe fn start(&self, stream: Stream<'_>, job: &Job<'_>) -> Result<Started, TransportError> {
        let State { lanes, calls, generation, .. } = &mut *locked(&self.state);
        let caller = calls.unstarted(stream)?;
        job.check(self.members.nodes.world().get(), generation.workspace.size())?;
        let messages = match job {
            Job::Nothing => {
                calls.note(Transfers::InOrder);
                return Ok(Started { view: generation.plain(), pushes: false });
            }
            Job::Collective(collective) => {
                let _current = self.device.enter()?;
                generation.open(calls, (caller, collective.op), &self.watch)?;
                calls.note(Transfers::InOrder);
                if collective.is_ahead() {
                    let (device, memory) = (&self.device, generation.workspace.memory());
                    // SAFETY: checked above; the caller promises the rows.
                    unsafe {
                        enqueue_collective(device, caller, &self.watch, memory, collective, calls)
                    }?;
                }
                return Ok(Started { view: generation.plain(), pushes: false });
            }
            Job::Messages(messages) => messages,
            other => return Err(other.unusable()),
        };
        if let Some(why) = fault(messages, self.rank, self.members.nodes) {
            return Err(TransportError::MoverUnusable { why });
        }
        let _current = self.device.enter()?;
        generation.open(calls, (caller, messages.op), &self.watch)?;
        calls.note(Transfers::AwaitsLaunch);
        lanes.fork(caller)?;
        let epoch = calls.epoch();
        if let Source::Rows(push) = &messages.source {
            calls.note(Transfers::OnSideStreams);
            let Lanes { rail, node_peers, arrived } = lanes;
            // SAFETY: checked and forked above; the caller promises the rows.
            let mut passing = unsafe {
                Passing::begin(&self.device, node_peers, &generation.workspace, push, epoch)
            }?;
            let memory = generation.workspace.memory();
            let arrived = |round: &Round| passing.arrived(round, rail, arrived);
            let (device, stream) = (&self.device, rail.raw());
            // SAFETY: checked and forked above; the caller promises the rows.
            unsafe {
                enqueue_rounds(device, stream, &self.watch, memory, messages, epoch, arrived)
            }?;
        }
        Ok(Started { view: generation.view_of(messages, epoch), pushes: false })
    }

    unsafe fn launched(&self, stream: Stream<'_>, job: &Job<'_>) -> Result<(), TransportError> {
        let State { lanes, calls, generation, .. } = &mut *locked(&self.state);
        job.check(self.members.nodes.world().get(), generation.workspace.size())?;
        let (device, watch, memory) = (&self.device, &self.watch, generation.workspace.memory());
        match job {
            Job::Messages(messages) if calls.awaited_launch() => {
                let (rail, epoch) = (lanes.rail.raw(), calls.epoch());
                // SAFETY: checked, and forked when it was started; the caller promises the rounds.
                unsafe { enqueue_rounds(device, rail, watch, memory, messages, epoch, |_| Ok(())) }
            }
            Job::Collective(collective) if !collective.is_ahead() => {
                let caller = calls.raw(stream)?;
                // SAFETY: checked; the caller promises the rows.
                unsafe { enqueue_collective(device, caller, watch, memory, collective, calls) }
            }
            _ => Ok(()),
        }
    }

    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lanes, calls, .. } = &mut *locked(&self.state);
        calls.abandon(stream, |caller| lanes.join(caller))
    }

    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lanes, calls, .. } = &mut *locked(&self.state);
        calls.finish(stream, |caller| lanes.join(caller))?;
        self.watch.call_is_marked();
        Ok(())
    }

    fn ask_peers(&self) {
        self.watch.ask_peers();
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.watch.record()
    }

    fn set_abort(&self, reason: u32) {
        self.watchdog.abort(reason);
    }

    fn paused_in(&self) -> Option<Epoch> {
        self.watch.paused_in()
    }

    fn progress(&self) -> Option<String> {
        Some(self.watch.progress().to_string())
    }

    fn drain(&self) -> Result<(), TransportError> {
        self.drained(&locked(&self.state))
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        // Nothing may be unmapped before.
        let drained = self.drained(&locked(&self.state));
        self.watchdog.close(drained.is_ok());
        // SAFETY: taken once, here, and not used after.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        deferred::defer(&self.device, (state, Arc::clone(&self.watch)));
    }
}
