//! What messages take of a device, and to how many peers at once they go.
//!
//! Invariant: all of it is a function of the problem, of what the transport says and of the options
//! that the ranks have agreed on: all ranks send and receive in the same groups, and leave as many
//! multiprocessors as the largest group needs.

use super::Round;

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

    /// Multiprocessors that the messages of the largest group take.
    pub fn of(&self, rounds: &[Round], peers: u32) -> u32 {
        let of_group = |group: &[Round]| group.iter().fold(0, |sum: u32, round| sum.saturating_add(self.of_message(round.bytes)));
        groups(rounds, peers).map(of_group).max().unwrap_or(0).min(self.all)
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
    use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

    #[test]
    fn rows_go_to_the_peers_of_a_group_before_any_go_to_the_next() {
        let problem = Problem::new(OpKind::AllGatherGemm, 4 * 64, 64, 64, DType::Bf16, WorldSize::new(4).unwrap()).unwrap();
        let schedule = Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(16, 16, 16)) };
        let rounds = TileProgram::build(&problem, Rank::new(0), &schedule).unwrap().rounds().unwrap();
        let sent = |peers: u32| -> Vec<(u32, u64)> {
            in_batches_of(rounds.clone(), peers).iter().map(|round| (round.sent.peer.get(), round.offset / (16 * 64 * 2))).collect()
        };
        let chunks = |groups: &[&[u32]]| -> Vec<(u32, u64)> {
            groups.iter().flat_map(|group| (0..4).flat_map(move |chunk| group.iter().map(move |&peer| (peer, chunk)))).collect()
        };
        assert_eq!(sent(u32::MAX), chunks(&[&[3, 2, 1]]));
        assert_eq!(sent(2), chunks(&[&[3, 2], &[1]]));
        assert_eq!(sent(1), chunks(&[&[3], &[2], &[1]]));
    }
}
