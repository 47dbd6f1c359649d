//! Why ranks could not share memory, or a call could not be enqueued.
//!
//! Invariant: a collective step fails on all ranks or on none: the rank where it failed has its own error, the others a
//! [`NvLinkError::Peer`] that names it and repeats its words.

use super::plan::TransferError;
use crate::cuda::{CudaError, DeviceUuid};
use flux_core::layout::WorkspaceSize;

/// What went wrong, and between whom.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvLinkError {
    /// The driver refused, on this rank.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Another rank failed.
    #[error("rank {peer} failed: {reason}")]
    Peer {
        /// The rank.
        peer: u32,
        /// Its error.
        reason: String,
    },
    /// Another rank sent what this version does not understand.
    #[error("rank {peer} sent a message that is not one of this version's")]
    Message {
        /// The rank.
        peer: u32,
    },
    /// Two ranks have one device.
    #[error("ranks {rank} and {peer} are both on device {uuid}: give each rank a device of its own")]
    SameDevice {
        /// One rank.
        rank: u32,
        /// The other.
        peer: u32,
        /// The device.
        uuid: DeviceUuid,
    },
    /// A device cannot reach another.
    #[error("rank {rank} on device {uuid} cannot access memory of rank {peer} on device {peer_uuid}: no peer access between them")]
    NoPeerAccess {
        /// This rank.
        rank: u32,
        /// Its device.
        uuid: DeviceUuid,
        /// The other rank.
        peer: u32,
        /// Its device.
        peer_uuid: DeviceUuid,
    },
    /// The driver grants peer access, but what a peer wrote is not there.
    #[error("rank {rank} reads {seen:#010x} where rank {peer} wrote {expected:#010x}: peer access from {peer} to {rank} does not work")]
    NotProven {
        /// This rank, the reader.
        rank: u32,
        /// The writer.
        peer: u32,
        /// What it wrote.
        expected: u32,
        /// What arrived.
        seen: u32,
    },
    /// The ranks do not agree on the workspace.
    #[error("rank {rank} has a workspace of {size:?} at epoch {epoch}, rank {peer} one of {peer_size:?} at epoch {peer_epoch}")]
    Disagreement {
        /// This rank.
        rank: u32,
        /// Its workspace.
        size: WorkspaceSize,
        /// Its next call.
        epoch: u32,
        /// The other rank.
        peer: u32,
        /// The other's workspace.
        peer_size: WorkspaceSize,
        /// The other's next call.
        peer_epoch: u32,
    },
    /// The memory of a rank of this process is gone.
    #[error("rank {peer} of this process has withdrawn its memory")]
    Withdrawn {
        /// The rank.
        peer: u32,
    },
    /// The control connections failed.
    #[error("control plane: {reason}")]
    Control {
        /// What happened.
        reason: String,
    },
    /// A push that does not fit the workspace.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A captured push, or one after a capture, has nobody to carry it.
    #[error("a push into a captured graph, or after one was captured on this communicator, needs a mover kernel")]
    NoCaptureMover,
    /// The mover kernel did not start.
    #[error("mover kernel: {reason}")]
    Launch {
        /// What the launch failed with.
        reason: String,
    },
}
