//! Orders calls that come on different streams.
//!
//! Invariant: a call starts after the last one, if that came on another stream; within one capture
//! likewise. A replayed graph is ordered by its launcher.

use flux_cuda::{Capture, CudaDevice, CudaError, Event, capture, stream_id};
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamTurn {
    /// On the device, on the stream with this number: handles are reused.
    Eager { stream: u64 },
    /// Into a graph: the capture's number and the stream's handle, as a captured stream has no
    /// number.
    Captured { capture: u64, stream: usize },
}

impl StreamTurn {
    pub(super) const fn is_captured(self) -> bool {
        matches!(self, Self::Captured { .. })
    }

    /// Whether this turn must wait for the mark of `last`. The driver refuses waits across
    /// captures.
    fn waits_for(self, last: Self) -> bool {
        match (self, last) {
            (Self::Eager { stream }, Self::Eager { stream: last }) => stream != last,
            (
                Self::Captured { capture, stream },
                Self::Captured { capture: same, stream: last },
            ) => capture == same && stream != last,
            (Self::Eager { .. }, Self::Captured { .. })
            | (Self::Captured { .. }, Self::Eager { .. }) => false,
        }
    }
}

/// The last call of a kind, and the event that follows it.
#[derive(Debug)]
struct Last {
    turn: Option<StreamTurn>,
    done: Arc<Event>,
    /// The event that follows calls that have none of their own.
    own: Arc<Event>,
}

#[derive(Debug)]
pub(super) struct Order {
    eager: Last,
    captured: Last,
}

const CAPTURE_INVALIDATED: i32 = 901;

impl Order {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let last = || {
            let own = Arc::new(Event::new(device)?);
            Ok::<_, CudaError>(Last { turn: None, done: Arc::clone(&own), own })
        };
        Ok(Self { eager: last()?, captured: last()? })
    }

    /// Orders `stream` after the last call. The device's context is current.
    pub(super) fn begin(&self, stream: usize) -> Result<StreamTurn, CudaError> {
        let turn = match capture(stream)? {
            Capture::Off => StreamTurn::Eager { stream: stream_id(stream)? },
            Capture::On(capture) => StreamTurn::Captured { capture, stream },
            Capture::Broken => {
                return Err(CudaError::Call {
                    call: "cuStreamGetCaptureInfo",
                    code: CAPTURE_INVALIDATED,
                    name: "the stream's capture was invalidated by an earlier call: end it first"
                        .to_owned(),
                });
            }
        };
        let last = match turn {
            StreamTurn::Eager { .. } => &self.eager,
            StreamTurn::Captured { .. } => &self.captured,
        };
        if last.turn.is_some_and(|last| turn.waits_for(last)) {
            last.done.make_wait(stream)?;
        }
        Ok(turn)
    }

    /// Whether the last call that was not captured is done, and with it all before it.
    pub(super) fn is_done(&self) -> Result<bool, CudaError> {
        self.eager.done.is_done()
    }

    /// Marks the end of the call that began with `turn`, by `end` if it has one. In a capture the
    /// mark is no node.
    pub(super) fn finish(
        &mut self,
        turn: StreamTurn,
        stream: usize,
        end: Option<Arc<Event>>,
    ) -> Result<(), CudaError> {
        let last = match turn {
            StreamTurn::Eager { .. } => &mut self.eager,
            StreamTurn::Captured { .. } => &mut self.captured,
        };
        last.done = end.unwrap_or_else(|| Arc::clone(&last.own));
        last.done.record(stream)?;
        last.turn = Some(turn);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::StreamTurn;

    #[test]
    fn a_call_waits_for_the_last_of_its_kind_on_another_stream() {
        let eager = |stream| StreamTurn::Eager { stream };
        let captured = |capture, stream| StreamTurn::Captured { capture, stream };
        assert!(eager(2).waits_for(eager(1)) && !eager(1).waits_for(eager(1)));
        assert!(
            captured(9, 2).waits_for(captured(9, 1)) && !captured(9, 1).waits_for(captured(9, 1))
        );
        assert!(!captured(9, 2).waits_for(captured(8, 1)), "events do not cross captures");
        assert!(!captured(9, 2).waits_for(eager(1)) && !eager(2).waits_for(captured(9, 1)));
    }
}
