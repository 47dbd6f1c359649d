//! Messages between the suite and its rank processes, a line of JSON each.
//!
//! Invariant: a rank answers every request with one reply, and says `Ready` once before the first.

use super::usage::Usage;
use serde::{Deserialize, Serialize};

/// To a rank, on its standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// Make so many calls, or as many as succeed: `Done` or `Failed`.
    Run {
        calls: u64,
    },
    /// Rebuild the communicator and the ops, and verify calls: `Ready`.
    Rebuild {
        /// With replacements for lost ranks; else without them.
        whole: bool,
    },
    Quit,
}

/// From a rank, on its standard output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// It has a working communicator.
    Ready {
        world: u32,
        /// Outputs that were not right to the bit.
        wrong: u64,
        usage: Usage,
        /// Bytes in use of the rank's GPU, where it has one of its own.
        device: Option<u64>,
    },
    Done {
        /// Outputs that were not right to the bit.
        wrong: u64,
    },
    /// A call has failed, and the next one too.
    Failed {
        how: FailureKind,
        /// When the call began and when it had failed, in nanoseconds of the monotonic clock.
        began: u64,
        ended: u64,
        /// Outputs of the calls before it that were not right to the bit.
        wrong: u64,
        text: String,
    },
    /// What was ordered could not be done.
    Error { text: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FailureKind {
    Timeout { late: Vec<u32> },
    PeerLost { rank: u32 },
    Aborted { by: u32 },
}
