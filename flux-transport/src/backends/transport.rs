//! What a backend does for a communicator.
//!
//! Invariant: the communicator calls [`begin`](Transport::begin), [`start`](Transport::start),
//! [`launched`](Transport::launched) and [`finish`](Transport::finish) of one call under its lock,
//! and [`reserve`](Transport::reserve) too; the other methods at any time from any thread.
use super::error::TransportError;
use super::held::HeldBytes;
use super::jobs::{Job, Started};
use super::kind::{Capabilities, TransportKind};
use super::view::WorkspaceView;
use crate::bootstrap::control::Collective;
use crate::device::{Device, Stream};
use flux_core::Nodes;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

/// A backend: one rank's memory, shared with its peers, and its mover.
pub(crate) trait Transport: Send + Sync + Debug {
    fn kind(&self) -> TransportKind;

    fn device(&self) -> Device;

    fn capabilities(&self) -> Capabilities;

    /// How the ranks are grouped, where that matters to the programs of its calls.
    fn nodes(&self) -> Option<Nodes> {
        None
    }

    /// What it is and how the ranks are connected, in a sentence or a few lines.
    fn explain(&self) -> String;

    /// Replaces the workspace by one of `size`, which all ranks agreed on and which covers the
    /// present one. Collective, between calls. New words are initialised before any rank returns;
    /// epochs continue. Fails on all ranks if on one, and then changes nothing.
    fn reserve(
        &self,
        size: WorkspaceSize,
        steps: Collective<'_>,
        deadline: Instant,
    ) -> Result<(), TransportError>;

    fn view(&self) -> Arc<WorkspaceView>;

    /// What the workspace takes of this rank's memory.
    fn held(&self) -> HeldBytes {
        let bytes = self.view().size.total_bytes();
        match self.device() {
            Device::Host => HeldBytes { host: bytes, ..HeldBytes::default() },
            Device::Cuda { .. } => HeldBytes { device: bytes, ..HeldBytes::default() },
        }
    }

    /// Orders what comes next on `stream` after the call before.
    fn begin(&self, stream: Stream<'_>) -> Result<(), TransportError>;

    /// The number of the next call or the one in progress; `None` after a capture.
    fn epoch(&self) -> Option<Epoch>;

    /// Whether the stream of the call in progress is being captured. Not where no call can be.
    fn capturing(&self) -> bool {
        false
    }

    /// Starts the traffic of the call in progress, ahead of its executor; returns at once. Once in
    /// a call.
    ///
    /// # Errors
    /// [`TransportError::BadTransfer`] and [`TransportError::MoverUnusable`] before anything moves.
    ///
    /// # Safety
    /// The rows of `job` are used by nothing else until the call has finished on `stream`. All
    /// ranks start the same program's job.
    unsafe fn start(&self, stream: Stream<'_>, job: &Job<'_>) -> Result<Started, TransportError>;

    /// Carries the part of a started job that comes behind the executor's launch; returns at once,
    /// or when a full stream has room. Once, after [`start`](Self::start) of the same job.
    ///
    /// # Safety
    /// As there.
    unsafe fn launched(&self, _stream: Stream<'_>, _job: &Job<'_>) -> Result<(), TransportError> {
        Ok(())
    }

    /// Ends a call in which no executor ran: it does not count.
    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        self.finish(stream)
    }

    /// Ends the call: what comes next on `stream` comes after its transfers. The host waits for
    /// them where `stream` is the host's.
    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError>;

    /// Returns when this rank has heard what its peers say of the calls that have ended here, or a
    /// moment later.
    fn ask_peers(&self) {}

    /// This rank's fault record, if a wait has failed. Does not synchronise.
    fn read_fault(&self) -> Option<FaultRecord>;

    /// Ends all waits of this rank, now and later. `reason` is not 0.
    fn set_abort(&self, reason: u32);

    /// The last call that had been made when this rank's process was last paused for half of the
    /// deadline, where messages need its host; for whoever asks, at once.
    fn paused_in(&self) -> Option<Epoch> {
        None
    }

    /// How far the call in progress has come, where that is known without the driver.
    fn progress(&self) -> Option<String> {
        None
    }

    /// Returns when all finished calls of this rank have ended.
    ///
    /// # Errors
    /// [`TransportError::NotDrained`] at a limit derived from the deadline, shorter after a
    /// failure. Nothing can be freed then.
    fn drain(&self) -> Result<(), TransportError>;
}
