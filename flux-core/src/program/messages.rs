//! What messages take of a device, and when and to how many peers at once they go.
//!
//! Invariant: all of it is a function of the problem, of what the transport says and of the options
//! that the ranks have agreed on: all ranks send and receive in the same groups, and leave as many
//! multiprocessors as the largest group needs.

use super::{Round, Schedule};
use crate::OpKind;
use std::fmt;

/// How messages share the multiprocessors that they need, as far as it is known: never less than
/// what they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Channels {
    /// Multiprocessors of all messages that go at once, at most.
    pub all: u32,
    /// Those of one message whose parts are not too large, a power of two.
    pub each: u32,
    /// Most bytes of a part: a message with larger ones takes twice as many multiprocessors, again
    /// and again until it has `all`.
    pub part_bytes: u64,
    /// Least bytes that are worth a message of their own.
    pub least_bytes: u64,
    /// Whether they cross a network: there small messages overlap on the way, and larger ones than
    /// are worth it take longer.
    pub network: bool,
}

impl Channels {
    /// Of messages that take no multiprocessor and may be of any size.
    pub const FREE: Self = Self { all: 0, each: 0, part_bytes: u64::MAX, least_bytes: 0, network: false };

    /// Multiprocessors of a message of so many bytes.
    ///
    /// ```
    /// use flux_core::program::Channels;
    /// let channels = Channels { all: 16, each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20, network: false };
    /// assert_eq!([16, 17, 33, 200].map(|mib| channels.of_message(mib << 20)), [4, 8, 16, 16]);
    /// ```
    pub fn of_message(&self, bytes: u64) -> u32 {
        let mut taken = self.each;
        while 0 < taken && taken < self.all && bytes.div_ceil(taken.into()) > self.part_bytes {
            taken *= 2;
        }
        taken.min(self.all)
    }

    /// Multiprocessors that messages take beside a kernel of a call that is sent so, in these
    /// rounds: those of the largest group. Of a GEMM-ReduceScatter whose partial sums all go
    /// between its launches it is one message, of what ranks say of the call beside the first
    /// launch; that waits for nobody, so more of them only take turns.
    pub fn beside(&self, sending: Sending, op: OpKind, rounds: &[Round]) -> u32 {
        match (sending, op) {
            (Sending::Beside { .. }, _) => self.of(rounds, sending.peers()),
            (Sending::Before, OpKind::AllGatherGemm) => 0,
            (Sending::Before, OpKind::GemmReduceScatter) => self.each.min(self.all),
        }
    }

    /// Multiprocessors that the messages of the largest group take.
    pub fn of(&self, rounds: &[Round], peers: u32) -> u32 {
        let of_group = |group: &[Round]| group.iter().fold(0, |sum: u32, round| sum.saturating_add(self.of_message(round.bytes)));
        groups(rounds, peers).map(of_group).max().unwrap_or(0).min(self.all)
    }
}

/// When the messages of a call go. The same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sending {
    /// Beside the kernel, which leaves them the multiprocessors that they need.
    Beside {
        /// Peers to which messages go at once, at least 1; as many as there are, or more, are all.
        peers: u32,
    },
    /// Before what they bring is read, to all peers at once, with all multiprocessors to
    /// themselves: before the kernel of an AllGather-GEMM, and between the tiles and the folds of a
    /// GEMM-ReduceScatter whose tiles span shards, which are a launch each. Neither waits for a
    /// peer then, but for what it says of its call.
    Before,
}

impl Sending {
    /// Beside the kernel, to all peers at once.
    pub const ALL: Self = Self::Beside { peers: u32::MAX };

    /// Peers to which messages go at once, where there are no limits.
    pub const fn peers(self) -> u32 {
        match self {
            Self::Beside { peers: 0 } => 1,
            Self::Beside { peers } => peers,
            Self::Before => u32::MAX,
        }
    }

    /// Whether a program of this op and schedule can be sent so: partial sums that are not folded
    /// are added to tiles beside which others are made.
    pub const fn suits(self, op: OpKind, schedule: &Schedule) -> bool {
        match (self, op) {
            (Self::Before, OpKind::GemmReduceScatter) => schedule.stack,
            (Self::Before, OpKind::AllGatherGemm) | (Self::Beside { .. }, _) => true,
        }
    }

    /// The rounds in the order in which they are gone through.
    pub fn ordered(self, rounds: Vec<Round>, rows: bool) -> Vec<Round> {
        if rows { in_batches_of(rounds, self.peers()) } else { rounds }
    }
}

impl fmt::Display for Sending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Beside { peers: u32::MAX } => f.write_str("messages to all peers at once"),
            Self::Beside { peers } => write!(f, "messages to {peers} peers at once"),
            Self::Before => f.write_str("messages before what they bring is read"),
        }
    }
}

/// The rounds of rows that are all there from the start, so that those of the peers that go together
/// come before those of the next.
pub fn in_batches_of(rounds: Vec<Round>, peers: u32) -> Vec<Round> {
    let mut numbered = Vec::with_capacity(rounds.len());
    for run in rounds.chunk_by(|a, b| a.offset == b.offset) {
        numbered.extend(run.iter().enumerate().map(|(peer, &round)| (peer / peers.max(1) as usize, round)));
    }
    numbered.sort_by_key(|&(batch, round)| (batch, round.offset));
    numbered.into_iter().map(|(_, round)| round).collect()
}

/// The rounds in groups, whose messages go at once: the same chunk to so many peers.
///
/// Ranks that are given the same number make the same groups: which rounds share one depends on
/// chunks, that all ranks' rounds have in common.
///
/// ```
/// use flux_core::program::{Schedule, TileProgram, groups};
/// use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
/// let p = Problem::new(OpKind::AllGatherGemm, 512, 1024, 1024, DType::Bf16, WorldSize::new(4).unwrap())?;
/// let program = TileProgram::build(&p, Rank::new(0), &Schedule::of(TileShape::new(128, 128, 64)))?;
/// let rounds = program.rounds().unwrap();
/// assert_eq!((groups(&rounds, 3).count(), groups(&rounds, 1).count()), (1, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn groups(rounds: &[Round], peers: u32) -> impl Iterator<Item = &[Round]> {
    rounds.chunk_by(|a, b| a.offset == b.offset).flat_map(move |run| run.chunks(peers.max(1) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Chunk, Schedule, TileProgram};
    use crate::{DType, Problem, Rank, TileShape, WorldSize};

    #[test]
    fn what_goes_before_takes_nothing_of_a_kernel_that_waits_and_suits_what_is_folded() {
        let channels = Channels { all: 16, each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20, network: false };
        let (ag, rs) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        assert_eq!([ag, rs].map(|op| channels.beside(Sending::Before, op, &[])), [0, 4]);
        assert_eq!([ag, rs].map(|op| Channels::FREE.beside(Sending::Before, op, &[])), [0, 0]);
        let tiles = Schedule::of(TileShape::new(128, 128, 64));
        let folded = Schedule { stack: true, ..tiles };
        assert_eq!([tiles, folded].map(|of| Sending::Before.suits(rs, &of)), [false, true]);
        assert!([tiles, folded].iter().all(|of| Sending::Before.suits(ag, of) && Sending::ALL.suits(rs, of)));
    }

    #[test]
    fn rows_go_to_the_peers_of_a_group_before_any_go_to_the_next() {
        let problem = Problem::new(OpKind::AllGatherGemm, 4 * 64, 64, 64, DType::Bf16, WorldSize::new(4).unwrap()).unwrap();
        let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(16, 16, 16)) };
        let rounds = TileProgram::build(&problem, Rank::new(0), &schedule).unwrap().rounds().unwrap();
        let sent = |sending: Sending, rows| -> Vec<(u32, u64)> {
            sending.ordered(rounds.clone(), rows).iter().map(|round| (round.sent.peer.get(), round.offset / (16 * 64 * 2))).collect()
        };
        let chunks = |groups: &[&[u32]]| -> Vec<(u32, u64)> {
            groups.iter().flat_map(|group| (0..4).flat_map(move |chunk| group.iter().map(move |&peer| (peer, chunk)))).collect()
        };
        assert_eq!(sent(Sending::ALL, true), chunks(&[&[3, 2, 1]]));
        assert_eq!(sent(Sending::Beside { peers: 2 }, true), chunks(&[&[3, 2], &[1]]));
        assert_eq!(sent(Sending::Beside { peers: 1 }, true), chunks(&[&[3], &[2], &[1]]));
        assert_eq!(sent(Sending::Beside { peers: 1 }, false), chunks(&[&[3, 2, 1]]), "what the kernel stores goes as it comes");
    }
}
