//! Messages between ranks: their SMs, and how many peers receive one at once.
//!
//! Invariant: all of it follows from the problem, the transport's channels and options that the
//! ranks agree on. So all ranks send and receive in the same groups, and leave the same number of
//! SMs.

use super::Round;

/// SMs that messages need: an upper bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Channels {
    /// Most SMs of all messages that are in flight together.
    pub all: u32,
    /// SMs of a message with parts of at most `part_bytes`, a power of two.
    pub each: u32,
    /// Most bytes of an SM's part: a message with larger parts doubles its SMs, up to `all`.
    pub part_bytes: u64,
    /// Least bytes for which a message of its own pays off.
    pub least_bytes: u64,
    /// Whether messages cross a network, where small ones overlap in flight and large ones gain
    /// nothing.
    pub network: bool,
}

impl Channels {
    /// Messages that take no SM and may have any size.
    pub const FREE: Self =
        Self { all: 0, each: 0, part_bytes: u64::MAX, least_bytes: 0, network: false };

    /// SMs of a message of `bytes`.
    ///
    /// ```
    /// use flux_core::program::Channels;
    /// let channels = Channels { all: 16, each: 4, part_bytes: 4 << 20, ..Channels::FREE };
    /// assert_eq!([16, 17, 33, 200].map(|mib| channels.of_message(mib << 20)), [4, 8, 16, 16]);
    /// ```
    pub fn of_message(&self, bytes: u64) -> u32 {
        let mut taken = self.each;
        while 0 < taken && taken < self.all && bytes.div_ceil(taken.into()) > self.part_bytes {
            taken *= 2;
        }
        taken.min(self.all)
    }

    /// SMs of the largest group's messages.
    pub fn of(&self, rounds: &[Round], peers: u32) -> u32 {
        let of_group = |group: &[Round]| {
            group.iter().fold(0, |sum: u32, round| sum.saturating_add(self.of_message(round.bytes)))
        };
        groups(rounds, peers).map(of_group).max().unwrap_or(0).min(self.all)
    }
}

/// Orders rounds of rows, all of which are there from the start: those of one batch of `peers`
/// peers precede those of the next.
pub fn in_batches_of(rounds: &[Round], peers: u32) -> Vec<Round> {
    let mut numbered = Vec::with_capacity(rounds.len());
    for run in rounds.chunk_by(|a, b| a.offset == b.offset) {
        numbered.extend(
            run.iter().enumerate().map(|(peer, &round)| (peer / peers.max(1) as usize, round)),
        );
    }
    numbered.sort_by_key(|&(batch, round)| (batch, round.offset));
    numbered.into_iter().map(|(_, round)| round).collect()
}

/// The rounds in groups whose messages are in flight together: one chunk to at most `peers` peers.
///
/// Chunks are the same on all ranks, so ranks with the same `peers` form the same groups.
///
/// ```
/// use flux_core::program::{Schedule, TileProgram, groups};
/// use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
/// let world = WorldSize::new(4).unwrap();
/// let p = Problem::new(OpKind::AllGatherGemm, 512, 1024, 1024, DType::Bf16, world)?;
/// let schedule = Schedule::of(TileShape::new(128, 128, 64));
/// let program = TileProgram::build(&p, Rank::new(0), &schedule)?;
/// let rounds = program.rounds().unwrap();
/// assert_eq!((groups(&rounds, 3).count(), groups(&rounds, 1).count()), (1, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn groups(rounds: &[Round], peers: u32) -> impl Iterator<Item = &[Round]> {
    rounds
        .chunk_by(|a, b| a.offset == b.offset)
        .flat_map(move |run| run.chunks(peers.max(1) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Chunk, Schedule, TileProgram};
    use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

    #[test]
    fn rows_go_to_the_peers_of_a_group_before_any_go_to_the_next() {
        let problem = Problem::new(
            OpKind::AllGatherGemm,
            4 * 64,
            64,
            64,
            DType::Bf16,
            WorldSize::new(4).unwrap(),
        )
        .unwrap();
        let schedule =
            Schedule { chunk: Chunk::Tiles(1), ..Schedule::of(TileShape::new(16, 16, 16)) };
        let rounds =
            TileProgram::build(&problem, Rank::new(0), &schedule).unwrap().rounds().unwrap();
        let sent = |peers: u32| -> Vec<(u32, u64)> {
            in_batches_of(&rounds, peers)
                .iter()
                .map(|round| (round.sent.peer.get(), round.offset / (16 * 64 * 2)))
                .collect()
        };
        let chunks = |groups: &[&[u32]]| -> Vec<(u32, u64)> {
            groups
                .iter()
                .flat_map(|group| {
                    (0..4).flat_map(move |chunk| group.iter().map(move |&peer| (peer, chunk)))
                })
                .collect()
        };
        assert_eq!(sent(u32::MAX), chunks(&[&[3, 2, 1]]));
        assert_eq!(sent(2), chunks(&[&[3, 2], &[1]]));
        assert_eq!(sent(1), chunks(&[&[3], &[2], &[1]]));
    }
}
