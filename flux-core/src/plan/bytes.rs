//! The binary form of a plan, which ranks compare and exchange.
//!
//! Invariant: equal plans have equal bytes, and bytes that decode encode to themselves.

use super::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
use crate::TileShape;

/// Bytes of a plan: nine little-endian `u32`.
///
/// ```text
/// tile.m, tile.n, tile.k
/// rows:   0 flattened, 2^32 - 1 flattened in two exchanges, else the group
/// k:      0 whole, 1 stream-k, else the workers of a tile
/// chunk:  0 shard, else the tiles
/// k_slices
/// comm:   0 kernel, 1 copy engine, 2 overlapped, 3 sequential;  peers, 0 unless overlapped
/// ```
pub const PLAN_BYTES: usize = 36;

/// In the place of a group: flattened rows in two exchanges.
const TWO_EXCHANGES: u32 = u32::MAX;

/// The bytes are not a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these {PLAN_BYTES} bytes are no plan")]
pub struct PlanBytesError;

impl Plan {
    /// The plan's binary form.
    pub fn to_bytes(self) -> [u8; PLAN_BYTES] {
        let rows = match self.rows {
            RowMapping::Flattened => 0,
            RowMapping::FlattenedTwoExchanges => TWO_EXCHANGES,
            RowMapping::PerShard { group } => group,
        };
        let k = match self.k {
            KSplit::Whole => 0,
            KSplit::StreamK => 1,
            KSplit::SplitK(workers) => workers,
        };
        let chunk = match self.chunk {
            Chunk::Shard => 0,
            Chunk::Tiles(tiles) => tiles,
        };
        let (comm, peers) = match self.comm {
            CommMode::Fused { mover: Mover::Kernel } => (0, 0),
            CommMode::Fused { mover: Mover::CopyEngine } => (1, 0),
            CommMode::Overlapped { peers } => (2, peers),
            CommMode::Sequential => (3, 0),
        };
        let words = [self.tile.m, self.tile.n, self.tile.k, rows, k, chunk, self.k_slices, comm, peers];
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
        let word = |at: usize| u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]]);
        let comm = match (word(7), word(8)) {
            (0, 0) => CommMode::Fused { mover: Mover::Kernel },
            (1, 0) => CommMode::Fused { mover: Mover::CopyEngine },
            (2, peers @ 1..) => CommMode::Overlapped { peers },
            (3, 0) => CommMode::Sequential,
            _ => return Err(PlanBytesError),
        };
        let plan = Self {
            tile: TileShape::new(word(0), word(1), word(2)),
            rows: match word(3) {
                0 => RowMapping::Flattened,
                TWO_EXCHANGES => RowMapping::FlattenedTwoExchanges,
                group => RowMapping::PerShard { group },
            },
            k: match word(4) {
                0 => KSplit::Whole,
                1 => KSplit::StreamK,
                workers => KSplit::SplitK(workers),
            },
            chunk: if word(5) == 0 { Chunk::Shard } else { Chunk::Tiles(word(5)) },
            k_slices: word(6),
            comm,
        };
        let extents = [plan.tile.m, plan.tile.n, plan.tile.k, plan.k_slices];
        if extents.contains(&0) { Err(PlanBytesError) } else { Ok(plan) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::plans;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_give_back_the_plan(plan in plans()) {
            prop_assert_eq!(Plan::from_bytes(&plan.to_bytes()), Ok(plan));
        }

        #[test]
        fn bytes_that_decode_encode_to_themselves(words in prop::array::uniform9(0_u32..5)) {
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
            let bytes: [u8; PLAN_BYTES] = bytes.try_into().unwrap();
            if let Ok(plan) = Plan::from_bytes(&bytes) {
                prop_assert_eq!(plan.to_bytes(), bytes);
            }
        }
    }
}
