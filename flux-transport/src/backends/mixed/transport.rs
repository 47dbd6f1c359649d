//! The mixed transport of one rank.
//!
//! Invariant: that of nccl, with two side streams: none waits for the kernel but the rail's, for
//! flags, and the node peers' waits for the rail's only.

use super::check::fault;
use super::members::Members;
use super::passing::Passing;
use super::workspace::Workspace;
use crate::backends::Transport;
use crate::backends::calls::{Calls, Captures};
use crate::backends::nccl::{
    Generation, Guard, NO_GRAPHS, Outbox, Watched, deferred, enqueue_rounds, join,
};
use crate::backends::nvlink::{Lane, Meeting, Wanted, build};
use crate::bootstrap::control::{Collective, together};
use crate::cuda::{CudaDevice, CudaError, Event, SideStream};
use crate::sync::locked;
use crate::{
    Capabilities, ConnectError, Device, HeldBytes, MessageRounds, Options, RowTransfers, Select,
    Source, Stream, TransportError, TransportKind, WorkspaceView, World,
};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::program::Round;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One rank's device, memory, side streams and communicator.
#[derive(Debug)]
pub(crate) struct Mixed {
    // `Drop` drains the device, ends this, and hands what NCCL may use to who frees it.
    guard: Guard,
    state: ManuallyDrop<Mutex<State>>,
    watched: Arc<Watched>,
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
    aside: SideStream,
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
        let began = Instant::now();
        let until = began + options.deadline;
        let (rank, steps, epoch) = (world.rank(), world.steps(), options.first_epoch);
        let make = || {
            let device = CudaDevice::open(members.rail.info.ordinal)?;
            // Before memory is taken; of this thread's calls none is under way.
            deferred::settle(&device, began + options.deadline / 2);
            let lanes = Lanes::new(&device)?;
            let calls =
                Calls::new(&device, epoch, Captures::Refused(TransportKind::Mixed, NO_GRAPHS))?;
            Ok::<_, ConnectError>((lanes, calls, SideStream::new(&device)?, device))
        };
        let (lanes, calls, aside, device) = together(steps, until, make())?;
        let (link, aside) = join(&device, aside, &members.rail, steps, until)?;
        let wanted = Wanted { size: options.reserve, epoch, captured: false };
        let shared = build(
            Meeting { steps, deadline: until },
            &device,
            &lanes.node_peers,
            &members.node_peers,
            wanted,
        );
        let (shared, _) =
            shared.map_err(|error| members.node_peers.mig().advised(error).of(Select::Mixed))?;
        // From here on the guard has the communicator: dropped, it is given up.
        let make = || {
            let outbox = outbox(&device, &aside, (rank, members.nodes), options.reserve, epoch)?;
            let watched = Arc::new(Watched::new(&device, rank, link, options.deadline)?);
            let generation = Generation::new(
                Workspace::new(shared, outbox, rank),
                &watched,
                epoch,
                options.deadline,
            );
            let guard = Guard::new(&watched)?;
            Ok::<_, ConnectError>((generation, watched, guard))
        };
        let (generation, watched, guard) = together(steps, until, make())?;
        let place = Device::from(device.info().clone());
        let state = ManuallyDrop::new(Mutex::new(State { lanes, calls, aside, generation }));
        Ok(Self { guard, state, watched, members, rank, deadline: options.deadline, device, place })
    }

    /// Waits for this rank's calls. Kernels' waits end by the communicator's deadline; what the
    /// rail's stream waits for then, by the guard.
    fn drained(
        &self,
        State { lanes: Lanes { rail, node_peers, .. }, calls, .. }: &State,
    ) -> Result<(), TransportError> {
        self.watched.drain(|| Ok(calls.are_done()? && rail.is_idle()? && node_peers.is_idle()?))
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
             nodes, {} rails between them carry messages by NCCL {}; what each rank wrote or sent \
             was read by its intra-node peers and its rail; {}; no call can be captured in a \
             graph; {} bytes of device memory a rank, besides NCCL's own{}",
            nodes.world(),
            nodes.local_of(self.rank),
            nodes.node_of(self.rank),
            self.device(),
            nodes.per_node(),
            rail.version(),
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
        let drained = self
            .drained(state)
            .and_then(|()| Ok(state.generation.workspace.read_epoch(&self.device)?));
        let State { lanes, calls, aside, generation } = state;
        // After this step no rank's kernel, copy or message touches any rank's workspace.
        let epoch = together(steps, until, drained)?;
        // The ranks compare their epochs there.
        let wanted = Wanted { size, epoch, captured: false };
        let (shared, _) = build(
            Meeting { steps, deadline: until },
            &self.device,
            &lanes.node_peers,
            &self.members.node_peers,
            wanted,
        )?;
        let made = outbox(&self.device, aside, (self.rank, self.members.nodes), size, epoch);
        let outbox = together(steps, until, made.map_err(TransportError::from))?;
        *generation = Generation::new(
            Workspace::new(shared, outbox, self.rank),
            &self.watched,
            epoch,
            self.deadline,
        );
        calls.go_on_at(epoch);
        deferred::sweep(&self.device);
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
        calls.begin(stream, |_| Ok(()))
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(locked(&self.state).calls.epoch())
    }

    unsafe fn push(
        &self,
        _stream: Stream<'_>,
        _push: &RowTransfers<'_>,
    ) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable {
            why: "this transport carries what is pushed as messages too: it is handed over as an \
                  exchange",
        })
    }

    unsafe fn send_rounds(
        &self,
        stream: Stream<'_>,
        exchange: &MessageRounds<'_>,
    ) -> Result<Arc<WorkspaceView>, TransportError> {
        let State { lanes, calls, generation, .. } = &mut *locked(&self.state);
        let caller = calls.uncarried(stream)?;
        exchange.check(self.members.nodes.world().get(), generation.workspace.size())?;
        if let Some(why) = fault(exchange, self.rank, self.members.nodes) {
            return Err(TransportError::MoverUnusable { why });
        }
        let _current = self.device.enter()?;
        generation
            .open(calls, (caller, exchange.op), &self.watched, |caller| lanes.fork(caller))?;
        let epoch = calls.epoch();
        if let Source::Rows(push) = &exchange.source {
            let Lanes { rail, node_peers, arrived } = lanes;
            // SAFETY: checked and forked above; the caller promises the rows.
            let mut passing = unsafe {
                Passing::begin(&self.device, node_peers, &generation.workspace, push, epoch)
            }?;
            // SAFETY: as above.
            let carried = unsafe {
                let arrived = |round: &Round| passing.arrived(round, rail, arrived);
                enqueue_rounds(
                    &self.device,
                    rail.raw(),
                    &self.watched,
                    generation.workspace.memory(),
                    exchange,
                    epoch,
                    arrived,
                )
            };
            carried.inspect_err(|error| self.watched.refused(error))?;
        } else {
            calls.stores();
        }
        Ok(generation.view_of(exchange, epoch))
    }

    unsafe fn send_stored_rounds(
        &self,
        stream: Stream<'_>,
        exchange: &MessageRounds<'_>,
    ) -> Result<(), TransportError> {
        let State { lanes, calls, generation, .. } = &mut *locked(&self.state);
        calls.stored(stream)?;
        let epoch = calls.epoch();
        exchange.check(self.members.nodes.world().get(), generation.workspace.size())?;
        let memory = generation.workspace.memory();
        // SAFETY: checked, and forked by `exchange`.
        let carried = unsafe {
            enqueue_rounds(
                &self.device,
                lanes.rail.raw(),
                &self.watched,
                memory,
                exchange,
                epoch,
                |_| Ok(()),
            )
        };
        carried.inspect_err(|error| self.watched.refused(error))
    }

    fn sequence_hash(&self) -> Option<u32> {
        let State { generation, .. } = &*locked(&self.state);
        // Without intra-node peers the hosts compare.
        self.members
            .nodes
            .are_mixed()
            .then(|| generation.workspace.outbox.hashes().last().history())
    }

    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lanes, calls, .. } = &mut *locked(&self.state);
        calls.abandon(stream, |caller| lanes.join(caller))
    }

    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lanes, calls, .. } = &mut *locked(&self.state);
        calls.finish(stream, |caller| lanes.join(caller))
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.watched.record()
    }

    fn set_abort(&self, reason: u32) {
        self.guard.abort(reason);
    }

    fn progress(&self) -> Option<String> {
        Some(self.watched.progress())
    }

    fn drain(&self) -> Result<(), TransportError> {
        self.drained(&locked(&self.state))
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        // Nothing may be unmapped before.
        let drained = self.drained(&locked(&self.state));
        self.guard.leave(drained.is_ok());
        // SAFETY: taken once, here, and not used after.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        deferred::leave(&self.device, (state, Arc::clone(&self.watched)));
    }
}
