//! The NCCL transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing waits for a peer or for the device, but where a
//! stream is full, as any launch does; the watchdog ends that, too. The host counts the epochs: no
//! call is captured. The watchdog ends before the memory and the stream that it lets go of.

use super::collective::enqueue_collective;
use super::deferred;
use super::generation::Generation;
use super::link::Link;
use super::members::Members;
use super::rounds::{NO_GRAPHS, enqueue_rounds};
use super::watch::CallWatch;
use super::watchdog::Watchdog;
use super::workspace::Workspace;
use crate::backends::connect_error::ConnectError;
use crate::backends::device::calls::{Calls, Captures, Transfers};
use crate::backends::device::lane::Lane;
use crate::backends::error::TransportError;
use crate::backends::held::HeldBytes;
use crate::backends::jobs::{Job, LibraryCollective, MessageRounds, Source, Started};
use crate::backends::kind::{Capabilities, TransportKind};
use crate::backends::offer::{Offer, keys_at_one_epoch};
use crate::backends::options::Options;
use crate::backends::transport::Transport;
use crate::backends::view::WorkspaceView;
use crate::bootstrap::control::{Collective, agree, together};
use crate::bootstrap::world::World;
use crate::device::{Device, Stream};
use crate::sync::locked;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use flux_cuda::{CudaDevice, SideStream};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One rank's device, memory, side stream and communicator.
#[derive(Debug)]
pub(crate) struct NcclTransport {
    // `Drop` drains the device, ends this, and hands what NCCL may use to who frees it.
    watchdog: Watchdog,
    state: ManuallyDrop<Mutex<State>>,
    watch: Arc<CallWatch>,
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
    calls: Calls,
    // For what is not part of a call.
    setup: SideStream,
    generation: Generation<Workspace>,
}

impl State {
    /// Opens the call in progress, of the op with number `op`, on the caller's stream.
    fn open(&mut self, caller: usize, op: u32, watch: &CallWatch) -> Result<(), TransportError> {
        self.generation.open(&self.calls, (caller, op), watch)
    }
}

impl NcclTransport {
    /// Makes a communicator of the ranks that have met. Collective.
    pub(crate) fn connect(
        world: &World,
        options: &Options,
        members: Members,
    ) -> Result<Self, ConnectError> {
        let until = Instant::now() + options.deadline;
        let (rank, size, steps, epoch) =
            (world.rank(), world.size(), world.steps(), options.first_epoch);
        let make = || {
            let device = CudaDevice::open(members.info.ordinal)?;
            // Before memory is taken; of this thread's calls none is under way.
            deferred::release_when_ended(&device, options.deadline);
            let lane = Lane::new(&device)?;
            let calls =
                Calls::new(&device, epoch, Captures::Refused(TransportKind::Nccl, NO_GRAPHS))?;
            Ok::<_, ConnectError>((lane, calls, SideStream::new(&device)?, device))
        };
        let (lane, calls, setup, device) = together(steps, until, make())?;
        let (link, setup) = Link::join(&device, setup, &members, steps, until)?;
        // From here on the watchdog has the communicator: dropped, it is given up.
        let make = || {
            let workspace = Workspace::new(&device, &setup, (rank, size), options.reserve, epoch)?;
            let watch = Arc::new(CallWatch::new(&device, world, link, epoch, options.deadline)?);
            let generation = Generation::new(workspace, &watch, epoch, options.deadline);
            let watchdog = Watchdog::new(&watch, world)?;
            Ok::<_, ConnectError>((generation, watch, watchdog))
        };
        let (generation, watch, watchdog) = together(steps, until, make())?;
        let place = Device::from(device.info().clone());
        let state = ManuallyDrop::new(Mutex::new(State { lane, calls, setup, generation }));
        Ok(Self {
            watchdog,
            state,
            watch,
            members,
            rank,
            world: size,
            deadline: options.deadline,
            device,
            place,
        })
    }

    /// Enqueues the rounds of the call in progress on the side stream.
    ///
    /// # Safety
    /// As [`enqueue_rounds`], of this rank's workspace and side stream.
    unsafe fn send(
        &self,
        state: &State,
        messages: &MessageRounds<'_>,
    ) -> Result<(), TransportError> {
        let State { lane, calls, generation, .. } = state;
        let (at, epoch) = (generation.workspace.memory(), calls.epoch());
        // SAFETY: this function's promise.
        unsafe {
            enqueue_rounds(&self.device, lane.raw(), &self.watch, at, messages, epoch, |_| Ok(()))
        }
    }

    /// Enqueues the collective of the call in progress on the caller's stream.
    ///
    /// # Safety
    /// As [`enqueue_collective`], of this rank's workspace.
    unsafe fn collect(
        &self,
        state: &mut State,
        caller: usize,
        job: &LibraryCollective,
    ) -> Result<(), TransportError> {
        let State { generation, calls, .. } = state;
        let at = generation.workspace.memory();
        // SAFETY: this function's promise.
        unsafe { enqueue_collective(&self.device, caller, &self.watch, at, job, calls) }
    }

    /// Waits for this rank's calls. Kernels' waits end by the communicator's deadline; what the
    /// side stream waits for then, by the watchdog.
    fn drained(&self, State { lane, calls, .. }: &State) -> Result<(), TransportError> {
        self.watch.drain(|| Ok(calls.are_done()? && lane.is_idle()?))
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
        self.members.capabilities()
    }

    fn explain(&self) -> String {
        format!(
            "nccl: {} ranks, messages by NCCL {}; this rank on {}; every rank has received what \
             each other sent; {}; no call can be captured in a graph; {} bytes of device memory a \
             rank, besides NCCL's own{}",
            self.world,
            self.members.version(),
            self.device(),
            self.members.sharing,
            locked(&self.state).generation.workspace.held().device,
            self.members.advice(),
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
        let State { calls, setup, generation, .. } = state;
        // No rank reaches this one's memory, so nothing names it.
        let offer = drained.as_ref().map(|&epoch| Offer { key: 0, epoch }.encode());
        let answers = agree(steps, &offer, until);
        let epoch = drained?;
        let keys = keys_at_one_epoch(&answers?);
        let made = Workspace::new(&self.device, setup, (self.rank, self.world), size, epoch);
        let grown = together(steps, until, made.and_then(|made| keys.map(|_| made)))?;
        *generation = Generation::new(grown, &self.watch, epoch, self.deadline);
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
        let state = &mut *locked(&self.state);
        let caller = state.calls.unstarted(stream)?;
        job.check(self.world.get(), state.generation.workspace.size())?;
        let _current = self.device.enter()?;
        let epoch = state.calls.epoch();
        let view = match job {
            Job::Messages(messages) if !messages.rounds.is_empty() => {
                state.open(caller, messages.op, &self.watch)?;
                state.calls.note(Transfers::AwaitsLaunch);
                state.lane.fork(caller)?;
                if matches!(messages.source, Source::Rows(_)) {
                    state.calls.note(Transfers::OnSideStreams);
                    // SAFETY: checked and forked above; the caller promises the rows.
                    unsafe { self.send(state, messages) }?;
                }
                state.generation.view_of(messages, epoch)
            }
            Job::Collective(collective) => {
                state.open(caller, collective.op, &self.watch)?;
                state.calls.note(Transfers::InOrder);
                if collective.is_ahead() {
                    // SAFETY: checked above; the caller promises the rows.
                    unsafe { self.collect(state, caller, collective) }?;
                }
                state.generation.plain()
            }
            Job::Nothing | Job::Messages(_) => {
                state.calls.note(Transfers::InOrder);
                state.generation.plain()
            }
            other => return Err(other.unusable()),
        };
        Ok(Started { view, pushes: false })
    }

    unsafe fn launched(&self, stream: Stream<'_>, job: &Job<'_>) -> Result<(), TransportError> {
        let state = &mut *locked(&self.state);
        job.check(self.world.get(), state.generation.workspace.size())?;
        match job {
            // SAFETY: checked, and forked when it was started; the caller promises the rounds.
            Job::Messages(messages) if state.calls.awaited_launch() => unsafe {
                self.send(state, messages)
            },
            Job::Collective(collective) if !collective.is_ahead() => {
                let caller = state.calls.raw(stream)?;
                // SAFETY: checked; the caller promises the rows.
                unsafe { self.collect(state, caller, collective) }
            }
            _ => Ok(()),
        }
    }

    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lane, calls, .. } = &mut *locked(&self.state);
        calls.abandon(stream, |caller| lane.join(caller))
    }

    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { lane, calls, .. } = &mut *locked(&self.state);
        calls.finish(stream, |caller| lane.join(caller))?;
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

impl Drop for NcclTransport {
    fn drop(&mut self) {
        let drained = self.drained(&locked(&self.state));
        self.watchdog.close(drained.is_ok());
        // SAFETY: taken once, here, and not used after.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        deferred::defer(&self.device, (state, Arc::clone(&self.watch)));
    }
}
