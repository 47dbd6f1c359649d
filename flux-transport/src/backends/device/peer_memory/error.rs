//! Why ranks could not share memory, or a call could not be enqueued.
//!
//! Invariant: a collective step fails on all ranks: the failed one has its own error, the others
//! [`PeerMemoryError::Peer`] with its name and words.

use crate::backends::connect_error::ConnectError;
use crate::backends::error::TransportError;
use crate::backends::options::Select;
use crate::bootstrap::control::{ControlError, Disagreed};
use crate::topology::hints;
use flux_core::Rank;
use flux_core::layout::WorkspaceSize;
use flux_cuda::{CudaError, DeviceUuid};

/// What went wrong, and between whom.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerMemoryError {
    /// The driver refused, on this rank.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("rank {peer} failed: {reason}")]
    Peer { peer: Rank, reason: String },
    /// Another rank sent what this version does not understand.
    #[error("rank {peer} sent a message that is not one of this version's")]
    Message { peer: u32 },
    #[error(
        "memory is shared within one host only, and rank {rank} and rank {peer} are on different \
         hosts{}",
        hints::one_machine([&boots[0], &boots[1]])
    )]
    OtherHost {
        rank: u32,
        /// The first that is on another host.
        peer: u32,
        /// The boot of the kernel that each runs on; empty where that is not known.
        boots: [String; 2],
    },
    #[error(
        "ranks {rank} and {peer} are both on device {uuid}: {}",
        hints::own_device([&visible[0], &visible[1]])
    )]
    SameDevice {
        rank: u32,
        peer: u32,
        uuid: DeviceUuid,
        /// The `CUDA_VISIBLE_DEVICES` of each; empty where it is not set.
        visible: [String; 2],
    },
    #[error(
        "rank {rank} on device {uuid} cannot access memory of rank {peer} on device {peer_uuid}: \
         no peer access between them"
    )]
    NoPeerAccess { rank: u32, uuid: DeviceUuid, peer: u32, peer_uuid: DeviceUuid },
    /// The driver grants peer access, but what a peer wrote is not there.
    #[error(
        "rank {rank} reads {seen:#010x} where rank {peer} wrote {expected:#010x}: peer access from \
         {peer} to {rank} does not work"
    )]
    NotProven { rank: u32, peer: u32, expected: u32, seen: u32 },
    #[error(
        "rank {rank} has a workspace of {size:?} at epoch {epoch}, rank {peer} one of \
         {peer_size:?} at epoch {peer_epoch}"
    )]
    Disagreement {
        rank: u32,
        size: WorkspaceSize,
        epoch: u32,
        peer: u32,
        peer_size: WorkspaceSize,
        peer_epoch: u32,
    },
    #[error("rank {peer} offers {bytes} bytes, too few for a workspace of {size:?}")]
    TooSmall { peer: u32, bytes: u64, size: WorkspaceSize },
    /// The memory of a rank of this process is gone.
    #[error("rank {peer} of this process has withdrawn its memory")]
    Withdrawn { peer: u32 },
    /// What it says, and what a person can do about it.
    #[error("{error}; {advice}")]
    Advised { error: Box<Self>, advice: String },
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("{what}: {source}")]
    Io { what: &'static str, source: std::io::Error },
}

impl From<Disagreed> for PeerMemoryError {
    fn from(disagreed: Disagreed) -> Self {
        match disagreed {
            Disagreed::Control(error) => Self::Control(error),
            Disagreed::Refused { rank, reason } => Self::Peer { peer: rank, reason },
        }
    }
}

impl PeerMemoryError {
    /// Why ranks do not connect that meet for this transport.
    pub(crate) fn into_connect_error(self, select: Select) -> ConnectError {
        let why = self.to_string();
        match self {
            Self::OtherHost { .. }
            | Self::SameDevice { .. }
            | Self::NoPeerAccess { .. }
            | Self::NotProven { .. }
            | Self::Advised { .. } => ConnectError::Unusable { select, why },
            other => TransportError::from(other).into_connect_error(select),
        }
    }
}

impl From<PeerMemoryError> for TransportError {
    fn from(error: PeerMemoryError) -> Self {
        let reason = error.to_string();
        match error {
            // It is said where ranks connect; a transport's errors are by what went wrong.
            PeerMemoryError::Advised { error, .. } => Self::from(*error),
            PeerMemoryError::Cuda(error) => Self::Cuda(error),
            PeerMemoryError::Control(error) => Self::Control(error),
            PeerMemoryError::Io { what, source } => Self::Io { what, source },
            PeerMemoryError::Peer { peer, reason } => Self::PeerFailed { rank: peer, reason },
            PeerMemoryError::Disagreement { .. } => {
                Self::Disagreement { what: "workspace", values: reason }
            }
            PeerMemoryError::Message { peer }
            | PeerMemoryError::OtherHost { peer, .. }
            | PeerMemoryError::SameDevice { peer, .. }
            | PeerMemoryError::NoPeerAccess { peer, .. }
            | PeerMemoryError::NotProven { peer, .. }
            | PeerMemoryError::TooSmall { peer, .. }
            | PeerMemoryError::Withdrawn { peer } => {
                Self::PeerFailed { rank: Rank::new(peer), reason }
            }
        }
    }
}
