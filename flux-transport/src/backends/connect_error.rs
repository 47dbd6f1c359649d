//! Why ranks did not become a communicator.

use crate::backends::error::TransportError;
use crate::backends::options::{ParseSelectError, Select};
use crate::bootstrap::BootstrapError;
use crate::bootstrap::control::{ControlError, Disagreed};
use flux_core::{Rank, WorldSize};
use flux_cuda::CudaError;
use std::time::Duration;

/// Why there is no communicator. If one rank fails, all do.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum ConnectError {
    /// The ranks could not talk.
    #[error(transparent)]
    Control(ControlError),
    /// A transport could not take its memory or its mover.
    #[error(transparent)]
    Transport(TransportError),
    /// The ranks ask for different things.
    #[error("the ranks disagree about the {what}, which must be the same on every rank: {values}")]
    Disagreement { what: &'static str, values: String },
    /// A peer cannot connect.
    #[error("rank {rank} cannot connect: {reason}")]
    PeerFailed { rank: Rank, reason: String },
    /// The transport asked for cannot work here.
    #[error("the {select} transport cannot be used: {why}")]
    Unusable { select: Select, why: String },
    /// `FLUX_TRANSPORT` names no transport.
    #[error("FLUX_TRANSPORT: {0}")]
    Variable(#[from] ParseSelectError),
    /// The deadline is none.
    #[error("deadline = {deadline:?}: it must be positive and at most {limit:?}")]
    Deadline { deadline: Duration, limit: Duration },
    /// The peers go on without this rank, so it cannot take part in what they rebuild.
    #[error(
        "rank {by} says that this rank was late, and the others go on without it: start it anew, as the \
         replacement of itself"
    )]
    GivenUp {
        /// A rank that gave this one up; this one, where its process was paused.
        by: Rank,
    },
    /// Survivors cannot rebuild across hosts. The communicator is unchanged.
    #[error(
        "the ranks are on {hosts} hosts, and survivors make a group of their own on one host only: \
         rebuild all of them (Rebuild::Whole), with a new process in the place of each lost one"
    )]
    AcrossHosts { hosts: u32 },
    /// A lost rank that is a thread has no replacement.
    #[error(
        "{lost} of {world} ranks are gone, and threads are not replaced: rebuild with the \
         survivors, or make a new world"
    )]
    NoReplacement { lost: u32, world: WorldSize },
    /// The ranks of the launch did not meet again.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// The driver refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io { what: &'static str, source: std::io::Error },
}

flux_core::debug_is_text!(ConnectError);

impl From<ControlError> for ConnectError {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::GivenUp { by } => Self::GivenUp { by },
            other => Self::Control(other),
        }
    }
}

impl From<TransportError> for ConnectError {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::Control(error) => error.into(),
            TransportError::Disagreement { what, values } => Self::Disagreement { what, values },
            TransportError::PeerFailed { rank, reason } => Self::PeerFailed { rank, reason },
            TransportError::Cuda(error) => Self::Cuda(error),
            other => Self::Transport(other),
        }
    }
}

impl TransportError {
    /// Why ranks do not connect that meet for this transport.
    pub(crate) fn into_connect_error(self, select: Select) -> ConnectError {
        match self {
            Self::Cuda(
                error @ (CudaError::Unavailable(_)
                | CudaError::NoSuchDevice { .. }
                | CudaError::Unsupported { .. }
                | CudaError::GivenUp { .. }),
            ) => ConnectError::Unusable { select, why: error.to_string() },
            other => other.into(),
        }
    }
}

impl From<Disagreed> for ConnectError {
    fn from(disagreed: Disagreed) -> Self {
        TransportError::from(disagreed).into()
    }
}
