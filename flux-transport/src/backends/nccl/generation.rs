//! The generation of memory in use, where messages carry what executors store for other nodes, and
//! what calls remember of it.
//!
//! Invariant: the watchdog knows a generation's flags before anything waits for one. Before a
//! call's kernel raises any, no flag is so old that it would be taken for one of a call to come.

use super::outbox::{Outbox, Storing};
use super::watch::CallWatch;
use crate::backends::device::calls::{Calls, Refreshed};
use crate::backends::error::TransportError;
use crate::backends::jobs::{MessageRounds, Source};
use crate::backends::view::{WorkspaceView, nanoseconds};
use flux_core::signal::Epoch;
use std::sync::Arc;
use std::time::Duration;

/// Memory of which an outbox is part.
pub(crate) trait Outgoing {
    /// What executors give to other nodes.
    fn outbox(&self) -> &Outbox;

    /// The workspace as an executor uses it that stores so in `half`; places are of 0 bytes where
    /// it stores nothing for other nodes.
    fn view(&self, storing: Storing, half: u64, fault: u64, deadline_ns: u64) -> WorkspaceView;
}

/// A generation in use.
#[derive(Debug)]
pub(crate) struct Generation<W> {
    pub(crate) workspace: W,
    /// The workspace in a call without messages.
    plain: Arc<WorkspaceView>,
    refreshed: Refreshed,
}

impl<W: Outgoing> Generation<W> {
    /// Takes `workspace` for calls from `epoch` on, whose waits `watch` ends.
    pub(crate) fn new(workspace: W, watch: &CallWatch, epoch: Epoch, deadline: Duration) -> Self {
        watch.await_flags(workspace.outbox());
        let plain =
            workspace.view(Storing::default(), 0, watch.fault.address(), nanoseconds(deadline));
        Self { workspace, plain: Arc::new(plain), refreshed: Refreshed::new(epoch) }
    }

    /// The workspace in a call without messages.
    pub(crate) fn plain(&self) -> Arc<WorkspaceView> {
        Arc::clone(&self.plain)
    }

    /// Opens the call in progress on `caller`, of the op with number `op`: brings its flags up to
    /// date and notes it. The device's context is current.
    pub(crate) fn open(
        &mut self,
        calls: &Calls,
        (caller, op): (usize, u32),
        watch: &CallWatch,
    ) -> Result<(), TransportError> {
        let (outbox, epoch) = (self.workspace.outbox(), calls.epoch());
        self.refreshed.keep(epoch, |before| outbox.refresh(before, caller))?;
        watch.begin(epoch, op);
        Ok(())
    }

    /// The workspace as the executor of call `epoch` uses it, beside these messages.
    pub(crate) fn view_of(&self, messages: &MessageRounds<'_>, epoch: Epoch) -> Arc<WorkspaceView> {
        let storing = match messages.source {
            Source::Rows(_) => Storing::default(),
            Source::Stored { of_all } => Storing { place_bytes: messages.place_bytes, of_all },
        };
        let WorkspaceView { fault, deadline_ns, .. } = *self.plain;
        Arc::new(self.workspace.view(storing, epoch.half() as u64, fault, deadline_ns))
    }
}
