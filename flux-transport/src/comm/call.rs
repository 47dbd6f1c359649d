//! One call on a communicator, from begin to finish.
//!
//! Invariant: while a [`Call`] lives the communicator makes no other and its workspace stays. A
//! call whose job was started is finished, or the communicator is broken.

use super::communicator::Communicator;
use super::flight::{CallState, Label, Noted};
use super::turn::Turn;
use crate::backends::{Job, Started, TransportError, WorkspaceView};
use crate::device::Stream;
use crate::reason;
use flux_core::signal::Epoch;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A call in progress.
#[derive(Debug)]
pub struct Call<'c> {
    comm: &'c Communicator,
    stream: Stream<'c>,
    view: Arc<WorkspaceView>,
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
        let noted = comm.inner.flight.begin(
            transport.epoch(),
            label,
            comm.inner.empty_calls.load(Ordering::Relaxed),
        );
        Self {
            comm,
            stream,
            view: transport.view(),
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

    /// The workspace, as this rank reaches it without any job. Executors take that of the
    /// [started](Self::start) job.
    pub fn memory(&self) -> &WorkspaceView {
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

    /// Starts the call's traffic, ahead of its executor; returns at once. Once in a call, and from
    /// then on it is [finished](Self::finish), or the communicator is broken.
    ///
    /// While a call is captured, and after, the half that a copy engine writes to is known on the
    /// device only, so the executor [pushes](Started::pushes).
    ///
    /// # Safety
    /// The rows of `job` are used by nothing else until the call has finished: on the host until
    /// [`finish`](Self::finish) returns, on a device until the stream has passed it. Every rank of
    /// the communicator starts the job of the same program.
    ///
    /// # Errors
    /// [`TransportError::BadTransfer`] and [`TransportError::MoverUnusable`] before anything moves;
    /// the driver's or the library's refusal.
    pub unsafe fn start(&mut self, job: &Job<'_>) -> Result<Started, TransportError> {
        use TransportError::{BadTransfer, MoverUnusable, WrongStream};
        // SAFETY: this function's caller vouches for the rows and the program.
        let started = unsafe { self.comm.inner.health.transport().start(self.stream, job) };
        // A driver may refuse after a part of it.
        self.handed |=
            !matches!(started, Err(BadTransfer { .. } | MoverUnusable { .. } | WrongStream { .. }));
        started
    }

    /// Has the transport carry what comes behind the executor's launch: what that stores, copies
    /// beside it, or a collective. Once, of the [started](Self::start) job.
    ///
    /// # Safety
    /// As [`start`](Self::start).
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub unsafe fn launched(&self, job: &Job<'_>) -> Result<(), TransportError> {
        // SAFETY: this function's caller vouches for the rows and the program.
        unsafe { self.comm.inner.health.transport().launched(self.stream, job) }
    }

    /// Calls [without rows](Communicator::empty_call) before this one, modulo 2^32.
    pub fn empty_calls_before(&self) -> u32 {
        self.comm.inner.empty_calls.load(Ordering::Relaxed)
    }

    /// The call's number, where the host knows it: not of a call that is captured.
    pub fn epoch(&self) -> Option<Epoch> {
        self.number
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
