//! Operand data as a function of position: a hash of seed, row and column.
//!
//! Invariant: [`raw`] equals its counterpart in `cuda/harness/data.cuh` bit for bit, so any rank
//! can generate any part of any rank's operand. The ranks' windows of `y` tile the global `[m, n]`
//! output, but those of a GEMM-AllReduce, each of which is all of it. Their windows of `x` tile
//! `[m, k]` and those of `w` `[n, k]`.

use super::Fill;
use crate::Element;
use flux_core::{Problem, Rank};

pub use crate::abi::RAW_END;
/// Below this [`Fill::SmallInts`] yields -1, and as far from the end +1: one in six each.
const SIXTH: u32 = RAW_END / 6;

/// 24 random bits of the element at (`row`, `col`): splitmix64's finaliser over `seed ^ (row << 32
/// | col)`.
///
/// Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
/// constants of Stafford's variant 13.
pub const fn raw(seed: u64, row: u32, col: u32) -> u32 {
    let mut z = seed ^ ((row as u64) << 32 | col as u64);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 40) as u32
}

/// The element at (`row`, `col`), before it is rounded to an element type.
pub fn value(fill: Fill, seed: u64, row: u32, col: u32) -> f32 {
    let r = raw(seed, row, col);
    match fill {
        Fill::Uniform => r as f32 / (RAW_END / 2) as f32 - 1.0,
        Fill::SmallInts => f32::from(i8::from(r >= RAW_END - SIXTH) - i8::from(r < SIXTH)),
    }
}

/// A window of a global matrix: where a rank's part of an operand lies in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First global row.
    pub row0: u32,
    /// First global column.
    pub col0: u32,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
}

/// Writes a window's elements, rounded to `T`, densely to `to`.
///
/// # Panics
/// When `to` does not hold exactly the window's elements.
pub fn fill<T: Element>(to: &mut [T], window: Window, seed: u64, fill: Fill) {
    assert_eq!(to.len(), window.rows as usize * window.cols as usize, "{window:?}");
    for (row, line) in (window.row0..).zip(to.chunks_exact_mut(window.cols as usize)) {
        for (col, element) in (window.col0..).zip(line) {
            *element = T::from_f32(value(fill, seed, row, col));
        }
    }
}

/// A seed for one operand of one call, far from all others: `stream` numbers operands, `call`
/// calls.
pub const fn seed(base: u64, stream: u32, call: u64) -> u64 {
    let z = base
        ^ (stream as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ call.wrapping_mul(0xd1b5_4a32_d192_ed03);
    let z = (z ^ (z >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 29)
}

/// What of the global `[m, k]` matrix is `rank`'s `x`.
pub fn x_window(problem: &Problem, rank: Rank) -> Window {
    let shape = problem.x_shape(rank);
    let (row0, col0) = if problem.op().gathers() {
        (problem.shard_rows(rank).start, 0)
    } else {
        (0, problem.inner(rank).start)
    };
    Window { row0, col0, rows: shape.rows, cols: shape.cols }
}

/// What of the global `[n, k]` matrix is `rank`'s `w`.
pub fn w_window(problem: &Problem, rank: Rank) -> Window {
    let shape = problem.w_shape(rank);
    Window {
        row0: problem.columns(rank).start,
        col0: problem.inner(rank).start,
        rows: shape.rows,
        cols: shape.cols,
    }
}

/// What of the global `[m, n]` matrix is `rank`'s `y`.
pub fn y_window(problem: &Problem, rank: Rank) -> Window {
    let shape = problem.y_shape(rank);
    let (row0, col0) = if problem.op().gathers() {
        (0, problem.columns(rank).start)
    } else {
        (problem.y_rows(rank).start, 0)
    };
    Window { row0, col0, rows: shape.rows, cols: shape.cols }
}

/// Elements of a window.
pub const fn elements(window: Window) -> usize {
    window.rows as usize * window.cols as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::OpKind;
    use flux_core::{DType, WorldSize};
    use half::bf16;

    #[test]
    fn hash_is_the_documented_one() {
        // Values of an independent implementation, in Python with integers masked to 64 bits.
        let expected =
            [(0, 0, 0, 0), (1, 2, 3, 8_846_944), (0x0123_4567_89ab_cdef, 8191, 49151, 1_115_871)];
        for (seed, row, col, want) in expected {
            assert_eq!(raw(seed, row, col), want, "seed {seed:#x} row {row} col {col}");
        }
    }

    #[test]
    fn uniform_values_fill_minus_one_to_one_evenly() {
        let n = 1 << 16;
        let values: Vec<f64> =
            (0..n).map(|i| f64::from(value(Fill::Uniform, 7, i / 256, i % 256))).collect();
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let variance = values.iter().map(|v| v * v).sum::<f64>() / f64::from(n);
        assert!(values.iter().all(|v| (-1.0..1.0).contains(v)));
        // Standard errors of mean and variance of 65536 samples are 0.0023 and 0.0012: five of
        // each.
        assert!(
            mean.abs() < 0.012 && (variance - 1.0 / 3.0).abs() < 0.006,
            "mean {mean}, variance {variance}"
        );
    }

    #[test]
    fn small_ints_have_the_documented_frequencies() {
        let n = 1 << 16;
        let ints: Vec<f32> = (0..n).map(|i| value(Fill::SmallInts, 9, i / 256, i % 256)).collect();
        let count = |want: f32| {
            ints.iter().filter(|v| v.to_bits() == want.to_bits()).count() as f64 / f64::from(n)
        };
        // Standard error at most 0.0019: five of it.
        for (want, share) in [(-1.0, 1.0 / 6.0), (0.0, 2.0 / 3.0), (1.0, 1.0 / 6.0)] {
            assert!((count(want) - share).abs() < 0.0095, "{want}: {}", count(want));
        }
    }

    #[test]
    fn a_window_equals_the_same_part_of_the_whole() {
        let whole_window = Window { row0: 0, col0: 0, rows: 12, cols: 20 };
        let mut whole = vec![bf16::ZERO; 12 * 20];
        fill(&mut whole, whole_window, 5, Fill::Uniform);
        let mut part = vec![bf16::ZERO; 3 * 8];
        fill(&mut part, Window { row0: 4, col0: 8, rows: 3, cols: 8 }, 5, Fill::Uniform);
        for row in 0..3 {
            assert_eq!(part[row * 8..][..8], whole[(4 + row) * 20 + 8..][..8]);
        }
    }

    #[test]
    fn seeds_of_operands_and_calls_differ() {
        let mut seeds: Vec<u64> =
            (0..4).flat_map(|s| (0..1000).map(move |c| seed(42, s, c))).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 4000);
    }

    type Part = (fn(&Problem, Rank) -> Window, u32, u32);

    #[test]
    fn windows_of_all_ranks_tile_the_global_matrices() {
        for op in OpKind::ALL {
            let problem =
                Problem::new(op, 12, 56, 80, DType::Bf16, WorldSize::new(3).unwrap()).unwrap();
            let parts: [Part; 3] = [(x_window, 12, 80), (w_window, 56, 80), (y_window, 12, 56)];
            for (at, (window, rows, cols)) in parts.into_iter().enumerate() {
                let times = if op == OpKind::GemmAllReduce && at == 2 { 3 } else { 1 };
                let mut seen = vec![0; rows as usize * cols as usize];
                for w in problem.world().ranks().map(|r| window(&problem, r)) {
                    for row in w.row0..w.row0 + w.rows {
                        for col in w.col0..w.col0 + w.cols {
                            seen[row as usize * cols as usize + col as usize] += 1;
                        }
                    }
                }
                assert!(seen.iter().all(|&n| n == times), "{op} {rows} x {cols}");
            }
        }
    }
}
