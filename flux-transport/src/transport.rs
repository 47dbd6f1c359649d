//! What a backend does for a communicator.
//!
//! Invariant: the communicator calls [`begin`](Transport::begin), [`push`](Transport::push) and
//! [`finish`](Transport::finish) of one call under its lock, and [`reserve`](Transport::reserve)
//! too; the other methods at any time from any thread.

mod check;

use crate::control::{Collective, ControlError, Disagreed};
use crate::cuda::CudaError;
use crate::nccl::NcclError;
use crate::route::Route;
use crate::{Device, Fault, Stream};
use flux_core::layout::{FaultRecord, WorkspaceSize, pad_bytes};
use flux_core::program::{Channels, Forward, Round, Sending, Transfer};
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// memory of this rank's [node](Transport::nodes) only, and [`Transport::exchange`] carries
    /// both what is pushed and what is sent.
    Messages {
        /// Multiprocessors that the messages' kernels need while the executor's waits.
        channels: Channels,
    },
}

/// What a transport can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Capabilities {
    /// What an executor stores to peers itself.
    pub peer_stores: PeerStores,
    /// Who carries out a [`MoverJob`].
    pub mover: Mover,
    /// Calls may be captured in a CUDA graph.
    pub graphs: bool,
    /// Ranks may be processes.
    pub processes: bool,
}

/// What executors store to peers themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerStores {
    /// Everything: into peers' data regions and pads.
    All,
    /// Rows that they scatter, and that these are there, where [the transport](Transport::scatter)
    /// shows it in such a call. What travels so is read by the peers' executors as they add it.
    /// Other calls are [carried](Transport::carry).
    Rows,
    /// Nothing: each call is [carried](Transport::carry), or [exchanged](Transport::exchange) as
    /// messages.
    Nothing,
}

/// A communicator's workspace, as addresses that this rank's executor uses; laid out as
/// [`flux_core::layout`] says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceView {
    /// Data regions, by rank, the own one included.
    pub data: Vec<u64>,
    /// Pads, by rank.
    pub pads: Vec<u64>,
    /// Where rows come that other ranks scatter to this one, if not to its data region, which is
    /// not what [they reach](PeerStores::Rows).
    pub scattered: Option<u64>,
    /// The own control block.
    pub control: u64,
    /// The own fault block.
    pub fault: u64,
    /// What it holds.
    pub size: WorkspaceSize,
    /// How long a wait may take.
    pub deadline_ns: u64,
}

/// What this rank's executor says of the call in progress, where messages bring what it compares
/// that with: which ops all calls up to this one were of, and not of this one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Address of a word for each rank, which messages bring before what reads what else they
    /// bring: the call's number, and in the upper half what its host says of the ops of its calls
    /// up to that one. 0 where the own pad has it of all ranks: as mates say it there, and messages
    /// bring it or mates pass it on.
    pub words: u64,
    /// What this rank's host says of those of the call in progress.
    pub said: u32,
}

/// A mover's work in one call: columns of rows of this rank's shard, each transfer to a gather
/// buffer, with its signal.
#[derive(Clone, Copy, Debug)]
pub struct MoverJob<'a> {
    /// Address of the first row of the shard.
    pub x: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
    /// Bytes of a row of the shard; rows lie densely at the destination.
    pub row_bytes: u64,
    /// Bytes of an element, which columns are counted in.
    pub element_bytes: u64,
    /// Bytes of a place in the gather buffer.
    pub place_bytes: u64,
    /// What to move, in order.
    pub transfers: &'a [Transfer],
    /// What to pass on then, in order, of what comes from other nodes.
    pub forwards: &'a [Forward],
}

/// A mover's work in one call where chunks travel as messages.
#[derive(Clone, Copy, Debug)]
pub struct Exchange<'a> {
    /// Where what this rank sends comes from.
    pub source: Source<'a>,
    /// Bytes of a place at a reader.
    pub place_bytes: u64,
    /// The program's [rounds](flux_core::program::TileProgram::rounds), as
    /// [ordered](Sending::ordered).
    pub rounds: &'a [Round],
    /// Which of them go at once, and when.
    pub sending: Sending,
    /// Number of the op, as in [`Carry::op`].
    pub op: u32,
}

/// Where sent chunks come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The caller's shard, which is there when the call begins (AllGather-GEMM). Rounds carry what
    /// crosses nodes of the transfers; what does not, and what is passed on of what the rounds
    /// bring, are copies.
    Rows(MoverJob<'a>),
    /// What the executor stores where [`Transport::exchange`] shows it the readers' data regions,
    /// each chunk when its signal is raised there (GEMM-ReduceScatter).
    Stored {
        /// Whether a reader has a place for every rank, in rank order, and so for itself, as where
        /// tiles span shards.
        of_all: bool,
    },
}

/// All of a call's data that goes to other ranks, where they do not reach each other's memory.
#[derive(Clone, Copy, Debug)]
pub struct Carry<'a> {
    /// Address of the first row of this rank's shard (AllGather-GEMM).
    pub x: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
    /// What goes where.
    pub route: &'a Route,
    /// Number of the op that the call is of, the same on all ranks where they make the same calls:
    /// the call fails where peers say other ones.
    pub op: u32,
}

/// A backend: one rank's memory, shared with its peers, and its mover.
pub trait Transport: Send + Sync + Debug {
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
    /// and only where [`Mover::Messages`] carries. What is sent [before](Sending::Before) the
    /// executor's kernel has come when what is enqueued next on `stream` begins, or the call has
    /// failed. What the executor [stores](Source::Stored) is sent by
    /// [`exchange_stored`](Self::exchange_stored).
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
    /// waits for these where a stream is full. Where they go [before](Sending::Before) what they
    /// bring is read, on `stream`, after what stores it and before what is enqueued next. Once
    /// after such an [`exchange`](Self::exchange).
    ///
    /// # Safety
    /// As there, and it is the same exchange.
    unsafe fn exchange_stored(&self, _stream: Stream, _exchange: &Exchange<'_>) -> Result<(), TransportError> {
        Err(TransportError::MoverUnusable { why: "this transport sends nothing between the parts of a call" })
    }

    /// Where what an executor enqueues comes after what was enqueued before of the
    /// [exchange](Self::exchange) of the call in progress, and before what is after: work of this
    /// call for the multiprocessors that its messages need only then. What comes next on the
    /// caller's stream once the call has finished comes after it. Nothing where messages have no
    /// stream of their own, or none that the executor may use.
    fn beside(&self) -> Option<Stream> {
        None
    }

    /// What the executor of the call in progress says of it, and where it hears whether its peers
    /// say the same, which it then has to see before it ends the call; nothing where the op's
    /// number says enough, on pads that all reach, or where the transport compares.
    fn heard(&self) -> Option<Heard> {
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

/// Why a transport could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A call has failed before, or a peer is gone.
    #[error("the communicator is broken: {fault}; rebuild it")]
    Broken {
        /// The first fault.
        fault: Fault,
    },
    /// This thread would wait for itself.
    #[error("this thread has a call of the communicator that has not ended: finish or drop it first")]
    InCall,
    /// Another thread's call, or its change of the workspace, did not end while this thread waited
    /// for its turn. This thread has begun nothing, and the communicator is as it was.
    #[error(
        "another thread's call of the communicator has not ended for {waited:?}, so this thread has begun none: finish or drop it first"
    )]
    NoTurn {
        /// How long it waited: the communicator's deadline.
        waited: Duration,
    },
    /// The ranks could not talk.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The ranks ask for different things.
    #[error("the ranks disagree about the {what}: {values}")]
    Disagreement {
        /// What about.
        what: &'static str,
        /// Each rank's value.
        values: String,
    },
    /// A peer could not do its part, so nobody did.
    #[error("rank {rank} failed: {reason}")]
    PeerFailed {
        /// The peer.
        rank: Rank,
        /// What it said.
        reason: String,
    },
    /// There is not so much memory.
    #[error("{bytes} bytes of {what} cannot be had")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How many.
        bytes: u64,
    },
    /// The stream is of another device than the communicator.
    #[error("the call was given {}, and the communicator computes on {device}: give it {}", given(*stream), to_give(device))]
    WrongStream {
        /// The stream.
        stream: Stream,
        /// Where the communicator computes.
        device: Device,
    },
    /// The mover cannot be used in this call.
    #[error("the mover cannot be used in this call: {why}")]
    MoverUnusable {
        /// Why not.
        why: &'static str,
    },
    /// The stream is being captured, and the transport's calls cannot be part of a graph.
    #[error("a call on the {transport} transport cannot be captured: {why}")]
    NotCapturable {
        /// The transport.
        transport: TransportKind,
        /// Why not.
        why: &'static str,
    },
    /// A transfer leads outside the workspace.
    #[error("transfer {index} of the program leads outside the workspace: {what} = {value}, limit {limit}")]
    BadTransfer {
        /// Its index.
        index: usize,
        /// Which of its fields.
        what: &'static str,
        /// The value.
        value: u64,
        /// The limit, exclusive for indices, inclusive for bytes.
        limit: u64,
    },
    /// NCCL refused a call.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// Earlier calls did not finish in time.
    #[error("earlier calls did not finish within the deadline")]
    NotDrained,
    /// The driver refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was asked.
        what: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}

/// A stream, as whoever gave it knows it.
fn given(stream: Stream) -> String {
    stream.raw().map_or_else(|| "`Stream::Host`".to_owned(), |handle| format!("the CUDA stream {handle:#x}"))
}

/// A stream that does.
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

/// A deadline as executors take it; one that is too long for that is the longest.
pub(crate) fn nanoseconds(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes of a workspace's data region, and of that and the pad; an error where there is no such
/// number.
pub(crate) fn checked_bytes(size: &WorkspaceSize) -> Result<(u64, u64), TransportError> {
    let stride = size.half_bytes.checked_next_multiple_of(WorkspaceSize::ALIGN);
    let data = stride.and_then(|stride| stride.checked_mul(2));
    let both = data.and_then(|data| Some((data, data.checked_add(pad_bytes(size.signals))?)));
    both.ok_or(TransportError::OutOfMemory { what: "workspace", bytes: u64::MAX })
}

/// Epochs that ranks compare before they replace the workspace.
pub(crate) fn same_epoch(epochs: &[Epoch]) -> Result<(), TransportError> {
    if epochs.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(());
    }
    let values: Vec<String> = epochs.iter().enumerate().map(|(rank, epoch)| format!("{epoch} on rank {rank}")).collect();
    Err(TransportError::Disagreement { what: "number of the next call", values: values.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gave_a_wrong_stream_is_told_which_to_give() {
        // SAFETY: no call is made with it.
        let stream = unsafe { Stream::from_raw(64) };
        let text = TransportError::WrongStream { stream, device: Device::Host }.to_string();
        assert_eq!(text, "the call was given the CUDA stream 0x40, and the communicator computes on host: give it `Stream::Host`");
        assert_eq!(given(Stream::Host), "`Stream::Host`");
    }

    #[test]
    fn a_workspace_is_as_large_as_it_says_or_refused() {
        let size = |half_bytes, signals| WorkspaceSize { half_bytes, signals, counters: 0 };
        for half_bytes in [0, 1, WorkspaceSize::ALIGN, 1 << 40] {
            let data = size(half_bytes, 9).data_bytes();
            assert_eq!(checked_bytes(&size(half_bytes, 9)).unwrap(), (data, data + pad_bytes(9)));
        }
        // Twice the first is 0 in 64 bits, the second is rounded up to it, the third to nothing;
        // the last leaves no room for the pad.
        let half = 1 << 63;
        for (half_bytes, signals) in
            [(half, 0), (half - WorkspaceSize::ALIGN + 1, 0), (u64::MAX, 0), (half - WorkspaceSize::ALIGN, u32::MAX)]
        {
            let refused = checked_bytes(&size(half_bytes, signals));
            assert!(matches!(refused, Err(TransportError::OutOfMemory { what: "workspace", .. })), "{half_bytes}");
        }
    }
}
