//! The binary form of a plan, which ranks compare and exchange.
//!
//! Invariant: equal plans have equal bytes, and bytes that decode encode to themselves.

use super::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
use crate::TileShape;

/// Words of a plan.
const WORDS: usize = 12;

/// Bytes of a plan: twelve little-endian `u32`. A field of several kinds is the number of its kind,
/// and the count that the kind has, else 0.
///
/// ```text
/// tile.m, tile.n, tile.k
/// rows:   0 flattened, 1 flattened in two exchanges, 2 per shard, with the group
/// k:      0 whole, 1 stream-k, 2 split-k, with the workers of a tile
/// chunk:  0 shard, 1 tiles, with their number
/// k_slices
/// comm:   0 kernel, 1 copy engine, 2 overlapped, with the peers, 3 sequential
/// ```
pub const PLAN_BYTES: usize = 4 * WORDS;

/// The bytes are not a plan.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("these {PLAN_BYTES} bytes are no plan")]
pub struct PlanBytesError;

crate::debug_is_text!(PlanBytesError);

impl Plan {
    /// The plan's binary form.
    pub fn to_bytes(self) -> [u8; PLAN_BYTES] {
        let (rows, group) = match self.rows {
            RowMapping::Flattened => (0, 0),
            RowMapping::FlattenedTwoExchanges => (1, 0),
            RowMapping::PerShard { group } => (2, group),
        };
        let (k, workers) = match self.k {
            KSplit::Whole => (0, 0),
            KSplit::StreamK => (1, 0),
            KSplit::SplitK(workers) => (2, workers),
        };
        let (chunk, tiles) = match self.chunk {
            Chunk::Shard => (0, 0),
            Chunk::Tiles(tiles) => (1, tiles),
        };
        let (comm, peers) = match self.comm {
            CommMode::Fused { mover: Mover::Kernel } => (0, 0),
            CommMode::Fused { mover: Mover::CopyEngine } => (1, 0),
            CommMode::Overlapped { peers } => (2, peers),
            CommMode::Sequential => (3, 0),
        };
        let TileShape { m, n, k: step } = self.tile;
        let words: [u32; WORDS] =
            [m, n, step, rows, group, k, workers, chunk, tiles, self.k_slices, comm, peers];
        let mut bytes = [0; PLAN_BYTES];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads the binary form.
    ///
    /// # Errors
    /// [`PlanBytesError`] if a field has an invalid value.
    pub fn from_bytes(bytes: &[u8; PLAN_BYTES]) -> Result<Self, PlanBytesError> {
        let (words, _) = bytes.as_chunks();
        let word = |at: usize| u32::from_le_bytes(words[at]);
        let plan = Self {
            tile: TileShape::new(word(0), word(1), word(2)),
            rows: match (word(3), word(4)) {
                (0, 0) => RowMapping::Flattened,
                (1, 0) => RowMapping::FlattenedTwoExchanges,
                (2, group) => RowMapping::PerShard { group },
                _ => return Err(PlanBytesError),
            },
            k: match (word(5), word(6)) {
                (0, 0) => KSplit::Whole,
                (1, 0) => KSplit::StreamK,
                (2, workers) => KSplit::SplitK(workers),
                _ => return Err(PlanBytesError),
            },
            chunk: match (word(7), word(8)) {
                (0, 0) => Chunk::Shard,
                (1, tiles) => Chunk::Tiles(tiles),
                _ => return Err(PlanBytesError),
            },
            k_slices: word(9),
            comm: match (word(10), word(11)) {
                (0, 0) => CommMode::Fused { mover: Mover::Kernel },
                (1, 0) => CommMode::Fused { mover: Mover::CopyEngine },
                (2, peers) => CommMode::Overlapped { peers },
                (3, 0) => CommMode::Sequential,
                _ => return Err(PlanBytesError),
            },
        };
        if plan.zero_field().is_some() { Err(PlanBytesError) } else { Ok(plan) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::plans;
    use super::*;
    use proptest::prelude::*;

    /// No text of a plan says one worker, but a caller may.
    #[test]
    fn one_worker_of_a_tile_is_not_stream_k() {
        let plan = |k| Plan { k, ..Plan::of(TileShape::new(128, 256, 64)) };
        let [one, stream_k] = [KSplit::SplitK(1), KSplit::StreamK].map(plan);
        assert_ne!(one.to_bytes(), stream_k.to_bytes());
        assert_eq!(Plan::from_bytes(&one.to_bytes()), Ok(one));
    }

    proptest! {
        #[test]
        fn bytes_give_back_the_plan(plan in plans()) {
            prop_assert_eq!(Plan::from_bytes(&plan.to_bytes()), Ok(plan));
        }

        #[test]
        fn bytes_that_decode_encode_to_themselves(words in prop::array::uniform12(0_u32..4)) {
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
            let bytes: [u8; PLAN_BYTES] = bytes.try_into().unwrap();
            if let Ok(plan) = Plan::from_bytes(&bytes) {
                prop_assert_eq!(plan.to_bytes(), bytes);
            }
        }
    }
}
