//! From transfers to copies: which bytes go where.
//!
//! Invariant: a push that passed [`Push::check`] yields copies inside the peers' gather buffers and pads only.

use crate::Push;
use flux_core::layout::signal_offset;

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

/// The copies of a checked push, in order, into the half that starts `half` bytes into each peer's data region. Transfers without rows only
/// signal.
pub(super) fn copies(push: &Push<'_>, half: u64, data: &[u64], pads: &[u64]) -> impl Iterator<Item = Copy> {
    let &Push { x, row_stride, row_bytes, place_bytes, transfers } = push;
    transfers.iter().map(move |t| {
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

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::Rank;
    use flux_core::layout::{WorkspaceSize, pad_bytes};
    use flux_core::program::Transfer;
    use proptest::prelude::*;

    const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 3 * 1024, signals: 6, counters: 0 };

    fn push(transfers: &[Transfer]) -> Push<'_> {
        Push { x: 0x1000, row_stride: 96, row_bytes: 64, place_bytes: 1024, transfers }
    }

    #[test]
    fn a_copy_has_the_addresses_of_the_layout() {
        let list = [Transfer { dest: 2, place: 1, row: 4, rows: 8, col: 0, cols: 32, raise: 3, step: 1 }];
        let half = SIZE.half_stride();
        let copies: Vec<Copy> = copies(&push(&list), half, &[0, 0, 1 << 30, 0], &[0, 0, 1 << 20, 0]).collect();
        let to = (1 << 30) + half + 1024 + 4 * 64;
        let signal = (1 << 20) + (16 + 3) * 128;
        assert_eq!(copies, [Copy { to, from: 0x1000 + 4 * 96, rows: 8, row_bytes: 64, pitch: 96, signal }]);
        assert!(!copies[0].dense());
    }

    proptest! {
        #[test]
        fn checked_copies_stay_in_the_half_and_on_the_pad(place in 0u32..5, row in 0u32..20, rows in 0u32..20, raise in 0u32..8, dest in 0u32..5) {
            let list = [Transfer { dest, place, row, rows, col: 0, cols: 32, raise, step: 1 }];
            let push = push(&list);
            if push.check(Rank::new(1), 4, SIZE).is_ok() {
                for copy in copies(&push, 0, &[0; 4], &[0; 4]) {
                    prop_assert!(copy.to + copy.rows * copy.row_bytes <= SIZE.half_bytes);
                    prop_assert!(copy.signal < pad_bytes(SIZE.signals));
                }
            }
        }
    }
}
