//! The NCCL transport of one rank.
//!
//! Invariant: between `begin` and `finish` nothing waits for a peer or for the device, but where a
//! stream is full, as any launch does; the guard ends that, too. The host counts the epochs: no
//! call is captured. The guard ends before the memory and the stream that it lets go of.

use super::collective::Streams;
use super::deferred;
use super::generation::Generation;
use super::guard::Guard;
use super::join::join;
use super::members::Members;
use super::rounds::{NO_GRAPHS, enqueue_rounds};
use super::watched::Watched;
use super::workspace::Workspace;
use crate::backends::Transport;
use crate::backends::calls::{Calls, Captures};
use crate::backends::error::same_epoch;
use crate::backends::nvlink::Lane;
use crate::bootstrap::control::{Collective, agree, together};
use crate::cuda::{CudaDevice, SideStream};
use crate::sync::locked;
use crate::{
    Capabilities, ConnectError, Device, HeldBytes, LibraryCollective, MessageRounds, Options,
    RowTransfers, Source, Stream, TransportError, TransportKind, WorkspaceView, World,
};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One rank's device, memory, side stream and communicator.
#[derive(Debug)]
pub(crate) struct NcclTransport {
    // `Drop` drains the device, ends this, and hands what NCCL may use to who frees it.
    guard: Guard,
    state: ManuallyDrop<Mutex<State>>,
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
    calls: Calls,
    // For what is not part of a call.
    aside: SideStream,
    generation: Generation<Workspace>,
}

impl NcclTransport {
    /// Makes a communicator of the ranks that have met. Collective.
    pub(crate) fn connect(
        world: &World,
        options: &Options,
        members: Members,
    ) -> Result<Self, ConnectError> {
        let began = Instant::now();
        let until = began + options.deadline;
        let (rank, size, steps, epoch) =
            (world.rank(), world.size(), world.steps(), options.first_epoch);
        let make = || {
            let device = CudaDevice::open(members.info.ordinal)?;
            // Before memory is taken; of this thread's calls none is under way.
            deferred::settle(&device, began + options.deadline / 2);
            let lane = Lane::new(&device)?;
            let calls =
                Calls::new(&device, epoch, Captures::Refused(TransportKind::Nccl, NO_GRAPHS))?;
            Ok::<_, ConnectError>((lane, calls, SideStream::new(&device)?, device))
        };
        let (lane, calls, aside, device) = together(steps, until, make())?;
        let (link, aside) = join(&device, aside, &members, steps, until)?;
        // From here on the guard has the communicator: dropped, it is given up.
        let make = || {
            let workspace = Workspace::new(&device, &aside, (rank, size), options.reserve, epoch)?;
            let watched = Arc::new(Watched::new(&device, rank, link, options.deadline)?);
            let generation = Generation::new(workspace, &watched, epoch, options.deadline);
            let guard = Guard::new(&watched)?;
            Ok::<_, ConnectError>((generation, watched, guard))
        };
        let (generation, watched, guard) = together(steps, until, make())?;
        let place = Device::from(device.info().clone());
        let state = ManuallyDrop::new(Mutex::new(State { lane, calls, aside, generation }));
        Ok(Self {
            guard,
            state,
            watched,
            members,
            rank,
            world: size,
            deadline: options.deadline,
            device,
            place,
        })
    }

    /// Waits for this rank's calls. Kernels' waits end by the communicator's deadline; what the
    /// side stream waits for then, by the guard.
    fn drained(&self, State { lane, calls, .. }: &State) -> Result<(), TransportError> {
        self.watched.drain(|| Ok(calls.are_done()? && lane.is_idle()?))
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
        let State { calls, aside, generation, .. } = state;
        let answers = agree(steps, &drained.as_ref().map(|epoch| epoch.get().to_le_bytes()), until);
        let epoch = drained?;
        let epochs = epochs(&answers?);
        let made = Workspace::new(&self.device, aside, (self.rank, self.world), size, epoch);
        let grown =
            together(steps, until, made.and_then(|made| same_epoch(&epochs?).map(|()| made)))?;
        *generation = Generation::new(grown, &self.watched, epoch, self.deadline);
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
            why: "this transport carries what is pushed as messages: it is handed over as an \
                  exchange",
        })
    }

    unsafe fn send_rounds(
        &self,
        stream: Stream<'_>,
        exchange: &MessageRounds<'_>,
    ) -> Result<Arc<WorkspaceView>, TransportError> {
        let State { lane, calls, generation, .. } = &mut *locked(&self.state);
        let caller = calls.uncarried(stream)?;
        exchange.check(self.world.get(), generation.workspace.size())?;
        if exchange.rounds.is_empty() {
            return Ok(generation.plain());
        }
        let _current = self.device.enter()?;
        generation.open(calls, (caller, exchange.op), &self.watched, |caller| lane.fork(caller))?;
        let (at, epoch) = (generation.workspace.memory(), calls.epoch());
        if matches!(exchange.source, Source::Stored { .. }) {
            calls.stores();
        } else {
            // SAFETY: checked and forked above; the caller promises the rows.
            let carried = unsafe {
                enqueue_rounds(&self.device, lane.raw(), &self.watched, at, exchange, epoch, |_| {
                    Ok(())
                })
            };
            carried.inspect_err(|error| self.watched.refused(error))?;
        }
        Ok(generation.view_of(exchange, epoch))
    }

    unsafe fn send_stored_rounds(
        &self,
        stream: Stream<'_>,
        exchange: &MessageRounds<'_>,
    ) -> Result<(), TransportError> {
        let State { lane, calls, generation, .. } = &mut *locked(&self.state);
        calls.stored(stream)?;
        exchange.check(self.world.get(), generation.workspace.size())?;
        let (at, epoch) = (generation.workspace.memory(), calls.epoch());
        // SAFETY: checked above, and forked by `exchange`.
        let sent = unsafe {
            enqueue_rounds(&self.device, lane.raw(), &self.watched, at, exchange, epoch, |_| Ok(()))
        };
        sent.inspect_err(|error| self.watched.refused(error))
    }

    unsafe fn collective(
        &self,
        stream: Stream<'_>,
        collective: &LibraryCollective,
    ) -> Result<(), TransportError> {
        let State { lane, calls, generation, .. } = &mut *locked(&self.state);
        let caller = calls.uncarried(stream)?;
        collective.check(self.world.get(), generation.workspace.size())?;
        let _current = self.device.enter()?;
        generation.open(calls, (caller, collective.op), &self.watched, |_| Ok(()))?;
        let streams = Streams {
            device: &self.device,
            caller,
            lane,
            watched: &self.watched,
            at: generation.workspace.memory(),
        };
        // SAFETY: checked above; the caller promises the shard.
        let enqueued = unsafe { streams.enqueue(collective, calls.epoch()) };
        enqueued.inspect_err(|error| self.watched.refused(error))?;
        // What is left on the side stream concerns nobody who comes next.
        calls.joined();
        Ok(())
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

/// What ranks say the number of the next call is.
fn epochs(answers: &[Vec<u8>]) -> Result<Vec<Epoch>, TransportError> {
    let one = |(rank, answer): (u32, &Vec<u8>)| {
        let number = <[u8; 4]>::try_from(answer.as_slice())
            .map(|bytes| Epoch::new(u32::from_le_bytes(bytes)));
        number.map_err(|_| {
            let reason =
                format!("it told the number of the next call in {} bytes, not 4", answer.len());
            TransportError::PeerFailed { rank: Rank::new(rank), reason }
        })
    };
    (0..).zip(answers).map(one).collect()
}

impl Drop for NcclTransport {
    fn drop(&mut self) {
        let drained = self.drained(&locked(&self.state));
        self.guard.leave(drained.is_ok());
        // SAFETY: taken once, here, and not used after.
        let state = unsafe { ManuallyDrop::take(&mut self.state) };
        deferred::leave(&self.device, (state, Arc::clone(&self.watched)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_whose_number_is_none_is_named() {
        let said = |last: &[u8]| epochs(&[vec![7, 0, 0, 0], last.to_vec()]);
        assert_eq!(said(&[0, 1, 0, 0]).ok(), Some(vec![Epoch::new(7), Epoch::new(256)]));
        for garbage in [&[][..], &[1, 2, 3], &[1, 2, 3, 4, 5]] {
            assert!(
                matches!(said(garbage), Err(TransportError::PeerFailed { rank, .. }) if rank.get() == 1),
                "{garbage:?}"
            );
        }
    }
}
