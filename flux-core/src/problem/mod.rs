//! The operations and their shapes.
//!
//! Invariant: every [`Problem`] is executable. Its extents are positive, and rows of operands are
//! multiples of 16 bytes, as bulk tensor loads require. Any `m` is split: the first `m % W` ranks
//! have one row more than the others. `n` or `k` is split likewise in groups that are 16 bytes, at
//! least one for each rank; `n` with gates in pairs of groups, of several weights each on its own.

mod error;
mod op_kind;
mod split;
mod weight_list;

pub use error::ProblemError;
pub use op_kind::{OpKind, SumsTo};
pub use weight_list::WeightList;

use crate::{DType, Numerics, Partials, Rank, WorldSize};
use std::fmt;

/// A row-major matrix shape, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

impl Shape {
    /// Elements of a dense operand.
    pub const fn elements(self) -> usize {
        self.rows as usize * self.cols as usize
    }
}

/// Largest extent: element indices fit 40 bits, and coordinates a positive `i32`.
pub const MAX_EXTENT: u32 = 1 << 24;

/// Most weights of an AllGather-GEMM.
pub const MAX_WEIGHTS: usize = 4;

/// The output columns of each weight as errors name them.
const COLUMNS_OF: [&str; MAX_WEIGHTS] = ["n[0]", "n[1]", "n[2]", "n[3]"];

/// One fused operation: global `m`, `n`, `k`, element types and world size.
///
/// ```
/// use flux_core::{DType, OpKind, Problem, WorldSize};
/// let world = WorldSize::new(8).unwrap();
/// let p = Problem::new(OpKind::AllGatherGemm, 8192, 49152, 12288, DType::Bf16, world)?;
/// assert_eq!((p.m_shard(), p.n_shard(), p.k_shard()), (1024, 6144, 12288));
/// # Ok::<(), flux_core::ProblemError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    op: OpKind,
    m: u32,
    n: u32,
    k: u32,
    numerics: Numerics,
    world: WorldSize,
    /// Of `n`, the output columns of each weight; 0 behind the last.
    weights: [u32; MAX_WEIGHTS],
    /// Whether `n` counts gates and ups.
    gated: bool,
}

/// Checks an extent that `parts` ranks share in groups of `multiple`. `gated`: of gates and ups.
fn check_multiple(
    name: &'static str,
    value: u32,
    multiple: u32,
    parts: u32,
    gated: bool,
) -> Result<(), ProblemError> {
    let largest = u32::MAX - u32::MAX % multiple;
    let padded = value.checked_next_multiple_of(multiple).unwrap_or(largest).max(parts * multiple);
    if !value.is_multiple_of(multiple) {
        return Err(ProblemError::Alignment { name, value, multiple, padded, gated });
    }
    if value < padded {
        let world = parts;
        return Err(ProblemError::TooSmall { name, value, multiple, world, padded, gated });
    }
    Ok(())
}

impl Problem {
    /// Checks the extents; all are global, before the split over ranks. An AllGather-GEMM has no
    /// partial sums, so their type is [`Partials::Output`] there.
    ///
    /// # Errors
    /// [`ProblemError`] names the extent, its value and the limit.
    pub fn new(
        op: OpKind,
        m: usize,
        n: usize,
        k: usize,
        numerics: impl Into<Numerics>,
        world: WorldSize,
    ) -> Result<Self, ProblemError> {
        let extent = |name, value: usize| match u32::try_from(value) {
            Ok(0) => Err(ProblemError::Zero { name }),
            Ok(v) if v <= MAX_EXTENT => Ok(v),
            _ => Err(ProblemError::TooLarge { name, value }),
        };
        let (m, n, k) = (extent("m", m)?, extent("n", n)?, extent("k", k)?);
        let (w, numerics) = (world.get(), numerics.into());
        if !numerics.is_supported() {
            return Err(ProblemError::Numerics { numerics });
        }
        let (n_parts, k_parts) = if op.gathers() { (w, 1) } else { (1, w) };
        for (name, value, parts) in [("n", n, n_parts), ("k", k, k_parts)] {
            check_multiple(name, value, numerics.row_multiple(), parts, false)?;
        }
        let mut weights = [0; MAX_WEIGHTS];
        weights[0] = n;
        let problem = Self { op, m, n, k, numerics, world, weights, gated: false };
        Ok(problem.with_partials(numerics.partials))
    }

    /// The same AllGather-GEMM with gates: `n` counts gates and ups, so `y` has half as many
    /// columns. `n` is split over the ranks in [groups](Numerics::gated_multiple) of gates and ups.
    /// Another op has none, and stays as it is.
    ///
    /// ```
    /// use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
    /// let world = WorldSize::new(3).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 80, 64, DType::Bf16, world)?.with_gates()?;
    /// assert_eq!([0, 1, 2].map(|rank| p.n_local(Rank::new(rank))), [32, 32, 16]);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// [`ProblemError`]: `n` has no whole group for each rank, or is of several weights.
    pub fn with_gates(self) -> Result<Self, ProblemError> {
        if self.op.reduces() {
            return Ok(self);
        }
        if self.weight_count() > 1 {
            return Err(ProblemError::OneWeight { what: "an op with gates" });
        }
        Self::check_gates(self.op, self.n, self.numerics, self.world)?;
        Ok(Self { gated: true, ..self })
    }

    /// Refuses `n` that no problem of `op` with gates has.
    ///
    /// # Errors
    /// As [`with_gates`](Self::with_gates).
    pub fn check_gates(
        op: OpKind,
        n: u32,
        numerics: Numerics,
        world: WorldSize,
    ) -> Result<(), ProblemError> {
        if op.reduces() {
            return Ok(());
        }
        check_multiple("n", n, numerics.gated_multiple(), world.get(), true)
    }

    /// The same AllGather-GEMM with several weights, which share the gathered rows. `columns` has
    /// the output columns of each, `n` in all. Each weight is split over the ranks on its own.
    ///
    /// ```
    /// use flux_core::{DType, OpKind, Problem, Rank, WorldSize};
    /// let world = WorldSize::new(2).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 96, 64, DType::Bf16, world)?
    ///     .with_weights(&[64, 16, 16])?;
    /// let columns = [0, 1, 2].map(|weight| p.weight_columns(weight, Rank::new(1)));
    /// assert_eq!(columns, [32..64, 8..16, 8..16]);
    /// assert_eq!(p.n_local(Rank::new(1)), 48);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// [`ProblemError`] names the weight, its columns and the limit.
    pub fn with_weights(self, columns: &[u32]) -> Result<Self, ProblemError> {
        Self::check_weights(self.op, columns, self.numerics, self.world)?;
        if columns.len() > 1 && self.gated {
            return Err(ProblemError::OneWeight { what: "an op with gates" });
        }
        let sum = columns.iter().map(|&n| u64::from(n)).sum();
        if sum != u64::from(self.n) {
            return Err(ProblemError::Columns { n: self.n, sum });
        }
        let mut weights = [0; MAX_WEIGHTS];
        weights[..columns.len()].copy_from_slice(columns);
        Ok(Self { weights, ..self })
    }

    /// Refuses columns that no problem of `op` has, whatever their sum.
    ///
    /// # Errors
    /// As [`with_weights`](Self::with_weights).
    pub fn check_weights(
        op: OpKind,
        columns: &[u32],
        numerics: Numerics,
        world: WorldSize,
    ) -> Result<(), ProblemError> {
        if columns.is_empty() || columns.len() > MAX_WEIGHTS {
            return Err(ProblemError::Weights { count: columns.len() });
        }
        if columns.len() > 1 && op.reduces() {
            return Err(ProblemError::OneWeight { what: "an op that sums over the ranks" });
        }
        let ranks = if op.reduces() { 1 } else { world.get() };
        COLUMNS_OF.into_iter().zip(columns).try_for_each(|(name, &n)| {
            check_multiple(name, n, numerics.row_multiple(), ranks, false)
        })
    }

    /// The same problem with partial sums of this type. An AllGather-GEMM has none, and stays as it
    /// is.
    #[must_use]
    pub const fn with_partials(self, partials: Partials) -> Self {
        let partials = if self.op.reduces() { partials } else { Partials::Output };
        Self { numerics: self.numerics.with_partials(partials), ..self }
    }

    /// The same layer with `m` rows.
    ///
    /// # Errors
    /// As [`new`](Self::new), of `m`.
    pub fn with_m(&self, m: u32) -> Result<Self, ProblemError> {
        let problem = Self::new(
            self.op,
            m as usize,
            self.n as usize,
            self.k as usize,
            self.numerics,
            self.world,
        )?;
        Ok(Self { m: problem.m, ..*self })
    }

    /// The operation.
    pub const fn op(&self) -> OpKind {
        self.op
    }
    /// Global rows.
    pub const fn m(&self) -> u32 {
        self.m
    }
    /// Global output columns.
    pub const fn n(&self) -> u32 {
        self.n
    }
    /// Global length of the inner product.
    pub const fn k(&self) -> u32 {
        self.k
    }
    /// Element types.
    pub const fn numerics(&self) -> Numerics {
        self.numerics
    }
    /// Element type of what a library's collective carries: gathered operands, or outputs' sums.
    pub const fn collective_dtype(&self) -> DType {
        if self.op.reduces() { self.numerics.output } else { self.numerics.operand }
    }
    /// Number of ranks.
    pub const fn world(&self) -> WorldSize {
        self.world
    }
    /// Number of weights: 1, or those of [`with_weights`](Self::with_weights).
    pub const fn weight_count(&self) -> usize {
        let mut count = 1;
        while count < MAX_WEIGHTS && self.weights[count] > 0 {
            count += 1;
        }
        count
    }
    /// The same call of one of its weights alone.
    ///
    /// # Panics
    /// If there are no more than `weight` weights.
    #[must_use]
    pub fn weight_alone(&self, weight: usize) -> Self {
        let n = self.weights()[weight];
        let mut weights = [0; MAX_WEIGHTS];
        weights[0] = n;
        Self { n, weights, ..*self }
    }
    /// Output columns of each weight, all global.
    pub fn weights(&self) -> &[u32] {
        &self.weights[..self.weight_count()]
    }
    /// Shape of `rank`'s `x`: `[m_r, k]` for AllGather-GEMM, `[m, k_r]` for the others.
    pub fn x_shape(&self, rank: Rank) -> Shape {
        if self.op.gathers() {
            Shape { rows: self.shard_rows(rank).len() as u32, cols: self.k }
        } else {
            Shape { rows: self.m, cols: self.k_local(rank) }
        }
    }
    /// Elements of a row of `x` as it is gathered: its `k`, and of 8-bit operands its scales, which
    /// lie behind it.
    pub const fn gathered_columns(&self) -> u32 {
        self.k + self.numerics.scales.bytes_behind_row(self.k)
    }
    /// Whether rows of `x` have scales of their own.
    pub const fn rows_carry_scales(&self) -> bool {
        self.numerics.scales.bytes_behind_row(self.k) > 0
    }
    /// Bytes of a gathered row.
    pub const fn gathered_row_bytes(&self) -> u64 {
        self.gathered_columns() as u64 * self.numerics.operand.bytes() as u64
    }
    /// Shape of `rank`'s `w`: `[n_r, k]` for AllGather-GEMM, `[n, k_r]` for the others.
    pub const fn w_shape(&self, rank: Rank) -> Shape {
        Shape { rows: self.n_local(rank), cols: self.k_local(rank) }
    }
    /// Shape of `rank`'s `y`: `[m, n_r]` for AllGather-GEMM, `[m_r, n]` for GEMM-ReduceScatter,
    /// `[m, n]` for GEMM-AllReduce.
    pub fn y_shape(&self, rank: Rank) -> Shape {
        match self.op.sums_to() {
            SumsTo::Nothing | SumsTo::All => Shape { rows: self.m, cols: self.n_local(rank) },
            SumsTo::Rows => Shape { rows: self.shard_rows(rank).len() as u32, cols: self.n },
        }
    }
    /// Floating-point operations of the rank with the most; a multiply and an add count as two.
    /// Saturates.
    pub const fn flop_per_rank(&self) -> u64 {
        (2 * self.m as u64 * self.n_shard() as u64).saturating_mul(self.k_shard() as u64)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} m={} n={}", self.op, self.m, self.weights[0])?;
        self.weights()[1..].iter().try_for_each(|n| write!(f, "+{n}"))?;
        write!(f, " k={} {} tp={}", self.k, self.numerics, self.world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Following each error's advice leads to a valid problem.
        #[test]
        fn advised_values_pass_every_check(
            extents in prop::array::uniform3(1_usize..200),
            op in prop::sample::select(&OpKind::ALL[..]),
            world in 1_u32..=16,
        ) {
            let build = |[m, n, k]: [usize; 3]| {
                Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).unwrap())
            };
            let mut advised = extents;
            for at in 0..3 {
                match build(advised) {
                    Err(
                        ProblemError::TooSmall { name, padded, .. }
                        | ProblemError::Alignment { name, padded, .. },
                    ) => {
                        let wrong =
                            ["m", "n", "k"].iter().position(|&extent| extent == name).unwrap();
                        prop_assert!(
                            wrong >= at && padded as usize > advised[wrong],
                            "{name} is wrong again: {advised:?}"
                        );
                        advised[wrong] = padded as usize;
                    }
                    built => prop_assert!(built.is_ok(), "{built:?}"),
                }
            }
            prop_assert!(build(advised).is_ok(), "{extents:?} -> {advised:?}");
        }
    }

    #[test]
    fn operations_of_the_largest_problem_are_a_number() {
        let most = MAX_EXTENT as usize;
        let problem = Problem::new(
            OpKind::GemmReduceScatter,
            most,
            most,
            most,
            DType::Bf16,
            WorldSize::new(1).unwrap(),
        )
        .unwrap();
        assert_eq!(problem.flop_per_rank(), u64::MAX);
    }

    #[test]
    fn errors_name_a_global_value_that_is_valid() {
        let error = |op, [m, n, k]: [usize; 3]| {
            Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(3).unwrap())
                .unwrap_err()
                .to_string()
        };
        let aligned = "is not a multiple of 8: rows of 16-byte multiples are required; pad";
        assert_eq!(
            error(OpKind::AllGatherGemm, [3, 50_257, 8]),
            format!("n = 50257 {aligned} n with zeros to 50264")
        );
        assert_eq!(
            error(OpKind::AllGatherGemm, [3, 17, 8]),
            format!("n = 17 {aligned} n with zeros to 24")
        );
        assert_eq!(
            error(OpKind::GemmReduceScatter, [2, 12, 16]),
            format!("n = 12 {aligned} n with zeros to 16")
        );
        assert_eq!(
            error(OpKind::GemmReduceScatter, [2, 8, 42]),
            format!("k = 42 {aligned} k with zeros to 48")
        );
        let small = "is too small for 3 ranks of at least 8 each: pad";
        assert_eq!(
            error(OpKind::AllGatherGemm, [3, 16, 8]),
            format!("n = 16 {small} n with zeros to 24")
        );
        assert_eq!(
            error(OpKind::GemmAllReduce, [3, 8, 8]),
            format!("k = 8 {small} k with zeros to 24")
        );
        let large = "= 16777224 is above the limit 16777216: split the";
        assert_eq!(
            error(OpKind::AllGatherGemm, [16_777_224, 24, 8]),
            format!("m {large} rows over several calls")
        );
        assert_eq!(
            error(OpKind::AllGatherGemm, [3, 16_777_224, 8]),
            format!("n {large} layer over several ops")
        );
    }
}
