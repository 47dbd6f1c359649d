//! A transport without memory, for tests of its users.

use crate::backends::{
    Capabilities, Job, Mover, PeerStores, Started, Transport, TransportError, TransportKind,
    WorkspaceView,
};
use crate::bootstrap::control::Collective;
use crate::device::{Device, Stream};
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Does what its test says, and nothing else.
pub(super) struct MockTransport {
    pub(super) read_fault: Box<dyn Fn() -> Option<FaultRecord> + Send + Sync>,
    pub(super) paused_in: Box<dyn Fn() -> Option<Epoch> + Send + Sync>,
    pub(super) set_abort: Box<dyn Fn(u32) + Send + Sync>,
    pub(super) drain: Box<dyn Fn() + Send + Sync>,
    pub(super) reserve: Box<dyn Fn() + Send + Sync>,
}

impl Default for MockTransport {
    fn default() -> Self {
        Self {
            read_fault: Box::new(|| None),
            paused_in: Box::new(|| None),
            set_abort: Box::new(|_| {}),
            drain: Box::new(|| {}),
            reserve: Box::new(|| {}),
        }
    }
}

impl fmt::Debug for MockTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MockTransport")
    }
}

impl Transport for MockTransport {
    fn kind(&self) -> TransportKind {
        TransportKind::Host
    }

    fn device(&self) -> Device {
        Device::Host
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { peer_stores: PeerStores::All, mover: Mover::Thread, graphs: false }
    }

    fn explain(&self) -> String {
        "a mock".to_owned()
    }

    fn reserve(
        &self,
        _size: WorkspaceSize,
        _steps: Collective<'_>,
        _deadline: Instant,
    ) -> Result<(), TransportError> {
        (self.reserve)();
        Ok(())
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::default()
    }

    fn begin(&self, _stream: Stream<'_>) -> Result<(), TransportError> {
        Ok(())
    }

    fn epoch(&self) -> Option<Epoch> {
        None
    }

    unsafe fn start(&self, _stream: Stream<'_>, _job: &Job<'_>) -> Result<Started, TransportError> {
        Ok(Started { view: self.view(), pushes: false })
    }

    fn finish(&self, _stream: Stream<'_>) -> Result<(), TransportError> {
        Ok(())
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        (self.read_fault)()
    }

    fn paused_in(&self) -> Option<Epoch> {
        (self.paused_in)()
    }

    fn set_abort(&self, reason: u32) {
        (self.set_abort)(reason);
    }

    fn drain(&self) -> Result<(), TransportError> {
        (self.drain)();
        Ok(())
    }
}
