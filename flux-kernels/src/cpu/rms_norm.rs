//! RMSNorm of finished rows.

use super::operands::{Rows, RowsMut};
use crate::element::Element;

/// Partial sums of a row's squares, as many as processors add side by side.
const LANES: usize = 8;

/// Writes `out = y / sqrt(mean(y^2) + eps) * gain` for each row of `y`, in fp32, rounded once. Rows
/// have as many columns as `gain`.
///
/// # Panics
/// If `y` or `out` has less than `rows` rows of them.
pub fn rms_norm<T: Element>(
    y: Rows<'_, T>,
    gain: &[T],
    eps: f32,
    rows: usize,
    out: RowsMut<'_, T>,
) {
    let RowsMut { elements: out, stride } = out;
    let cols = gain.len();
    let (mut wide, mut gains) = (vec![0.0_f32; cols], vec![0.0_f32; cols]);
    T::widen(gain, &mut gains);
    for row in 0..rows {
        T::widen(y.row(row, cols), &mut wide);
        let mut squares = [0.0_f32; LANES];
        for lanes in wide.chunks(LANES) {
            for (sum, v) in squares.iter_mut().zip(lanes) {
                *sum = v.mul_add(*v, *sum);
            }
        }
        let scale = (squares.iter().sum::<f32>() / cols as f32 + eps).sqrt().recip();
        for (v, gain) in wide.iter_mut().zip(&gains) {
            *v = *v * scale * gain;
        }
        T::narrow(&wide, &mut out[row * stride..][..cols]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn rows_are_normalised_and_gaps_stay() {
        let y = [3.0, 4.0, 0.0, 0.0, 9.0, -1.0, 1.0, -1.0, 1.0].map(f16::from_f32);
        let gain = [1.0, 2.0, 3.0, -4.0].map(f16::from_f32);
        let mut out = [f16::NAN; 10];
        rms_norm(
            Rows { elements: &y, stride: 5 },
            &gain,
            0.0,
            2,
            RowsMut { elements: &mut out, stride: 6 },
        );
        let found = out.map(f16::to_f32);
        assert_eq!(found[..4], [1.2, 3.2, 0.0, 0.0].map(|v| f16::from_f32(v).to_f32()));
        assert_eq!(found[6..], [-1.0, 2.0, -3.0, -4.0]);
        assert!(found[4].is_nan() && found[5].is_nan());
    }

    #[test]
    fn a_row_of_zeros_needs_eps() {
        let (y, gain) = ([f16::ZERO; 8], [f16::ONE; 8]);
        let norm = |eps| {
            let mut out = [f16::ONE; 8];
            rms_norm(
                Rows { elements: &y, stride: 8 },
                &gain,
                eps,
                1,
                RowsMut { elements: &mut out, stride: 8 },
            );
            out
        };
        assert!(norm(1e-5).iter().all(|v| *v == f16::ZERO) && norm(0.0).iter().all(|v| v.is_nan()));
    }
}
