//! What an executor hands a mover in one call.

use flux_core::program::route::Route;
use flux_core::program::{Forward, Round, Sending, Transfer};

mod check;

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

/// A mover's work in one call: transfers from this rank's shard to gather buffers, with signals.
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
    /// Number of the op, the same on all ranks: the call fails where peers differ.
    pub op: u32,
}
