//! Why a transport could not do what it was asked.

use super::nccl::NcclError;
use super::{Fault, TransportKind};
use crate::bootstrap::control::{ControlError, Disagreed};
use crate::device::Device;
use flux_core::Rank;
use flux_cuda::CudaError;
use std::time::Duration;

/// Why a transport could not do what it was asked.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum TransportError {
    /// A call has failed before, or a peer is gone.
    #[error("the communicator is broken: {fault}; rebuild it")]
    Broken { fault: Fault },
    /// This thread would wait for itself.
    #[error(
        "this thread has a call of the communicator that has not ended: finish or drop it first"
    )]
    InCall,
    /// Another thread's call did not end in time. This thread has begun nothing.
    #[error(
        "another thread's call of the communicator has not ended for {waited:?}, so this thread \
         has begun none: finish or drop it first"
    )]
    NoTurn {
        /// How long it waited: the communicator's deadline.
        waited: Duration,
    },
    /// The ranks could not talk.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The ranks ask for different things.
    #[error("the ranks disagree about the {what}; make the same calls on every rank: {values}")]
    Disagreement { what: &'static str, values: String },
    /// A peer could not do its part, so nobody did.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed { rank: Rank, reason: String },
    /// There is not so much memory.
    #[error(
        "{bytes} bytes of {what} cannot be had: free memory, or build ops with a smaller max_m"
    )]
    OutOfMemory { what: &'static str, bytes: u64 },
    /// The stream is of another device than the communicator.
    #[error(
        "the call was given {}, and the communicator computes on {device}: give it {}",
        given(*stream),
        to_give(device)
    )]
    WrongStream {
        /// The handle of the given stream; `None` for [`Stream::Host`](crate::Stream::Host).
        stream: Option<usize>,
        device: Device,
    },
    /// The mover cannot be used in this call.
    #[error("the mover cannot be used in this call: {why}")]
    MoverUnusable { why: &'static str },
    /// The stream is being captured, and the transport's calls cannot be part of a graph.
    #[error("a call on the {transport} transport cannot be captured: {why}")]
    NotCapturable { transport: TransportKind, why: &'static str },
    /// A transfer leads outside the workspace.
    #[error(
        "transfer {index} of the program leads outside the workspace: {what} = {value}, limit \
         {limit}"
    )]
    BadTransfer {
        index: usize,
        what: &'static str,
        value: u64,
        /// The limit, exclusive for indices, inclusive for bytes.
        limit: u64,
    },
    /// NCCL refused a call.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// Earlier calls did not finish in time.
    #[error("earlier calls did not finish in time: a kernel or a stream hangs, so end the process")]
    NotDrained,
    /// The driver refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io { what: &'static str, source: std::io::Error },
}

flux_core::debug_is_text!(TransportError);

/// A stream, as whoever gave it knows it.
fn given(stream: Option<usize>) -> String {
    stream.map_or_else(
        || "`Stream::Host`".to_owned(),
        |handle| format!("the CUDA stream {handle:#x}"),
    )
}

fn to_give(device: &Device) -> &'static str {
    if device.info().is_some() { "a CUDA stream of that device" } else { "`Stream::Host`" }
}

impl From<Disagreed> for TransportError {
    fn from(disagreed: Disagreed) -> Self {
        match disagreed {
            Disagreed::Control(error) => Self::Control(error),
            Disagreed::Refused { rank, reason } => Self::PeerFailed { rank, reason },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gave_a_wrong_stream_is_told_which_to_give() {
        let text =
            TransportError::WrongStream { stream: Some(64), device: Device::Host }.to_string();
        assert_eq!(
            text,
            "the call was given the CUDA stream 0x40, and the communicator computes on host: give \
             it `Stream::Host`"
        );
        assert_eq!(given(None), "`Stream::Host`");
    }
}
