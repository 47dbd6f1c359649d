//! The calls of a rank on a device, in order, with side streams forked from and joined to the
//! caller's.
//!
//! Invariant: one call is in progress from begin to finish or abandon. Until a capture the host
//! counts the device's epoch, so the buffer index is known; replayed graphs advance it unseen.

mod age;
mod history;
mod order;

pub(crate) use self::age::{AHEAD, Refreshed};
pub(crate) use self::history::{OpHash, OpHashes};
use self::order::{Order, StreamTurn};
use crate::backends::error::TransportError;
use crate::backends::kind::TransportKind;
use crate::device::{Device, Stream};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, Event};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Calls {
    order: Order,
    epoch: Epoch,
    call: Option<InCall>,
    captures: Captures,
    device: CudaDevice,
}

/// Whether calls may become part of graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Captures {
    /// They may not, on this transport, in these words.
    Refused(TransportKind, &'static str),
    /// They may, and whether any has.
    Taken(bool),
}

#[derive(Debug)]
struct InCall {
    turn: StreamTurn,
    transfers: Transfers,
    /// What marks its end, where others look at that, too.
    end: Option<Arc<Event>>,
}

/// What has become of a call's job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfers {
    /// It was not started.
    NotStarted,
    /// It was started, and the caller's stream is ordered after all of it.
    InOrder,
    /// It was started, on side streams that the caller's stream is to be ordered after.
    OnSideStreams,
    /// The same, and a part of it follows the executor's launch.
    AwaitsLaunch,
}

impl InCall {
    /// Whether side streams may have work of it that the caller's stream is not ordered after.
    fn is_to_be_joined(&self) -> bool {
        matches!(self.transfers, Transfers::OnSideStreams | Transfers::AwaitsLaunch)
    }
}

impl Captures {
    /// Takes note of a call that begins.
    fn note(&mut self, turn: StreamTurn) -> Result<(), TransportError> {
        match self {
            Self::Refused(transport, why) if turn.is_captured() => {
                Err(TransportError::NotCapturable { transport: *transport, why })
            }
            Self::Refused(..) => Ok(()),
            Self::Taken(any) => {
                *any |= turn.is_captured();
                Ok(())
            }
        }
    }
}

impl Calls {
    /// Calls on `device`, the first with number `epoch`.
    pub(crate) fn new(
        device: &CudaDevice,
        epoch: Epoch,
        captures: Captures,
    ) -> Result<Self, CudaError> {
        Ok(Self { order: Order::new(device)?, epoch, call: None, captures, device: device.clone() })
    }

    /// The number of the next call or the one in progress, until one [was
    /// captured](Self::any_captured).
    pub(crate) const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether any call became part of a graph.
    pub(crate) fn any_captured(&self) -> bool {
        self.captures == Captures::Taken(true)
    }

    /// Whether the call in progress becomes part of a graph.
    pub(crate) fn capturing(&self) -> bool {
        self.call.as_ref().is_some_and(|call| call.turn.is_captured())
    }

    /// Whether all calls that were finished and not captured are done on the device.
    pub(crate) fn are_done(&self) -> Result<bool, CudaError> {
        self.order.is_done()
    }

    /// Goes on with call `epoch`, where another workspace stands.
    pub(crate) const fn go_on_at(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }

    /// Begins a call on `stream`, after the call before.
    pub(crate) fn begin(&mut self, stream: Stream<'_>) -> Result<(), TransportError> {
        let caller = self.raw(stream)?;
        let _current = self.device.enter()?;
        if !self.device.owns_stream(caller)? {
            return Err(self.wrong_stream(stream));
        }
        let turn = self.order.begin(caller)?;
        self.captures.note(turn)?;
        self.call = Some(InCall { turn, transfers: Transfers::NotStarted, end: None });
        Ok(())
    }

    /// The caller's stream, if the job of the call in progress can be started: once.
    pub(crate) fn unstarted(&self, stream: Stream<'_>) -> Result<usize, TransportError> {
        let caller = self.raw(stream)?;
        let why = match &self.call {
            None => "no call is in progress",
            Some(InCall { transfers: Transfers::NotStarted, .. }) => return Ok(caller),
            Some(_) => "a job of this call was started before",
        };
        Err(TransportError::MoverUnusable { why })
    }

    /// Notes what has become of the job of the call in progress.
    pub(crate) const fn note(&mut self, transfers: Transfers) {
        if let Some(call) = &mut self.call {
            call.transfers = transfers;
        }
    }

    /// Has the end of the call in progress be marked by `event`.
    pub(crate) fn end_by(&mut self, event: Arc<Event>) {
        if let Some(call) = &mut self.call {
            call.end = Some(event);
        }
    }

    /// Whether a part of the call's job is to be enqueued now that its executor was launched: once.
    pub(crate) fn awaited_launch(&mut self) -> bool {
        let awaits =
            self.call.as_ref().is_some_and(|call| call.transfers == Transfers::AwaitsLaunch);
        if awaits {
            self.note(Transfers::OnSideStreams);
        }
        awaits
    }

    /// Takes the call back; `join` orders the caller's stream after side streams, which may read
    /// its rows.
    pub(crate) fn abandon(
        &mut self,
        stream: Stream<'_>,
        join: impl FnOnce(usize) -> Result<(), CudaError>,
    ) -> Result<(), TransportError> {
        let caller = self.raw(stream)?;
        match self.call.take() {
            Some(call) if call.is_to_be_joined() => {
                let _current = self.device.enter()?;
                Ok(join(caller)?)
            }
            _ => Ok(()),
        }
    }

    /// Ends the call; `join` orders the caller's stream after its side streams.
    pub(crate) fn finish(
        &mut self,
        stream: Stream<'_>,
        join: impl FnOnce(usize) -> Result<(), CudaError>,
    ) -> Result<(), TransportError> {
        let caller = self.raw(stream)?;
        let Some(call) = self.call.take() else { return Ok(()) };
        if !call.turn.is_captured() {
            // The executor advances the device's epoch, whatever becomes of the events below.
            self.epoch = self.epoch.next();
        }
        let _current = self.device.enter()?;
        if call.is_to_be_joined() {
            join(caller)?;
        }
        Ok(self.order.finish(call.turn, caller, call.end)?)
    }

    /// The caller's stream.
    pub(crate) fn raw(&self, stream: Stream<'_>) -> Result<usize, TransportError> {
        stream.raw().ok_or_else(|| self.wrong_stream(stream))
    }

    fn wrong_stream(&self, stream: Stream<'_>) -> TransportError {
        TransportError::WrongStream {
            stream: stream.raw(),
            device: Device::from(self.device.info().clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_is_refused_or_never_forgotten() {
        let (eager, captured) =
            (StreamTurn::Eager { stream: 1 }, StreamTurn::Captured { capture: 1, stream: 1 });
        let mut refused = Captures::Refused(TransportKind::Pcie, "why");
        refused.note(eager).unwrap();
        assert!(matches!(
            refused.note(captured),
            Err(TransportError::NotCapturable { transport: TransportKind::Pcie, why: "why" })
        ));
        let mut taken = Captures::Taken(false);
        for (turn, any) in [(eager, false), (captured, true), (eager, true)] {
            taken.note(turn).unwrap();
            assert_eq!(taken, Captures::Taken(any));
        }
    }
}
