//! The transports that there are, and what each can do.

use flux_core::program::Channels;
use std::fmt;

/// The transports that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportKind {
    /// Threads of one process, or processes of one machine, in host memory.
    Host,
    /// Peer memory of CUDA devices.
    NvLink,
    /// Peer memory within nodes, NCCL's messages between them.
    Mixed,
    /// NCCL's messages between CUDA devices, of one host or of several.
    Nccl,
    /// Pinned memory of the host, between CUDA devices that do not reach each other.
    Pcie,
}

impl TransportKind {
    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Mixed => "mixed",
            Self::NvLink => "nvlink",
            Self::Nccl => "nccl",
            Self::Pcie => "pcie",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who carries chunks for a call that does not leave it to the executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mover {
    /// A thread of the host.
    Thread,
    /// The device's copy engines, on a stream of their own.
    CopyEngine,
    /// Messages, sent and received on a stream of their own: an executor's kernel stores into
    /// memory of this rank's [node](crate::Communicator::nodes) only, and
    /// [messages](crate::Job::Messages) carry both what is pushed and what is sent.
    Messages {
        /// Multiprocessors that the messages' kernels need while the executor's waits.
        channels: Channels,
        /// Whether a [collective](crate::Job::Collective) of all ranks may be a call's traffic.
        collectives: bool,
    },
}

/// What a transport can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Capabilities {
    /// What an executor stores to peers itself.
    pub peer_stores: PeerStores,
    /// Who carries out a [`RowTransfers`](crate::RowTransfers).
    pub mover: Mover,
    /// Calls may be captured in a CUDA graph.
    pub graphs: bool,
}

/// What executors store to peers themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerStores {
    /// Everything: into peers' data regions and pads.
    All,
    /// Rows of partial sums, where a call's job is [that](crate::Job::Scattered). Other calls are
    /// [staged](crate::Job::Staged).
    Rows,
    /// Nothing: each call is [staged](crate::Job::Staged), or [sent as
    /// messages](crate::Job::Messages).
    Nothing,
}
