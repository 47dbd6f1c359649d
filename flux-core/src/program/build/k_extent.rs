//! Where `k` is cut.
//!
//! Invariant: every cut is at a step of `tile.k`, no piece is empty, and the pieces cover `k` in
//! order.

use crate::program::Schedule;
use crate::{Problem, Rank};
use std::ops::Range;

/// The inner extent of one rank, in steps of `tile.k`; the last step may be shorter.
#[derive(Clone, Copy, Debug)]
pub(super) struct KExtent {
    k: u32,
    step: u32,
}

impl KExtent {
    /// That of `rank`.
    pub(super) fn new(problem: &Problem, rank: Rank, schedule: &Schedule) -> Self {
        Self { k: problem.k_local(rank), step: schedule.tile.k }
    }

    /// That of the rank with the least, which bounds what all ranks do alike.
    pub(super) fn least(problem: &Problem, schedule: &Schedule) -> Self {
        Self::new(problem, problem.least_rank(), schedule)
    }

    /// Steps in all.
    pub(super) const fn steps(self) -> u32 {
        self.k.div_ceil(self.step)
    }

    /// The first element of these steps, and the number of elements.
    pub(super) fn columns(self, steps: &Range<u32>) -> (u32, u32) {
        let end = steps.end.checked_mul(self.step).map_or(self.k, |end| end.min(self.k));
        (steps.start * self.step, end - steps.start * self.step)
    }

    /// At most `most` slices of equal width; the last may be narrower.
    pub(super) fn slices(self, most: u32) -> Vec<Range<u32>> {
        let width = self.steps().div_ceil(most);
        (0..self.steps())
            .step_by(width as usize)
            .map(|first| first..first.saturating_add(width).min(self.steps()))
            .collect()
    }

    /// `count` parts, at most one a step, whose widths differ by at most one step.
    pub(super) fn parts(self, count: u32) -> Vec<Range<u32>> {
        let count = count.min(self.steps());
        let border = |part: u32| {
            let steps = u64::from(part) * u64::from(self.steps()) / u64::from(count);
            u32::try_from(steps).unwrap_or(self.steps())
        };
        (0..count).map(|part| border(part)..border(part + 1)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_as_wide_as_the_first_and_parts_nearly_equal() {
        let k = KExtent { k: 10 * 64 - 24, step: 64 };
        assert_eq!(
            (k.steps(), k.slices(1).len(), k.slices(4)),
            (10, 1, vec![0..3, 3..6, 6..9, 9..10])
        );
        assert_eq!(k.slices(6).len(), 5, "five of two steps");
        assert_eq!(k.slices(u32::MAX).len(), 10);
        assert_eq!((k.parts(3), k.parts(99).len()), (vec![0..3, 3..6, 6..10], 10));
        assert_eq!((k.columns(&(0..3)), k.columns(&(9..10))), ((0, 192), (576, 40)));
    }
}
