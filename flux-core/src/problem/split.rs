//! Which rows, columns and inner elements each rank has.

use super::{MAX_WEIGHTS, Problem, SumsTo};
use crate::Rank;
use std::ops::Range;

impl Problem {
    /// Rows of the largest shard, `m / W` rounded up.
    pub const fn m_shard(&self) -> u32 {
        self.m.div_ceil(self.world.get())
    }
    /// Shards of [`m_shard`](Self::m_shard) rows, the first ones; the others have one row less.
    pub const fn full_shards(&self) -> u32 {
        match self.m % self.world.get() {
            0 => self.world.get(),
            rest => rest,
        }
    }
    /// The rows of `rank`'s shard, of all `m`; none for the last ranks where `m < W`.
    ///
    /// ```
    /// use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
    /// let world = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::GemmReduceScatter, 10, 64, 64, DType::Bf16, world)?;
    /// let rows = [0, 1, 2, 3].map(|rank| p.shard_rows(Rank::new(rank)));
    /// assert_eq!(rows, [0..3, 3..6, 6..8, 8..10]);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub const fn shard_rows(&self, rank: Rank) -> Range<u32> {
        let start = self.shard_start(rank.get());
        start..start + self.m_shard() - (rank.get() >= self.full_shards()) as u32
    }
    /// The first row of the shard with this number.
    const fn shard_start(&self, shard: u32) -> u32 {
        shard * self.m_shard() - shard.saturating_sub(self.full_shards())
    }
    /// The rank whose shard has `row` of all `m`, and the row's number there.
    pub const fn owner_of(&self, row: u32) -> (Rank, u32) {
        let (rows, full) = (self.m_shard(), self.full_shards());
        let of_full = full * rows;
        if row < of_full {
            return (Rank::new(row / rows), row % rows);
        }
        // Shards with one row less have rows, or no row lies behind the full ones.
        let less = rows - 1;
        (Rank::new(full + (row - of_full) / less), (row - of_full) % less)
    }
    /// Most rows of a rank's `y`: those of the largest shard for GEMM-ReduceScatter, else all.
    pub const fn most_y_rows(&self) -> u32 {
        match self.op.sums_to() {
            SumsTo::Rows => self.m_shard(),
            SumsTo::Nothing | SumsTo::All => self.m,
        }
    }
    /// The rows of all `m` that `rank`'s `y` has: its shard for GEMM-ReduceScatter, else all.
    pub const fn y_rows(&self, rank: Rank) -> Range<u32> {
        match self.op.sums_to() {
            SumsTo::Rows => self.shard_rows(rank),
            SumsTo::Nothing | SumsTo::All => 0..self.m,
        }
    }
    /// The columns of all `n` that `rank` computes, in multiples of 8: its part for
    /// AllGather-GEMM, else all. The first ranks have 8 more where `n` does not divide, and 16 more
    /// with gates. Of several weights those of the first.
    ///
    /// ```
    /// use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
    /// let world = WorldSize::new(3).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 80, 64, DType::Bf16, world)?;
    /// assert_eq!([0, 1, 2].map(|rank| p.columns(Rank::new(rank))), [0..32, 32..56, 56..80]);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub const fn columns(&self, rank: Rank) -> Range<u32> {
        self.weight_columns(0, rank)
    }
    /// As [`columns`](Self::columns), of the weight with this number, counted from its own first
    /// column.
    ///
    /// # Panics
    /// If `weight` is [`MAX_WEIGHTS`] or more.
    pub const fn weight_columns(&self, weight: usize, rank: Rank) -> Range<u32> {
        if self.op.gathers() {
            self.part_of(self.weights[weight], rank)
        } else {
            0..self.weights[weight]
        }
    }
    /// The elements of all `k` that `rank` multiplies, in multiples of 8: all for AllGather-GEMM,
    /// else its part. The first ranks have 8 more where `k` does not divide.
    pub const fn inner(&self, rank: Rank) -> Range<u32> {
        if self.op.gathers() { 0..self.k } else { self.part_of(self.k, rank) }
    }
    /// Number of output columns of `rank`, of all weights.
    pub const fn n_local(&self, rank: Rank) -> u32 {
        let (mut all, mut weight) = (0, 0);
        while weight < MAX_WEIGHTS {
            let columns = self.weight_columns(weight, rank);
            all += columns.end - columns.start;
            weight += 1;
        }
        all
    }
    /// Number of [`inner`](Self::inner) elements.
    pub const fn k_local(&self, rank: Rank) -> u32 {
        let inner = self.inner(rank);
        inner.end - inner.start
    }
    /// Output columns of the rank with the most, the first.
    pub const fn n_shard(&self) -> u32 {
        self.n_local(Rank::new(0))
    }
    /// Length of the inner product of the rank with the most, the first.
    pub const fn k_shard(&self) -> u32 {
        self.k_local(Rank::new(0))
    }
    /// The rank with the least columns and the shortest inner product, the last.
    pub(crate) const fn least_rank(&self) -> Rank {
        Rank::new(self.world.peers())
    }
    /// Ranks of which every rank has the extents of one: the first, and each from which on a weight
    /// or the inner product is a group shorter.
    pub(crate) fn distinct_ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let (split, world) =
            (if self.op.reduces() { [self.k, 0, 0, 0] } else { self.weights }, self.world.get());
        let group = self.group();
        let shorter =
            split.into_iter().map(move |extent| extent / group % world).filter(|&rank| rank > 0);
        std::iter::once(0).chain(shorter).map(Rank::new)
    }
    /// Elements that stay together where an extent is split.
    const fn group(&self) -> u32 {
        if self.gated { self.numerics.gated_multiple() } else { self.numerics.row_multiple() }
    }
    /// The part of `extent` that `rank` has, in groups: the first ranks have one more.
    const fn part_of(&self, extent: u32, rank: Rank) -> Range<u32> {
        let group = self.group();
        let (world, rank, groups) = (self.world.get(), rank.get(), extent / group);
        let (each, more) = (groups / world, groups % world);
        let start = rank * each + if rank < more { rank } else { more };
        let count = each + (rank < more) as u32;
        start * group..(start + count) * group
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpKind;
    use crate::{DType, WorldSize};
    use proptest::prelude::*;

    proptest! {
        /// As `tensor_split`: sizes differ by one at most, larger ones first.
        #[test]
        fn shards_follow_each_other_and_cover_all_rows(m in 1_usize..100, world in 1_u32..=16) {
            let problem = Problem::new(
                OpKind::AllGatherGemm,
                m,
                16 * world as usize,
                8,
                DType::Bf16,
                WorldSize::new(world).unwrap(),
            )
            .unwrap();
            let mut next = 0;
            for rank in problem.world().ranks() {
                let rows = problem.shard_rows(rank);
                prop_assert_eq!(rows.start, next);
                prop_assert_eq!(
                    rows.len(),
                    m / world as usize + usize::from(rank.index() < m % world as usize)
                );
                for row in rows.clone() {
                    prop_assert_eq!(problem.owner_of(row), (rank, row - rows.start));
                }
                next = rows.end;
            }
            prop_assert_eq!(next as usize, m);
        }

        /// As rows, in groups of 8.
        #[test]
        fn columns_and_inner_elements_are_split_in_groups(
            groups in 1_u32..200,
            world in 1_u32..=16,
            op in prop::sample::select(&OpKind::ALL[..]),
        ) {
            let extent = 8 * groups.max(world);
            let problem = Problem::new(
                op,
                1,
                extent as usize,
                extent as usize,
                DType::Bf16,
                WorldSize::new(world).unwrap(),
            )
            .unwrap();
            let (mut next, groups) = (0, extent / 8);
            for rank in problem.world().ranks() {
                let (split, whole) = match op {
                    OpKind::AllGatherGemm => (problem.columns(rank), problem.inner(rank)),
                    _ => (problem.inner(rank), problem.columns(rank)),
                };
                prop_assert_eq!(whole, 0..extent);
                prop_assert_eq!(split.start, next);
                prop_assert_eq!(
                    split.len() as u32,
                    8 * (groups / world + u32::from(rank.get() < groups % world))
                );
                next = split.end;
            }
            prop_assert_eq!(next, extent);
            let elements = |rank| problem.w_shape(rank).elements() as u32;
            prop_assert!(
                problem
                    .world()
                    .ranks()
                    .all(|rank| elements(problem.least_rank()) <= elements(rank)
                        && elements(rank) <= elements(Rank::new(0)))
            );
        }
    }
}
