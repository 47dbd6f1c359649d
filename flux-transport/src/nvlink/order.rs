//! One call after the other, whatever streams they come on.
//!
//! Invariant: a call on one stream starts after the last call, if that came on another stream; calls within one capture likewise. A
//! replayed graph is ordered by whoever launches it: the library does not see the launch.

use crate::cuda::{Capture, CudaDevice, CudaError, Event, capture, stream_id};

/// Where a call's work goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// To the device.
    Eager,
    /// Into a graph.
    Captured,
}

/// Which stream the last call came on, and the event that follows it.
#[derive(Debug)]
pub(super) struct Order {
    eager: Event,
    captured: Event,
    // Numbers, not handles: a handle is used again after its stream is gone.
    last_eager: Option<u64>,
    // The capture's number, and the stream's.
    last_captured: Option<(u64, u64)>,
}

/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
const CAPTURE_INVALIDATED: i32 = 901;

impl Order {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self { eager: Event::new(device)?, captured: Event::new(device)?, last_eager: None, last_captured: None })
    }

    /// Orders `stream` after the last call. The device's context is current.
    pub(super) fn begin(&self, stream: usize) -> Result<Mode, CudaError> {
        match capture(stream)? {
            Capture::Off => {
                let id = stream_id(stream)?;
                if self.last_eager.is_some_and(|last| last != id) {
                    self.eager.make_wait(stream)?;
                }
                Ok(Mode::Eager)
            }
            Capture::On(sequence) => {
                let id = stream_id(stream)?;
                if self.last_captured.is_some_and(|(last, on)| last == sequence && on != id) {
                    self.captured.make_wait(stream)?;
                }
                Ok(Mode::Captured)
            }
            Capture::Broken => Err(CudaError::Call {
                call: "cuStreamGetCaptureInfo",
                code: CAPTURE_INVALIDATED,
                name: "the stream's capture was invalidated by an earlier call: end it first".to_owned(),
            }),
        }
    }

    /// Marks the end of a call on `stream`.
    pub(super) fn finish(&mut self, stream: usize) -> Result<(), CudaError> {
        let id = stream_id(stream)?;
        match capture(stream)? {
            Capture::On(sequence) => {
                self.captured.record(stream)?;
                self.last_captured = Some((sequence, id));
            }
            Capture::Off | Capture::Broken => {
                self.eager.record(stream)?;
                self.last_eager = Some(id);
            }
        }
        Ok(())
    }
}
