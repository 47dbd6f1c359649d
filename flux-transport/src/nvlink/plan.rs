//! From transfers to copies: which bytes go where.
//!
//! Invariant: a [`Plan`] that exists stays inside the caller's shard, the peers' gather buffers and their pads; nothing is
//! enqueued for a push that has one bad transfer.

use flux_core::layout::{WorkspaceSize, signal_offset};
use flux_core::program::Transfer;

/// The caller's shard and where its rows go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Device address of row 0.
    pub x: u64,
    /// Bytes from one row to the next.
    pub row_stride: u64,
    /// Bytes of a row that are sent; rows are dense in the gather buffer.
    pub row_bytes: u64,
    /// Bytes of one place in the gather buffer.
    pub place_bytes: u64,
}

/// One copy: `rows` rows of `row_bytes`, `pitch` bytes apart at `from`, dense at `to`; then a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) rows: u64,
    pub(super) row_bytes: u64,
    pub(super) pitch: u64,
    pub(super) signal: u64,
}

impl Copy {
    /// Whether the rows follow each other without gaps.
    pub(super) fn dense(&self) -> bool {
        self.rows == 1 || self.pitch == self.row_bytes
    }
}

/// Why a transfer cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The destination is this rank or none.
    #[error("transfer {index} goes to rank {dest}, from rank {rank} of {world}")]
    Destination {
        /// Position in the list.
        index: usize,
        /// Where to.
        dest: u32,
        /// This rank.
        rank: u32,
        /// Number of ranks.
        world: usize,
    },
    /// The rows are not in the place, or the place not in the half.
    #[error("transfer {index} ends at byte {end} of its half, beyond {limit}")]
    Beyond {
        /// Position in the list.
        index: usize,
        /// First byte after the rows.
        end: u128,
        /// Bytes of the place's end or of the half.
        limit: u128,
    },
    /// There is no such signal.
    #[error("transfer {index} raises signal {signal} of a pad of {signals}")]
    Signal {
        /// Position in the list.
        index: usize,
        /// The signal.
        signal: u32,
        /// Signals on the pad.
        signals: u32,
    },
    /// Rows overlap.
    #[error("rows of {row_bytes} bytes cannot lie {row_stride} bytes apart")]
    Stride {
        /// Bytes of a row.
        row_bytes: u64,
        /// Bytes from one row to the next.
        row_stride: u64,
    },
}

/// Checked transfers of one push.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    shard: Shard,
    transfers: &'a [Transfer],
}

impl<'a> Plan<'a> {
    /// Checks every transfer against a workspace of `size` in a world of `world` ranks.
    pub(super) fn new(
        shard: Shard,
        transfers: &'a [Transfer],
        (rank, world): (u32, usize),
        size: &WorkspaceSize,
    ) -> Result<Self, TransferError> {
        let Shard { row_stride, row_bytes, place_bytes, .. } = shard;
        if row_stride < row_bytes {
            return Err(TransferError::Stride { row_bytes, row_stride });
        }
        for (index, t) in transfers.iter().enumerate() {
            if t.dest == rank || t.dest as usize >= world {
                return Err(TransferError::Destination { index, dest: t.dest, rank, world });
            }
            if t.raise >= size.signals {
                return Err(TransferError::Signal { index, signal: t.raise, signals: size.signals });
            }
            let place = u128::from(t.place) * u128::from(place_bytes);
            let end = place + (u128::from(t.row) + u128::from(t.rows)) * u128::from(row_bytes);
            let limit = (place + u128::from(place_bytes)).min(u128::from(size.half_bytes));
            if end > limit {
                return Err(TransferError::Beyond { index, end, limit });
            }
        }
        Ok(Self { shard, transfers })
    }

    /// The copies, in order, into the half that starts `half` bytes into each peer's data region. Transfers without rows only signal.
    pub(super) fn copies(&self, half: u64, data: &[u64], pads: &[u64]) -> impl Iterator<Item = Copy> {
        let Shard { x, row_stride, row_bytes, place_bytes } = self.shard;
        self.transfers.iter().map(move |t| {
            let dest = t.dest as usize;
            Copy {
                to: data[dest] + half + u64::from(t.place) * place_bytes + u64::from(t.row) * row_bytes,
                from: x + u64::from(t.row) * row_stride,
                rows: u64::from(t.rows),
                row_bytes,
                pitch: row_stride,
                signal: pads[dest] + signal_offset(t.raise),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 3 * 1024, signals: 6, counters: 0 };
    const SHARD: Shard = Shard { x: 0x1000, row_stride: 96, row_bytes: 64, place_bytes: 1024 };

    fn transfer(dest: u32, place: u32, row: u32, rows: u32, raise: u32) -> Transfer {
        Transfer { dest, place, row, rows, raise, step: 1 }
    }

    #[test]
    fn a_copy_has_the_addresses_of_the_layout() {
        let list = [transfer(2, 1, 4, 8, 3)];
        let plan = Plan::new(SHARD, &list, (1, 4), &SIZE).unwrap();
        let half = SIZE.half_stride();
        let copies: Vec<Copy> = plan.copies(half, &[0, 0, 1 << 30, 0], &[0, 0, 1 << 20, 0]).collect();
        let to = (1 << 30) + half + 1024 + 4 * 64;
        let signal = (1 << 20) + (16 + 3) * 128;
        assert_eq!(copies, [Copy { to, from: 0x1000 + 4 * 96, rows: 8, row_bytes: 64, pitch: 96, signal }]);
        assert!(!copies[0].dense());
    }

    #[test]
    fn each_bad_transfer_is_named() {
        let good = transfer(0, 0, 0, 1, 0);
        let refused = |t| Plan::new(SHARD, &[good, t], (1, 4), &SIZE).unwrap_err();
        assert!(matches!(refused(transfer(1, 0, 0, 1, 0)), TransferError::Destination { index: 1, dest: 1, .. }));
        assert!(matches!(refused(transfer(4, 0, 0, 1, 0)), TransferError::Destination { dest: 4, .. }));
        assert!(matches!(refused(transfer(0, 0, 16, 1, 0)), TransferError::Beyond { end: 1088, limit: 1024, .. }));
        assert!(matches!(refused(transfer(0, 3, 0, 1, 0)), TransferError::Beyond { limit: 3072, .. }));
        assert!(matches!(refused(transfer(0, u32::MAX, u32::MAX, u32::MAX, 0)), TransferError::Beyond { .. }));
        assert!(matches!(refused(transfer(0, 0, 0, 1, 6)), TransferError::Signal { signal: 6, signals: 6, .. }));
        let overlapping = Shard { row_stride: 63, ..SHARD };
        assert!(matches!(Plan::new(overlapping, &[], (1, 4), &SIZE), Err(TransferError::Stride { .. })));
    }

    proptest! {
        #[test]
        fn accepted_copies_stay_in_the_half_and_on_the_pad(place in 0u32..5, row in 0u32..20, rows in 0u32..20, raise in 0u32..8, dest in 0u32..5) {
            let list = [transfer(dest, place, row, rows, raise)];
            if let Ok(plan) = Plan::new(SHARD, &list, (1, 4), &SIZE) {
                for copy in plan.copies(0, &[0; 4], &[0; 4]) {
                    prop_assert!(copy.to + copy.rows * copy.row_bytes <= SIZE.half_bytes);
                    prop_assert!(copy.signal < flux_core::layout::pad_bytes(SIZE.signals));
                }
            }
        }
    }
}
