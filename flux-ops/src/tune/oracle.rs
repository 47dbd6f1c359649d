//! What a result must be at sampled rows and columns, in fp64.
//!
//! Invariant: nothing comes from what is checked. Operands are generated anew, and the tolerance of
//! an element follows from its own terms.
//!
//! `u` is the type's unit roundoff, `p_s` the partial sum of rank `s`, and `A` the sum of the
//! terms' absolute values. A partial sum is rounded `r` times on its way:
//!
//! ```text
//! E = r u sum |p_s| + (sqrt(k) + W) eps_f32 A + c A  partials on their way, accumulation in fp32
//! |y - sum p_s| <= E + u (|sum p_s| + E)             and the output's own rounding
//! ```
//!
//! `c`, of 8-bit operands alone, is [`accumulation_error`].
//!
//! `sqrt(k)`: Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019.

use flux_core::plan::CommMode;
use flux_core::{Problem, Rank};
use flux_kernels::Element;
use flux_kernels::harness::data::{self, y_window};
use flux_kernels::harness::scaled::{Generator, rows_of_w, rows_of_x};
use flux_kernels::harness::{Fill, accumulation_error};

/// Rows and columns that are sampled: one of each tile of 128 up to 8192.
const SAMPLES: u32 = 64;
/// Seeds of the global `x` and `w`.
pub(super) const SEEDS: [u64; 2] = [0x5EED_F10C, 0x5EED_F10D];

/// Sampled elements of one rank's output.
pub(super) struct Oracle {
    problem: Problem,
    /// Columns of the rank's `y`.
    columns: usize,
    rows: Vec<u32>,
    cols: Vec<u32>,
    /// Row by row.
    expected: Vec<Expected>,
}

struct Expected {
    sum: f64,
    /// Sum of the partial sums' absolute values.
    partials: f64,
    /// Sum of the products' absolute values.
    absolute: f64,
}

impl Oracle {
    pub(super) fn new<X: Element>(problem: &Problem, rank: Rank) -> Self {
        let window = y_window(problem, rank);
        let (rows, cols) = (sampled(window.rows), sampled(window.cols));
        let [of_x, of_w] = generators();
        let x: Vec<_> =
            rows.iter().map(|row| rows_of_x::<X>(problem, of_x, window.row0 + row, 1)).collect();
        let w: Vec<_> =
            cols.iter().map(|col| rows_of_w::<X>(problem, of_w, window.col0 + col, 1)).collect();
        let sources: Vec<_> =
            if problem.op().reduces() { problem.world().ranks().collect() } else { vec![rank] };
        let parts: Vec<_> = sources
            .into_iter()
            .map(|source| problem.inner(source))
            .map(|k| k.start as usize..k.end as usize)
            .collect();
        let element = |x: &[f32], w: &[f32]| {
            let mut all = Expected { sum: 0.0, partials: 0.0, absolute: 0.0 };
            for (sum, absolute) in parts.iter().map(|part| dot(&x[part.clone()], &w[part.clone()]))
            {
                all.sum += sum;
                all.partials += sum.abs();
                all.absolute += absolute;
            }
            all
        };
        let expected = x.iter().flat_map(|x| w.iter().map(|w| element(x, w))).collect();
        Self { problem: *problem, columns: window.cols as usize, rows, cols, expected }
    }

    /// Checks a rank's whole output, dense: every element is a number, the sampled ones are right.
    ///
    /// # Errors
    /// The first wrong element, in words.
    pub(super) fn check<T: Element>(&self, y: &[T], comm: CommMode) -> Result<(), String> {
        let columns = self.columns;
        if let Some(at) = y.iter().position(|y| y.to_f32().is_nan()) {
            return Err(format!(
                "row {}, column {} of y was not written",
                at / columns,
                at % columns
            ));
        }
        let (world, numerics) = (f64::from(self.problem.world().get()), self.problem.numerics());
        let unit = numerics.output.unit_roundoff();
        // At its source and in its node; a library's collective may round each sum on its way.
        let roundings = if comm == CommMode::Sequential { world } else { 2.0 };
        let sent = roundings * numerics.partial_roundoff();
        let in_fp32 = (f64::from(self.problem.k()).sqrt() + world) * f64::from(f32::EPSILON);
        let accumulated = in_fp32 + accumulation_error(&self.problem);
        let places = self.rows.iter().flat_map(|&row| self.cols.iter().map(move |&col| (row, col)));
        for ((row, col), expected) in places.zip(&self.expected) {
            let found = f64::from(y[row as usize * columns + col as usize].to_f32());
            let before = sent * expected.partials + accumulated * expected.absolute;
            let bound = before + unit * (expected.sum.abs() + before);
            if (found - expected.sum).abs() > bound {
                return Err(format!(
                    "row {row}, column {col} of y is {found}, and {} within {bound:.2e} is right",
                    expected.sum
                ));
            }
        }
        Ok(())
    }
}

/// So many places of `0..extent`, evenly spread, none at the same place of its tile.
fn sampled(extent: u32) -> Vec<u32> {
    let count = extent.min(SAMPLES);
    let place = |i: u32| {
        let [first, end] =
            [i, i + 1].map(|i| (u64::from(i) * u64::from(extent) / u64::from(count)) as u32);
        first + data::raw(0, i, extent) % (end - first)
    };
    (0..count).map(place).collect()
}

/// Of the global `x` and `w`.
fn generators() -> [Generator; 2] {
    SEEDS.map(|seed| Generator { fill: Fill::Uniform, seed })
}

/// Sum of products and of their absolute values. Products of two 11-bit significands are exact in
/// fp32, and those of codes with scales.
fn dot(x: &[f32], w: &[f32]) -> (f64, f64) {
    let products = x.iter().zip(w).map(|(x, w)| f64::from(x * w));
    (products.clone().sum(), products.map(f64::abs).sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::plan::Mover;
    use flux_core::{OpKind, WorldSize};
    use half::bf16;

    const FUSED: CommMode = CommMode::Fused { mover: Mover::Kernel };

    fn right(problem: &Problem, rank: Rank) -> Vec<bf16> {
        let window = y_window(problem, rank);
        let [of_x, of_w] = generators();
        let x = rows_of_x::<bf16>(problem, of_x, window.row0, window.rows);
        let w = rows_of_w::<bf16>(problem, of_w, window.col0, window.cols);
        let (x, k) = (x.chunks_exact(problem.k() as usize), problem.k() as usize);
        x.flat_map(|x| w.chunks_exact(k).map(|w| bf16::from_f64(dot(x, w).0))).collect()
    }

    #[test]
    fn right_results_pass_and_a_missing_partial_sum_or_element_does_not() {
        for (op, rank) in
            [(OpKind::AllGatherGemm, 1), (OpKind::GemmReduceScatter, 0), (OpKind::GemmAllReduce, 1)]
        {
            let (problem, rank) = (
                Problem::new(op, 80, 72, 264, bf16::DTYPE, WorldSize::new(2).unwrap()).unwrap(),
                Rank::new(rank),
            );
            let (oracle, y) = (Oracle::new::<bf16>(&problem, rank), right(&problem, rank));
            for comm in [FUSED, CommMode::Sequential] {
                oracle.check(&y, comm).unwrap();
                let halves: Vec<_> = y.iter().map(|y| bf16::from_f32(y.to_f32() / 2.0)).collect();
                assert!(oracle.check(&halves, comm).unwrap_err().contains("is right"), "{op}");
            }
            let mut missing = y.clone();
            let last = missing.len() - 1;
            missing[last] = bf16::NAN;
            let columns = problem.n_local(rank) as usize;
            assert_eq!(
                oracle.check(&missing, FUSED),
                Err(format!("row {}, column {} of y was not written", last / columns, columns - 1))
            );
        }
    }

    #[test]
    fn every_tile_of_128_is_sampled_up_to_8192() {
        for extent in [1, 63, 64, 65, 1000, 8192] {
            let places = sampled(extent);
            assert!(places.is_sorted() && *places.last().unwrap() < extent);
            assert!(
                (0..extent.div_ceil(128))
                    .all(|tile| places.iter().any(|place| place / 128 == tile)),
                "{extent}: {places:?}"
            );
        }
    }
}
