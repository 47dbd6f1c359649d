//! How `1..=max_m` is cut into buckets, each with one plan.
//!
//! Invariant: the ends ascend and the last one is `max_m`, so each `m` has one bucket: that of the
//! first end that is not smaller.

use super::{PlanKey, PlanTable};

/// The last `m` of each bucket of `1..=max_m`: powers of two and the points between them.
///
/// `max_m` and the `m` of each row that `tables` have of the layer end a bucket, too.
///
/// ```
/// use flux_core::plan::{PlanKey, bucket_ends};
/// use flux_core::tile::Generation;
/// use flux_core::{DType, OpKind, Problem, WorldSize};
/// let world = WorldSize::new(4).unwrap();
/// let p = Problem::new(OpKind::AllGatherGemm, 100, 1024, 1024, DType::Bf16, world)?;
/// let key = PlanKey::new(&p, "host", Generation::Hopper, "host", "host");
/// let ends = bucket_ends(p.m(), &key, &[]);
/// assert_eq!(ends, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]);
/// # Ok::<(), flux_core::ProblemError>(())
/// ```
pub fn bucket_ends(max_m: u32, key: &PlanKey, tables: &[&PlanTable]) -> Vec<u32> {
    let grid = (0..31).flat_map(|power| [1_u32 << power, (1 << power) + (1 << power) / 2]);
    let measured = tables.iter().flat_map(|table| table.measured_m(key, max_m));
    let mut ends: Vec<u32> =
        grid.take_while(|&end| end < max_m).chain(measured).chain([max_m]).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanRow;
    use crate::{DType, OpKind, Problem, TileShape, WorldSize};

    fn key(world: u32, n: usize) -> PlanKey {
        let world = WorldSize::new(world).unwrap();
        let problem = Problem::new(
            OpKind::GemmReduceScatter,
            world.index(),
            n,
            64 * world.index(),
            DType::Bf16,
            world,
        )
        .unwrap();
        PlanKey::new(&problem, "GPU", crate::tile::Generation::Hopper, "any", "nvlink")
    }

    #[test]
    fn buckets_end_at_powers_of_two_between_them_and_at_the_last() {
        let ends = |max_m, world| bucket_ends(max_m, &key(world, 64), &[]);
        assert_eq!(ends(1, 1), [1]);
        assert_eq!(ends(24, 1), [1, 2, 3, 4, 6, 8, 12, 16, 24]);
        assert_eq!(ends(25, 1), [1, 2, 3, 4, 6, 8, 12, 16, 24, 25]);
        assert_eq!(ends(5, 3), [1, 2, 3, 4, 5]);
        assert_eq!(ends(1 << 24, 1).len(), 48);
    }

    #[test]
    fn measured_rows_of_the_layer_end_buckets_too() {
        let mut table = PlanTable::default();
        for (n, m) in [(64, 10), (64, 16), (64, 100), (128, 11)] {
            table.set(PlanRow {
                key: key(1, n),
                m,
                plan: super::super::Plan::of(TileShape::new(128, 128, 64)),
                us: 1.0,
            });
        }
        assert_eq!(bucket_ends(16, &key(1, 64), &[&table]), [1, 2, 3, 4, 6, 8, 10, 12, 16]);
    }
}
