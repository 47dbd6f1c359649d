//! One call on a communicator, from begin to finish.
//!
//! Invariant: while a [`Call`] lives the communicator makes no other and its workspace stays. A
//! call that handed out transfers or the workspace is finished, or the communicator is broken.

use super::communicator::Communicator;
use super::flight::{CallState, Label, Noted};
use super::turn::Turn;
use crate::backends::reason;
use crate::{
    LibraryCollective, MessageRounds, RowTransfers, StagedTransfer, Stream, TransportError,
    WorkspaceView,
};
use flux_core::signal::Epoch;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A call in progress.
#[derive(Debug)]
pub struct Call<'c> {
    comm: &'c Communicator,
    stream: Stream<'c>,
    view: Arc<WorkspaceView>,
    pushes: bool,
    // Whether peers may have been given anything, so that the call cannot be taken back.
    handed: bool,
    // The call's number, where the host knows it.
    number: Option<Epoch>,
    noted: Noted,
    finished: bool,
    _turn: Turn<'c>,
}

impl Communicator {
    /// Begins a call, ordered after the one before it. Waits for another thread's call, at most for
    /// the deadline.
    ///
    /// # Errors
    /// [`TransportError::Broken`] after a fault; [`TransportError::InCall`] in a call of this
    /// thread; [`TransportError::NoTurn`] if another thread's call does not end;
    /// [`TransportError::WrongStream`]. Nothing has begun then, and the call can be tried again.
    pub fn begin<'c>(&'c self, stream: Stream<'c>) -> Result<Call<'c>, TransportError> {
        self.begin_as(stream, None)
    }

    /// As [`begin`](Self::begin), with a label for the flight record and errors.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn begin_as<'c>(
        &'c self,
        stream: Stream<'c>,
        label: Option<Label>,
    ) -> Result<Call<'c>, TransportError> {
        let turn = self.turn()?;
        self.working()?;
        self.inner.health.transport().begin(stream)?;
        let mut call = Call::new(self, turn, stream, label);
        call.count()?;
        Ok(call)
    }
}

impl Communicator {
    /// Does `work` in this rank's turn: no call of another thread is in progress meanwhile.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    #[doc(hidden)]
    pub fn in_turn<R>(&self, work: impl FnOnce() -> R) -> Result<R, TransportError> {
        let _turn = self.turn()?;
        self.working()?;
        Ok(work())
    }

    /// Counts a call without rows: it has no number, and nothing is enqueued. Later calls say how
    /// many went before, so ranks that differ are found in the next call that has rows.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn empty_call(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let _turn = self.turn()?;
        self.working()?;
        let device = self.device();
        if stream.raw().is_some() != device.ordinal().is_some() {
            return Err(TransportError::WrongStream { stream: stream.raw(), device });
        }
        self.inner.empty_calls.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl<'c> Call<'c> {
    fn new(
        comm: &'c Communicator,
        turn: Turn<'c>,
        stream: Stream<'c>,
        label: Option<Label>,
    ) -> Self {
        let transport = comm.inner.health.transport();
        let noted = comm.inner.flight.begin(transport.epoch(), label);
        Self {
            comm,
            stream,
            view: transport.view(),
            pushes: false,
            handed: false,
            number: None,
            noted,
            finished: false,
            _turn: turn,
        }
    }

    /// Counts the call. A captured call is counted by the device when its graph is launched.
    fn count(&mut self) -> Result<(), TransportError> {
        let health = &self.comm.inner.health;
        let Some(epoch) = health.transport().epoch().filter(|_| !self.capturing()) else {
            return Ok(());
        };
        self.number = Some(epoch);
        health.begin(epoch);
        self.comm.working()
    }

    /// The workspace, as this rank's executor reaches it.
    pub fn memory(&self) -> &WorkspaceView {
        &self.view
    }

    /// The workspace for an executor about to run. Unless the call is then
    /// [finished](Self::finish), the communicator is broken.
    pub fn hand_over(&mut self) -> &WorkspaceView {
        self.handed = true;
        &self.view
    }

    /// The stream that the call was begun with.
    pub fn stream(&self) -> Stream<'c> {
        self.stream
    }

    /// Whether the call becomes part of a CUDA graph.
    pub fn capturing(&self) -> bool {
        self.comm.inner.health.transport().capturing()
    }

    /// Whether [`push`](Self::push) can be used: once in a call, and not in a world of one. While a
    /// call is captured, and after, the half that a copy engine writes to is known on the device
    /// only, and the kernel must push.
    pub fn copy_engine_usable(&self) -> bool {
        self.comm.inner.health.transport().copy_engine_usable()
    }

    /// Has the mover carry this rank's shard to gather buffers (AllGather-GEMM); returns at once.
    /// Once in a call.
    ///
    /// # Safety
    /// The shard stays readable and unwritten until the call has finished: on the host until
    /// [`finish`](Self::finish) returns, on a device until the stream has passed it.
    ///
    /// # Errors
    /// [`TransportError::BadTransfer`] and [`TransportError::MoverUnusable`] before anything moves.
    pub unsafe fn push(&mut self, push: &RowTransfers<'_>) -> Result<(), TransportError> {
        if push.transfers.is_empty() {
            return Ok(());
        }
        // SAFETY: this function's caller vouches for the shard.
        let handed = unsafe { self.comm.inner.health.transport().push(self.stream, push) };
        self.note(handed)
    }

    /// Carries all that this call sends and receives, where executors do not reach peers' memory;
    /// returns at once. Once in a call, after the kernel's launch.
    ///
    /// # Safety
    /// As [`push`](Self::push).
    ///
    /// # Errors
    /// [`TransportError::BadTransfer`] and [`TransportError::MoverUnusable`] before anything moves.
    pub unsafe fn stage(&mut self, carry: &StagedTransfer<'_>) -> Result<(), TransportError> {
        // SAFETY: this function's caller vouches for the shard.
        let handed = unsafe { self.comm.inner.health.transport().stage(self.stream, carry) };
        self.handed |= Self::handed_out(&handed);
        handed
    }

    /// Lets the executor scatter rows to peers itself, where the transport [supports
    /// it](crate::PeerStores::Rows); [`memory`](Self::memory) then shows where. Instead of
    /// [`stage`](Self::stage), before the kernel's launch. `op`: as in [`StagedTransfer::op`].
    ///
    /// # Errors
    /// [`TransportError::MoverUnusable`] if unsupported or the call was scattered or carried
    /// already; [`TransportError::WrongStream`].
    pub fn scatter(&mut self, op: u32) -> Result<(), TransportError> {
        let handed = self.comm.inner.health.transport().scatter(self.stream, op);
        self.handed |= Self::handed_out(&handed);
        self.view = handed?;
        Ok(())
    }

    fn handed_out<T>(handed: &Result<T, TransportError>) -> bool {
        use TransportError::{BadTransfer, MoverUnusable, WrongStream};
        !matches!(handed, Err(BadTransfer { .. } | MoverUnusable { .. } | WrongStream { .. }))
    }

    /// Notes that transfers were handed out: a driver may refuse after a part of them.
    fn note(&mut self, handed: Result<(), TransportError>) -> Result<(), TransportError> {
        let began = Self::handed_out(&handed);
        self.pushes |= began;
        self.handed |= began;
        handed
    }

    /// Has messages carry what this rank's executor gives and awaits, where the transport's mover
    /// [carries messages](crate::Mover::Messages); [`memory`](Self::memory) is from then on as the
    /// executor uses it. Returns at once. At most once in a call.
    ///
    /// # Safety
    /// As [`push`](Self::push); and every rank of the communicator hands over the rounds of the
    /// same program.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub unsafe fn send_rounds(
        &mut self,
        exchange: &MessageRounds<'_>,
    ) -> Result<(), TransportError> {
        // SAFETY: this function's caller vouches for the rows and the rounds.
        let handed =
            unsafe { self.comm.inner.health.transport().send_rounds(self.stream, exchange) };
        self.handed |= Self::handed_out(&handed);
        self.view = handed?;
        Ok(())
    }

    /// Has messages carry what the executor stores, which was launched, for the
    /// [rounds](Self::send_rounds) of this call.
    ///
    /// # Safety
    /// As [`send_rounds`](Self::send_rounds), of the same.
    ///
    /// # Errors
    /// [`TransportError::MoverUnusable`] where no such exchange waits for it;
    /// [`TransportError::Nccl`].
    pub unsafe fn send_stored_rounds(
        &self,
        exchange: &MessageRounds<'_>,
    ) -> Result<(), TransportError> {
        // SAFETY: this function's caller vouches for the rounds.
        unsafe { self.comm.inner.health.transport().send_stored_rounds(self.stream, exchange) }
    }

    /// Puts a collective of the transport's library on the call's stream, as all the traffic of a
    /// sequential call: what is enqueued next comes after it. Once in a call.
    ///
    /// # Safety
    /// The shard is used by nothing else until the call has finished on its stream; every rank of
    /// the communicator hands over the same collective.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub unsafe fn collective(
        &mut self,
        collective: &LibraryCollective,
    ) -> Result<(), TransportError> {
        // SAFETY: this function's caller vouches for the shard.
        let handed =
            unsafe { self.comm.inner.health.transport().collective(self.stream, collective) };
        self.handed |= Self::handed_out(&handed);
        handed
    }

    /// The op-sequence hash that the executor announces on pads in the op's place, where it does.
    pub fn sequence_hash(&self) -> Option<u32> {
        self.comm.inner.health.transport().sequence_hash()
    }

    /// Calls [without rows](Communicator::empty_call) before this one, modulo 2^32.
    pub fn empty_calls_before(&self) -> u32 {
        self.comm.inner.empty_calls.load(Ordering::Relaxed)
    }

    /// The call's number, where the host knows it: not of a call that is captured.
    pub fn epoch(&self) -> Option<Epoch> {
        self.number
    }

    /// Whether the mover reads the shard, so that the executor must await its end.
    pub fn pushes(&self) -> bool {
        self.pushes
    }

    /// Ends the call: what comes next on the stream comes after it. On the host the call is then
    /// over.
    ///
    /// # Errors
    /// The driver's refusal; on the host [`TransportError::Broken`] if the peers have given this
    /// rank up.
    pub fn finish(mut self) -> Result<(), TransportError> {
        self.finished = true;
        let inner = &self.comm.inner;
        let finished = inner.health.transport().finish(self.stream);
        if self.stream != Stream::Host {
            inner.flight.note(
                self.noted,
                if finished.is_ok() { CallState::Launched } else { CallState::Failed },
            );
            return finished;
        }
        // A rank that was stopped finds its data, and hears what its peers made of its absence.
        inner.world.control().settle();
        let (given_up, failed) =
            (inner.health.given_up_by().is_some(), inner.health.transport().read_fault().is_some());
        let done = finished.is_ok() && !given_up && !failed;
        inner.flight.note(self.noted, if done { CallState::Done } else { CallState::Failed });
        finished?;
        if given_up { self.comm.working() } else { Ok(()) }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let health = &self.comm.inner.health;
        self.comm
            .inner
            .flight
            .note(self.noted, if self.handed { CallState::Failed } else { CallState::GivenUp });
        if self.handed {
            self.comm.give_up(reason::UNFINISHED);
        } else if let Some(epoch) = self.number {
            health.departures().take_back(epoch);
        }
        if let Err(error) = health.transport().abandon(self.stream) {
            tracing::error!(%error, "a call that was given up cannot be finished");
        }
    }
}
