//! What a backend does for a communicator.
//!
//! Invariant: the communicator calls [`begin`](Transport::begin), [`push`](Transport::push) and
//! [`finish`](Transport::finish) of one call under its lock, and [`reserve`](Transport::reserve)
//! too; the other methods at any time from any thread.
use super::{
    Capabilities, LibraryCollective, MessageRounds, RowTransfers, StagedTransfer, TransportError,
    TransportKind, WorkspaceView,
};
use crate::bootstrap::control::Collective;
use crate::{Device, HeldBytes, Stream};
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

    /// Whether [`push`](Self::push) can be used in this call; else the executor pushes.
    fn copy_engine_usable(&self) -> bool {
        false
    }

    /// Has the mover carry out `push`, then set the control block's word; returns at once. Once in
    /// a call, if [`copy_engine_usable`](Self::copy_engine_usable).
    ///
    /// # Safety
    /// The shard stays readable and unwritten until the call has finished on `stream`.
    unsafe fn push(
        &self,
        stream: Stream<'_>,
        push: &RowTransfers<'_>,
    ) -> Result<(), TransportError>;

    /// Has messages carry the caller's [rows](crate::Source::Rows) of `exchange`, in both
    /// directions. At most once in a call, and only where
    /// [`Mover::Messages`](crate::Mover::Messages) carries. Returns the workspace as the executor
    /// of this call uses it: addresses of peers in other nodes are those of own memory, from where
    /// messages send. What the executor [stores](crate::Source::Stored) is sent by
    /// [`send_stored_rounds`](Self::send_stored_rounds).
    ///
    /// An exchange is in rounds, which all ranks go through in one order; a route that is
    /// [staged](Self::stage) has each side in its own order.
    ///
    /// # Safety
    /// Rows can be read, and are not written, until the call has finished on `stream`. All ranks
    /// hand over the same program's rounds.
    unsafe fn send_rounds(
        &self,
        _stream: Stream<'_>,
        _messages: &MessageRounds<'_>,
    ) -> Result<Arc<WorkspaceView>, TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport carries no messages" })
    }

    /// Has the messages of an exchange that was handed over in this call carry what the executor
    /// [stores](crate::Source::Stored). After its launch: messages await what it stores, and the
    /// host waits for these where a stream is full. Once, after [`send_rounds`](Self::send_rounds).
    ///
    /// # Safety
    /// As there, and it is the same exchange.
    unsafe fn send_stored_rounds(
        &self,
        _stream: Stream<'_>,
        _messages: &MessageRounds<'_>,
    ) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable {
            why: "this transport sends nothing between the parts of a call",
        })
    }

    /// Puts a collective of the library on `stream`, as all the traffic of the call in progress.
    /// Once in a call.
    ///
    /// # Safety
    /// The shard is used by nothing else until the call has finished on `stream`. All ranks hand
    /// over the same collective.
    unsafe fn collective(
        &self,
        _stream: Stream<'_>,
        _collective: &LibraryCollective,
    ) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport has no collectives of a library" })
    }

    /// The op-sequence hash that the executor of the call in progress announces on pads; nothing
    /// where the op's number does, or where the transport compares.
    fn sequence_hash(&self) -> Option<u32> {
        None
    }

    /// Carries all that this call sends and receives, beside its launched kernel; returns at once.
    /// Once in a call.
    ///
    /// # Safety
    /// The shard stays readable and unwritten until the call has finished on `stream`.
    unsafe fn stage(
        &self,
        _stream: Stream<'_>,
        _carry: &StagedTransfer<'_>,
    ) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "executors store to peers themselves" })
    }

    /// The workspace for an executor that scatters this call's rows itself, if it
    /// [may](crate::PeerStores::Rows). Instead of [`stage`](Self::stage), before the launch. `op`:
    /// as in [`StagedTransfer::op`].
    fn scatter(&self, _stream: Stream<'_>, _op: u32) -> Result<Arc<WorkspaceView>, TransportError> {
        Err(TransportError::MoverUnusable {
            why: "this transport has no memory of the host to scatter rows to",
        })
    }

    /// Ends a call in which no executor ran: it does not count.
    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        self.finish(stream)
    }

    /// Ends the call: what comes next on `stream` comes after its transfers. The host waits for
    /// them.
    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError>;

    /// This rank's fault record, if a wait has failed. Does not synchronise.
    fn read_fault(&self) -> Option<FaultRecord>;

    /// Ends all waits of this rank, now and later. `reason` is not 0.
    fn set_abort(&self, reason: u32);

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
