//! What moves the data of one call: the job that an executor gives a transport.

use super::view::WorkspaceView;
use flux_core::DType;
use flux_core::program::route::Route;
use flux_core::program::{Forward, Round, Transfer};
use std::sync::Arc;

mod check;

/// The traffic of one call, beside what its executor stores to peers itself.
#[derive(Clone, Copy, Debug)]
pub enum Job<'a> {
    /// None.
    Nothing,
    /// Rows of the shard to gather buffers, by copy engines or a thread.
    Rows(RowTransfers<'a>),
    /// All that the call sends and receives, by copies through memory of the host.
    Staged(StagedTransfer<'a>),
    /// Rows that the executor scatters to memory of the host.
    Scattered {
        /// Number of the op, as in [`StagedTransfer::op`].
        op: u32,
    },
    /// Messages in rounds, which all ranks go through in one order.
    Messages(MessageRounds<'a>),
    /// One collective of the transport's library, ahead of the executor's kernel or behind it.
    Collective(LibraryCollective),
}

/// A job that was started.
#[derive(Clone, Debug)]
pub struct Started {
    /// The workspace as the executor of the call reaches it.
    pub view: Arc<WorkspaceView>,
    /// Whether the transport carries the job's [rows](Job::Rows): the executor then awaits the end
    /// of that, and else pushes them itself.
    pub pushes: bool,
}

/// A mover's work in one call: transfers from this rank's shard to gather buffers, with signals.
#[derive(Clone, Copy, Debug)]
pub struct RowTransfers<'a> {
    /// Address of the first row of the shard.
    pub x: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
    /// Bytes of a row of the shard; rows lie densely at the destination.
    pub row_bytes: u64,
    /// Bytes of an element, which columns are counted in.
    pub element_bytes: u64,
    /// Rows of the shard.
    pub rows: u64,
    /// Bytes of a place in the gather buffer.
    pub place_bytes: u64,
    /// Places without a gap behind their rows: each later one begins a row earlier than its number
    /// says. `u32::MAX` where all places are equal.
    pub full_places: u32,
    /// What to move, in order.
    pub transfers: &'a [Transfer],
    /// What to pass on then, in order, of what comes from other nodes.
    pub forwards: &'a [Forward],
}

impl RowTransfers<'_> {
    /// Offset of a place in the gather buffer.
    pub(crate) const fn place(&self, place: u32) -> u64 {
        place_offset(place, self.place_bytes, self.full_places, self.row_bytes)
    }
}

/// Offset of place `place` among places of `bytes`, of which those from `full` on begin a row
/// earlier each.
pub(crate) const fn place_offset(place: u32, bytes: u64, full: u32, row_bytes: u64) -> u64 {
    place as u64 * bytes - place.saturating_sub(full) as u64 * row_bytes
}

/// A mover's work in one call where chunks travel as messages.
#[derive(Clone, Copy, Debug)]
pub struct MessageRounds<'a> {
    /// Where what this rank sends comes from.
    pub source: Source<'a>,
    /// Bytes of a place at a reader.
    pub place_bytes: u64,
    /// The program's [rounds](flux_core::program::TileProgram::rounds), as
    /// put [in batches](flux_core::program::in_batches_of).
    pub rounds: &'a [Round],
    /// Peers that messages go to at once.
    pub peers: u32,
    /// Number of the op, as in [`StagedTransfer::op`].
    pub op: u32,
}

/// Where sent chunks come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The caller's shard, which is there when the call begins (AllGather-GEMM). Rounds carry what
    /// crosses nodes of the transfers; what does not, and what is passed on of what the rounds
    /// bring, are copies.
    Rows(RowTransfers<'a>),
    /// What the executor stores where the [started](Started::view) call shows it the readers' data
    /// regions, each chunk when its signal is raised there (GEMM-ReduceScatter).
    Stored {
        /// Whether a reader has a place for every rank, in rank order, and so for itself, as where
        /// tiles span shards.
        of_all: bool,
    },
}

/// All of a call's data that goes to other ranks, where they do not reach each other's memory.
#[derive(Clone, Copy, Debug)]
pub struct StagedTransfer<'a> {
    /// Address of the first row of this rank's shard (AllGather-GEMM).
    pub x: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
    /// What goes where.
    pub route: &'a Route,
    /// Number of the op, the same on all ranks: the call fails where peers differ.
    pub op: u32,
}

/// A collective of the transport's library, which is all the traffic of a sequential call.
#[derive(Clone, Copy, Debug)]
pub struct LibraryCollective {
    /// Which one.
    pub kind: CollectiveKind,
    /// Address of the first row of the caller's shard: an AllGather reads it, a ReduceScatter
    /// writes it. An AllReduce writes all rows there.
    pub shard: u64,
    /// Bytes from a row to the next.
    pub row_stride: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Rows of the shard; all rows of an AllReduce.
    pub rows: u64,
    /// Bytes from the start of a half of the own data region to the rows of all ranks, which lie
    /// there densely and in rank order.
    pub offset: u64,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of the op, as in [`StagedTransfer::op`].
    pub op: u32,
}

/// The collectives of sequential calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// Every rank gets the shards of all.
    AllGather,
    /// Every rank gets its shard of the sum over all ranks.
    ReduceScatter,
    /// Every rank gets all rows of the sum over all ranks.
    AllReduce,
}

impl LibraryCollective {
    /// Whether it brings what the kernel reads, and so goes ahead of it.
    pub fn is_ahead(&self) -> bool {
        self.kind == CollectiveKind::AllGather
    }

    /// Shards among the rows of all ranks.
    pub(crate) const fn shards(&self, world: u32) -> u32 {
        match self.kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => world,
            CollectiveKind::AllReduce => 1,
        }
    }

    pub(crate) const fn shard_bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes)
    }

    pub(crate) const fn shard_elements(&self) -> usize {
        self.shard_bytes() as usize / self.dtype.bytes()
    }
}
