//! When workers are free that take tiles in turn.
//!
//! Invariant: the same as of each worker by itself; many are free at the same time, so runs of them
//! are few where tiles are many.

use std::collections::VecDeque;

/// Workers in the order in which they take tiles.
#[derive(Clone, Debug)]
pub(super) struct Workers {
    /// How many, and the nanoseconds after which they are free.
    runs: VecDeque<(u64, u64)>,
}

impl Workers {
    /// So many, all free at `begun`.
    pub(super) fn new(count: u32, begun: u64) -> Self {
        Self { runs: VecDeque::from([(count.max(1).into(), begun)]) }
    }

    /// The next ones take so many tiles, one each and round again, whose rows are `there` and which
    /// take `tile_ns`.
    pub(super) fn take(&mut self, mut tiles: u64, there: u64, tile_ns: u64) {
        while tiles > 0 {
            let Some((count, free)) = self.runs.pop_front() else { return };
            let taken = count.min(tiles);
            if taken < count {
                self.runs.push_front((count - taken, free));
            }
            tiles -= taken;
            let done = there.max(free) + tile_ns;
            match self.runs.back_mut() {
                Some((last, time)) if *time == done => *last += taken,
                _ => self.runs.push_back((taken, done)),
            }
        }
    }

    /// When all are.
    pub(super) fn all_free(&self) -> u64 {
        self.runs.iter().map(|&(_, free)| free).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_of_workers_are_free_when_each_is(
            count in 1..140_u32,
            begun in 0..1000_u64,
            groups in prop::collection::vec((0..700_u64, 0..9000_u64), 0..20),
            tile_ns in 1..500_u64,
        ) {
            let mut workers = Workers::new(count, begun);
            let (mut free, mut turn) = (vec![begun; count as usize], (0..count as usize).cycle());
            for &(tiles, there) in &groups {
                workers.take(tiles, there, tile_ns);
                for worker in turn.by_ref().take(tiles as usize) {
                    free[worker] = there.max(free[worker]) + tile_ns;
                }
                prop_assert_eq!(Some(workers.all_free()), free.iter().copied().max());
                prop_assert_eq!(workers.runs.iter().map(|run| run.0).sum::<u64>(), u64::from(count));
            }
        }
    }
}
