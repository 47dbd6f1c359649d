//! Errors of the CPU executor.

use crate::epilogue::Activation;
use crate::weights::WeightLayout;
use flux_core::layout::{FaultRecord, WorkspaceSize, fault};
use flux_core::program::check::Violation;
use flux_core::{DType, Numerics, OpKind, Rank, Scales, TileShape};

/// Why a call was not, or not fully, executed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecuteError {
    /// The program is for another element type.
    #[error("the program is for {program}, the operands are {operands}, the outputs {outputs}")]
    DType {
        /// Of the program's problem.
        program: Numerics,
        /// Of the operands.
        operands: DType,
        /// Of the outputs.
        outputs: DType,
    },
    /// An operand has no scales and needs them, or has some and takes none.
    #[error(
        "the program is for {numerics}, and {operand} {}",
        if numerics.scales == Scales::None { "was given" } else { "was not given" }
    )]
    Scales {
        /// Of the program's problem.
        numerics: Numerics,
        /// The scales' name.
        operand: &'static str,
    },
    /// An operand is smaller than the problem says.
    #[error(
        "{operand} holds {have} elements with a row stride of {stride}; {rows} rows of {cols} need \
         {need}"
    )]
    Operand {
        /// Its name.
        operand: &'static str,
        /// Rows of the operand.
        rows: u32,
        /// Columns of the operand.
        cols: u32,
        /// Distance between the starts of two rows, in elements; at least `cols`.
        stride: usize,
        /// Elements needed.
        need: usize,
        /// Elements given.
        have: usize,
    },
    /// An activation of a sum that other ranks add to.
    #[error("{op} takes no activation, and {activation} was asked for")]
    Activation {
        /// The op.
        op: OpKind,
        /// What was asked for.
        activation: Activation,
    },
    /// Gates of weights that cannot have them.
    #[error(
        "{op} with w as {weights} and tiles of {tile} takes no gates of {n} rows: they need \
         ag_gemm, w as [n, k], and multiples of 16 in both"
    )]
    Gates {
        /// The op.
        op: OpKind,
        /// How its weights lie.
        weights: WeightLayout,
        /// The program's tiles.
        tile: TileShape,
        /// Rows of `w` as `[n, k]`.
        n: u32,
    },
    /// Other weights than the problem's, several as `[k, n]`, or some of them with a bias.
    #[error(
        "the program takes {takes} weights, several of them as [n, k] only, with a bias each or \
         none; others were given, as {layout}"
    )]
    Weights {
        /// Weights of the problem.
        takes: usize,
        /// How they lie.
        layout: WeightLayout,
    },
    /// An operand that the op's epilogue does not read.
    #[error("{op} takes no {operand}, and one was given")]
    NoSuchOperand {
        /// The op.
        op: OpKind,
        /// Its name.
        operand: &'static str,
    },
    /// The communicator's workspace is smaller than the program needs.
    #[error(
        "the program needs a workspace of {need:?} over {world} ranks; there is {have:?} over \
         {ranks}"
    )]
    Workspace {
        /// What the program needs.
        need: WorkspaceSize,
        /// Ranks that the program is for.
        world: u32,
        /// What was given.
        have: WorkspaceSize,
        /// Ranks whose memory is mapped.
        ranks: usize,
    },
    /// Memory is short.
    #[error(
        "{bytes} bytes of {what} cannot be had: what the host executor needs grows with the \
         extents of a rank's operands, with the tile and with the workers"
    )]
    OutOfMemory {
        /// What it is for.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// The program does not describe a call of its problem.
    #[error(transparent)]
    Program(#[from] Violation),
    /// A signal did not arrive before the deadline. The communicator is broken.
    #[error("rank {rank}: {what} of rank {peer} did not come: epoch {expected} expected, {seen} \
             seen, in call {epoch}", what = Waited(*wait, *signal))]
    Timeout {
        /// The rank that waited.
        rank: u32,
        /// The rank that should have written the word.
        peer: u32,
        /// What was waited for, as in [`fault`].
        wait: u32,
        /// Index of the signal, where one was waited for.
        signal: u32,
        /// Epoch that was expected.
        expected: u32,
        /// Value that was last seen.
        seen: u32,
        /// Epoch of the call.
        epoch: u32,
    },
    /// The abort word was set while the rank waited. The communicator is broken.
    #[error("rank {rank}: aborted (reason {abort}) while it waited for {what} of rank {peer} in \
             call {epoch}", what = Waited(*wait, *signal))]
    Aborted {
        /// The rank that waited.
        rank: u32,
        /// The rank that should have written the word.
        peer: u32,
        /// What was waited for, as in [`fault`].
        wait: u32,
        /// Index of the signal, where one was waited for.
        signal: u32,
        /// Value of the abort word.
        abort: u32,
        /// Epoch of the call.
        epoch: u32,
    },
    /// A peer is in a call of another op. The communicator is broken.
    #[error(
        "rank {rank}: rank {peer} has made other calls, as call {epoch} shows: all ranks make the \
         same calls in the same order"
    )]
    Disagreed {
        /// The rank that found it.
        rank: u32,
        /// The rank in another op.
        peer: u32,
        /// Epoch of the call.
        epoch: u32,
    },
    /// An earlier failure has poisoned the rank, and its record is not complete. The communicator
    /// is broken.
    #[error("rank {rank} is poisoned by an earlier failure: the communicator must be rebuilt")]
    Poisoned {
        /// The poisoned rank.
        rank: u32,
    },
}

flux_core::debug_is_text!(ExecuteError);

impl ExecuteError {
    /// What the fault record of a poisoned `rank` says.
    pub(super) fn from_record(record: Option<FaultRecord>, rank: Rank) -> Self {
        let Some(record) = record else { return Self::Poisoned { rank: rank.get() } };
        let FaultRecord { code, wait, rank, peer, signal, expected, seen, epoch, abort, .. } =
            record;
        match code {
            fault::ABORTED => Self::Aborted { rank, peer, wait, signal, abort, epoch },
            fault::DISAGREED => Self::Disagreed { rank, peer, epoch },
            _ => Self::Timeout { rank, peer, wait, signal, expected, seen, epoch },
        }
    }
}

/// What a wait was for, in words.
struct Waited(u32, u32);

impl std::fmt::Display for Waited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            fault::PUSHED => f.write_str("the end of the transfers"),
            fault::CALL => f.write_str("the call"),
            _ => write!(f, "signal {}", self.1),
        }
    }
}
