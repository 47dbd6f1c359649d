//! What a backend does for a communicator.
//!
//! Invariant: the communicator calls [`begin`](Transport::begin), [`push`](Transport::push) and
//! [`finish`](Transport::finish) of one call under its lock, and [`reserve`](Transport::reserve)
//! too; the other methods at any time from any thread.
use super::{Capabilities, Carry, Exchange, LibraryCollective, MoverJob, TransportError, TransportKind, WorkspaceView};
use crate::bootstrap::control::Collective;
use crate::{Device, Stream};
use flux_core::Nodes;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Instant;

/// A backend: one rank's memory, shared with its peers, and its mover.
pub(crate) trait Transport: Send + Sync + Debug {
    /// Which one it is.
    fn kind(&self) -> TransportKind;

    /// Where this rank computes.
    fn device(&self) -> Device;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// How the ranks are grouped, where that matters to the programs of its calls.
    fn nodes(&self) -> Option<Nodes> {
        None
    }

    /// What it is and how the ranks are connected, in a sentence or a few lines.
    fn explain(&self) -> String;

    /// Replaces the workspace by one of `size`, which all ranks have agreed on and which covers the
    /// present one. Collective. No call is under way on this rank. The new words are initialised
    /// before any rank returns; epochs go on from the present one, which the ranks compare. Fails
    /// on all ranks if it fails on one, and then leaves the workspace as it was.
    fn reserve(&self, size: WorkspaceSize, steps: Collective<'_>, deadline: Instant) -> Result<(), TransportError>;

    /// The workspace.
    fn view(&self) -> Arc<WorkspaceView>;

    /// Orders what comes next on `stream` after the call before.
    fn begin(&self, stream: Stream) -> Result<(), TransportError>;

    /// The number of the next call, or of the one in progress; `None` where only the device knows
    /// it, after a capture.
    fn epoch(&self) -> Option<Epoch>;

    /// Whether the stream of the call in progress is being captured. Not where no call can be.
    fn capturing(&self) -> bool {
        false
    }

    /// Whether [`push`](Self::push) can be used in the call in progress; where not, the executor
    /// pushes, unless the call is exchanged or carried.
    fn copy_engine_usable(&self) -> bool {
        false
    }

    /// Has the mover carry out `push`, then say so in the control block; returns at once. At most
    /// once in a call, and not where [`copy_engine_usable`](Self::copy_engine_usable) says no: that
    /// is [`TransportError::MoverUnusable`].
    ///
    /// # Safety
    /// The shard can be read, and is not written, until the call has finished on `stream`.
    unsafe fn push(&self, stream: Stream, push: &MoverJob<'_>) -> Result<(), TransportError>;

    /// Has messages carry the caller's [rows](Source::Rows) of `exchange`, in both directions, and
    /// returns the workspace as the executor of this call uses it: the addresses of peers in other
    /// nodes are those of memory of this rank's, which is sent from there. At most once in a call,
    /// and only where [`Mover::Messages`] carries. What the executor [stores](Source::Stored) is
    /// sent by [`exchange_stored`](Self::exchange_stored).
    ///
    /// Not one method with [`carry`](Self::carry): an exchange is in rounds that all ranks go
    /// through in one order, and a route has each side in its own order; either in the other's
    /// place would be a protocol that is neither argued nor proven.
    ///
    /// # Safety
    /// Rows can be read, and are not written, until the call has finished on `stream`. All ranks
    /// hand over the same program's rounds.
    unsafe fn exchange(&self, _stream: Stream, _exchange: &Exchange<'_>) -> Result<Arc<WorkspaceView>, TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport carries no messages" })
    }

    /// Has the messages of an exchange that was handed over in this call carry what the executor
    /// [stores](Source::Stored). After its launch: messages await what it stores, and the host
    /// waits for these where a stream is full. Once after such an [`exchange`](Self::exchange).
    ///
    /// # Safety
    /// As there, and it is the same exchange.
    unsafe fn exchange_stored(&self, _stream: Stream, _exchange: &Exchange<'_>) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport sends nothing between the parts of a call" })
    }

    /// Puts a collective of the library on `stream`, between what is there and what is enqueued
    /// next, as all the traffic of the call in progress. Once in a call.
    ///
    /// # Safety
    /// The shard is used by nothing else until the call has finished on `stream`. All ranks hand
    /// over the same collective.
    unsafe fn collective(&self, _stream: Stream, _collective: &LibraryCollective) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport has no collectives of a library" })
    }

    /// The op-sequence hash that the executor of the call in progress announces on pads; nothing
    /// where the op's number does, or where the transport compares.
    fn sequence_hash(&self) -> Option<u32> {
        None
    }

    /// Carries all that the call in progress sends and receives, beside its kernel, which was
    /// launched before; returns at once. Once in a call. Where executors store to peers themselves,
    /// or [scatter](Self::scatter) to them, there is nothing to carry.
    ///
    /// # Safety
    /// The shard can be read, and is not written, until the call has finished on `stream`.
    unsafe fn carry(&self, _stream: Stream, _carry: &Carry<'_>) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "executors store to peers themselves" })
    }

    /// The workspace for an executor that scatters the rows of the call in progress, which is of
    /// the op with number `op` (as in [`Carry::op`]), to peers itself, where it
    /// [may](PeerStores::Rows). Instead of [`carry`](Self::carry), before the kernel's launch.
    fn scatter(&self, _stream: Stream, _op: u32) -> Result<Arc<WorkspaceView>, TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport has no memory of the host to scatter rows to" })
    }

    /// Ends the call in progress where no executor ran: the call does not count, and its epoch is
    /// the next call's.
    fn abandon(&self, stream: Stream) -> Result<(), TransportError> {
        self.finish(stream)
    }

    /// Ends the call in progress: what comes next on `stream` comes after its transfers. On the
    /// host, waits for them.
    fn finish(&self, stream: Stream) -> Result<(), TransportError>;

    /// This rank's fault record, if a wait has failed. Does not synchronise.
    fn read_fault(&self) -> Option<FaultRecord>;

    /// Ends all waits of this rank, now and later. `reason` is not 0.
    fn set_abort(&self, reason: u32);

    /// How far what carries the call in progress has come, in words, where that is known without
    /// the driver.
    fn progress(&self) -> Option<String> {
        None
    }

    /// Returns when all calls of this rank have ended that were finished before.
    ///
    /// # Errors
    /// [`TransportError::NotDrained`] where they are not by a limit that the transport derives from
    /// the communicator's deadline: what works is waited for longer, and what has failed not much
    /// longer. What they use cannot be freed then.
    fn drain(&self) -> Result<(), TransportError>;
}
