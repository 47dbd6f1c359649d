//! Turns transfers into copies.
//!
//! Invariant: a push that passed [`RowTransfers::check`] gives copies inside the peers' gather
//! buffers and pads only.

use crate::backends::jobs::RowTransfers;
use flux_core::layout::signal_offset;
use flux_core::program::Transfer;
use flux_core::signal::Epoch;

/// A copy of `rows` rows of `width` bytes, with the pitch of each side; then a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) rows: u64,
    pub(super) width: u64,
    pub(super) from_pitch: u64,
    pub(super) to_pitch: u64,
    pub(super) signal: u64,
}

impl Copy {
    /// Whether the rows follow each other without gaps.
    pub(super) fn dense(&self) -> bool {
        self.rows == 1 || (self.from_pitch == self.width && self.to_pitch == self.width)
    }
}

/// The copies of a checked push, in order, for call `epoch`. Transfers without rows only signal.
pub(super) fn copies<'a>(
    push: &RowTransfers<'_>,
    transfers: impl Iterator<Item = &'a Transfer>,
    epoch: Epoch,
    half_stride: u64,
    data: &[u64],
    pads: &[u64],
) -> impl Iterator<Item = Copy> {
    let push = *push;
    let RowTransfers { x, row_stride, row_bytes, element_bytes, .. } = push;
    let half = epoch.half() as u64 * half_stride;
    transfers.map(move |t| {
        let (dest, col) = (t.dest as usize, u64::from(t.col) * element_bytes);
        Copy {
            to: data[dest] + half + push.place(t.place) + u64::from(t.row) * row_bytes + col,
            from: x + u64::from(t.row) * row_stride + col,
            rows: u64::from(t.rows),
            width: u64::from(t.cols) * element_bytes,
            from_pitch: row_stride,
            to_pitch: row_bytes,
            signal: pads[dest] + signal_offset(t.raise, epoch.half()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::layout::{WorkspaceSize, pad_bytes};
    use flux_core::program::Transfer;
    use proptest::prelude::*;

    const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 3 * 1024, signals: 6, counters: 0 };

    fn push(transfers: &[Transfer]) -> RowTransfers<'_> {
        RowTransfers {
            x: 0x1000,
            row_stride: 96,
            row_bytes: 64,
            element_bytes: 2,
            rows: 16,
            place_bytes: 1024,
            full_places: u32::MAX,
            transfers,
            forwards: &[],
        }
    }

    #[test]
    fn a_copy_has_the_addresses_of_the_layout() {
        let whole =
            Transfer { dest: 2, place: 1, row: 4, rows: 8, col: 0, cols: 32, raise: 3, step: 1 };
        let list = [whole, Transfer { col: 16, cols: 8, ..whole }];
        let half = SIZE.half_stride();
        let copies: Vec<Copy> = copies(
            &push(&list),
            list.iter(),
            Epoch::FIRST,
            half,
            &[0, 0, 1 << 30, 0],
            &[0, 0, 1 << 20, 0],
        )
        .collect();
        let to = (1 << 30) + half + 1024 + 4 * 64;
        let signal = (1 << 20) + (16 + 2 * 3 + 1) * 128;
        let rows = Copy {
            to,
            from: 0x1000 + 4 * 96,
            rows: 8,
            width: 64,
            from_pitch: 96,
            to_pitch: 64,
            signal,
        };
        assert_eq!(copies, [rows, Copy { to: to + 32, from: rows.from + 32, width: 16, ..rows }]);
        assert!(!copies[0].dense() && !copies[1].dense());
        assert!(
            Copy { from_pitch: 64, ..rows }.dense()
                && !Copy { from_pitch: 64, width: 16, ..rows }.dense()
        );
    }

    proptest! {
        #[test]
        fn checked_copies_stay_in_the_half_and_on_the_pad(
            place in 0u32..5,
            row in 0u32..20,
            rows in 0u32..20,
            col in 0u32..40,
            cols in 0u32..40,
            raise in 0u32..8,
            dest in 0u32..5,
        ) {
            let list = [Transfer { dest, place, row, rows, col, cols, raise, step: 1 }];
            let push = push(&list);
            if push.check(4, SIZE).is_ok() {
                for copy in copies(&push, list.iter(), Epoch::new(2), SIZE.half_stride(), &[0; 4], &[0; 4]) {
                    let end = copy.to + copy.rows.saturating_sub(1) * copy.to_pitch + copy.width;
                    prop_assert!(copy.rows == 0 || end <= SIZE.half_bytes);
                    prop_assert!(copy.signal < pad_bytes(SIZE.signals));
                }
            }
        }
    }
}
