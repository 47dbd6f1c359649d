//! Blocks of a matrix and their overlap.

use crate::program::{Transfer, WorkItem};
use std::collections::BTreeMap;

/// A block of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rect {
    pub(super) row: u32,
    pub(super) rows: u32,
    pub(super) col: u32,
    pub(super) cols: u32,
}

impl Rect {
    /// The elements that an item computes.
    pub(super) const fn of_item(item: &WorkItem) -> Self {
        Self { row: item.row, rows: item.rows, col: item.col, cols: item.cols }
    }

    /// The elements of its place that a transfer fills.
    pub(super) const fn of_transfer(transfer: &Transfer) -> Self {
        Self { row: transfer.row, rows: transfer.rows, col: transfer.col, cols: transfer.cols }
    }

    pub(super) fn area(self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols)
    }

    /// The common elements.
    pub(super) fn meet(self, other: Self) -> Option<Self> {
        let range = |a: u32, a_len: u32, b: u32, b_len: u32| {
            let (first, end) = (a.max(b), (a + a_len).min(b + b_len));
            (first < end).then(|| (first, end - first))
        };
        let (row, rows) = range(self.row, self.rows, other.row, other.rows)?;
        let (col, cols) = range(self.col, self.cols, other.col, other.cols)?;
        Some(Self { row, rows, col, cols })
    }
}

/// Two blocks that overlap, the earlier first. A sweep down the rows holds the columns of open
/// blocks.
pub(super) fn overlap(rects: &[Rect]) -> Option<(usize, usize)> {
    let mut starts: Vec<usize> = (0..rects.len()).collect();
    starts.sort_by_key(|&index| rects[index].row);
    let mut ends = starts.clone();
    ends.sort_by_key(|&index| rects[index].row + rects[index].rows);
    let mut ends = ends.into_iter().peekable();
    let mut by_col: BTreeMap<u32, usize> = BTreeMap::new();
    for index in starts {
        let rect = rects[index];
        while let Some(ended) =
            ends.next_if(|&ended| rects[ended].row + rects[ended].rows <= rect.row)
        {
            by_col.remove(&rects[ended].col);
        }
        // The nearest open block to the left of this one's end.
        if let Some((_, &other)) = by_col.range(..rect.col + rect.cols).next_back()
            && rects[other].col + rects[other].cols > rect.col
        {
            return Some((other.min(index), other.max(index)));
        }
        by_col.insert(rect.col, index);
    }
    None
}
