//! Rows of 16-bit elements as 8-bit operands with scales.
//!
//! Invariant: the bits are those of the CUDA kernel. Squares are added in the order of its threads;
//! divisions and roots round to nearest on both.

use super::operands::{Rows, RowsMut};
use crate::element::{E4M3_MOST, Element, LEAST_SCALE};
use bytemuck::Zeroable;
use float8::F8E4M3;
use flux_core::Scales;

/// Most threads of the kernel's CTA, and those of a warp.
const THREADS: usize = 512;
const WARP: usize = 32;
/// Elements of a thread's vector.
const VECTOR: usize = 8;

/// An RMSNorm of rows before they are quantised: a gain for each column, and what is added to the
/// mean of squares.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a, T> {
    /// One element for each column.
    pub gain: &'a [T],
    /// Added to the mean of squares.
    pub eps: f32,
}

/// Writes rows of `cols` elements as E4M3, and scales: to `out_scale`, `[groups, rows]`, or behind
/// each row ([`Scales::bytes_behind_row`]).
///
/// A scale is the largest magnitude of the row, or of 128 elements of it, divided by 448, and the
/// least normal number at least. A code is the element times the scale's reciprocal, rounded to
/// nearest even, 448 at most. A NaN stays one. An infinity makes its scale infinite, and all that
/// share it NaN. With `given`, the scale of a tensor, no scale is written, and infinities become
/// NaN. All is computed in fp32, from the rows as a norm leaves them, unrounded.
///
/// # Panics
/// If a row, `gain` or `out_scale` has less elements, or there is no `given` for the scale of a
/// tensor.
pub fn quantize<T: Element>(
    x: Rows<'_, T>,
    (rows, cols): (usize, usize),
    norm: Option<Norm<'_, T>>,
    (scales, given): (Scales, Option<f32>),
    out: RowsMut<'_, F8E4M3>,
    mut out_scale: Option<RowsMut<'_, f32>>,
) {
    let RowsMut { elements: out, stride } = out;
    let group = scales.along_k().map_or(cols, |elements| elements as usize);
    let (mut wide, mut gains) = (vec![0.0_f32; cols], vec![0.0_f32; cols]);
    if let Some(norm) = norm {
        T::widen(&norm.gain[..cols], &mut gains);
    }
    for row in 0..rows {
        T::widen(x.row(row, cols), &mut wide);
        if let Some(norm) = norm {
            normalise(&mut wide, &gains, norm.eps);
        }
        let (codes, behind) = out[row * stride..].split_at_mut(cols);
        if scales == Scales::Tensor {
            let given = given.expect("the scale of a tensor is given");
            encode(&wide, given, codes);
            continue;
        }
        if out_scale.is_none() {
            behind[..scales.bytes_behind_row(cols as u32) as usize].fill(F8E4M3::zeroed());
        }
        for (at, (wide, codes)) in wide.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let most = wide.iter().fold(0.0_f32, |most, v| most.max(v.abs()));
            let scale = (most / E4M3_MOST).max(LEAST_SCALE);
            encode(wide, scale, codes);
            if let Some(RowsMut { elements, stride }) = &mut out_scale {
                elements[at * *stride + row] = scale;
            } else {
                let place = &mut behind[at * size_of::<f32>()..][..size_of::<f32>()];
                place.copy_from_slice(&scale.to_le_bytes().map(F8E4M3::from_bits));
            }
        }
    }
}

fn encode(wide: &[f32], scale: f32, codes: &mut [F8E4M3]) {
    let reciprocal = scale.max(LEAST_SCALE).recip();
    for (code, v) in codes.iter_mut().zip(wide) {
        *code =
            if v.is_finite() { F8E4M3::from_f32(v * reciprocal) } else { F8E4M3::from_bits(0x7f) };
    }
}

/// `v / sqrt(mean(v^2) + eps) * gain`, with the sums of the kernel's threads and warps.
fn normalise(v: &mut [f32], gains: &[f32], eps: f32) {
    let threads = (v.len() / VECTOR).next_multiple_of(WARP).clamp(WARP, THREADS);
    let mut sums = [0.0_f32; THREADS];
    for (vector, elements) in v.chunks(VECTOR).enumerate() {
        let sum = &mut sums[vector % threads];
        *sum = elements.iter().fold(*sum, |sum, v| v.mul_add(*v, sum));
    }
    let mut warps = [0.0_f32; WARP];
    for (sum, lanes) in warps.iter_mut().zip(sums[..threads].chunks_exact_mut(WARP)) {
        *sum = sum_of_lanes(lanes);
    }
    let scale = (sum_of_lanes(&mut warps) / v.len() as f32 + eps).sqrt().recip();
    for (v, gain) in v.iter_mut().zip(gains) {
        *v = *v * scale * gain;
    }
}

/// As lanes that exchange their sums over half the distance each time.
fn sum_of_lanes(lanes: &mut [f32]) -> f32 {
    let mut half = lanes.len() / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// Quantised dense rows: codes, and the scale of each element.
    fn quantized<T: Element>(
        x: &[T],
        cols: usize,
        scales: Scales,
        given: Option<f32>,
    ) -> (Vec<F8E4M3>, Vec<f32>) {
        let rows = x.len() / cols;
        let wide = cols + scales.bytes_behind_row(cols as u32) as usize;
        let mut out = vec![F8E4M3::from_bits(0x55); rows * wide];
        let (from, to) =
            (Rows { elements: x, stride: cols }, RowsMut { elements: &mut out, stride: wide });
        quantize(from, (rows, cols), None, (scales, given), to, None);
        let group = if scales == Scales::Block { 128 } else { cols };
        let of = |row: &[F8E4M3], col: usize| {
            let at = cols + col / group * 4;
            let behind = || f32::from_le_bytes([0, 1, 2, 3].map(|byte| row[at + byte].to_bits()));
            given.unwrap_or_else(behind)
        };
        out.chunks_exact(wide)
            .flat_map(|row| (0..cols).map(move |col| (row[col], of(row, col))))
            .unzip()
    }

    fn decoded((codes, scales): &(Vec<F8E4M3>, Vec<f32>)) -> Vec<f64> {
        let value =
            |(code, scale): (&F8E4M3, &f32)| f64::from(Element::to_f32(*code)) * f64::from(*scale);
        codes.iter().zip(scales).map(value).collect()
    }

    const FORMS: [(Scales, Option<f32>); 3] =
        [(Scales::Row, None), (Scales::Block, None), (Scales::Tensor, Some(0.25))];

    /// Rows of two blocks, each of its own magnitude.
    fn rows() -> impl Strategy<Value = Vec<f32>> {
        let block = (-100_i32..100).prop_flat_map(|power| {
            prop::collection::vec(-1.0_f32..1.0, 128).prop_map(move |of| {
                of.into_iter().map(|v| v * 2_f32.powi(power)).collect::<Vec<_>>()
            })
        });
        prop::collection::vec(block, 4).prop_map(|blocks| blocks.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn codes_times_scale_are_within_half_a_step(values in rows()) {
            let x: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
            for (scales, given) in FORMS {
                let found = quantized(&x, 256, scales, given);
                let wide = x.iter().map(|v| f64::from(v.to_f32()));
                for ((decoded, v), scale) in decoded(&found).iter().zip(wide).zip(&found.1) {
                    let scale = f64::from(*scale);
                    if v.abs() > scale * 448.0 * (1.0 + 1e-6) {
                        prop_assert_eq!(decoded.abs().to_bits(), (448.0 * scale).to_bits());
                        continue;
                    }
                    // Half a step, of 4 significant bits and 2^-9 at least, and the reciprocal's
                    // rounding.
                    let bound = (v.abs() / 16.0).max(scale * 2_f64.powi(-10)) * (1.0 + 1e-5);
                    let off = (decoded - v).abs();
                    prop_assert!(off <= bound, "{v} became {decoded}, scale {scale}");
                }
            }
        }

        #[test]
        fn representable_values_stay(
            codes in prop::collection::vec(0_u8..=255, 512),
            power in -50_i32..50,
        ) {
            // The largest number is in each block, so that the scale is found again.
            let number = |(at, code): (usize, &u8)| match at % 128 {
                0 => F8E4M3::from_f32(E4M3_MOST),
                _ if code & 0x7f == 0x7f => F8E4M3::from_f32(0.0),
                _ => F8E4M3::from_bits(*code),
            };
            let codes: Vec<F8E4M3> = codes.iter().enumerate().map(number).collect();
            let scale = 2_f32.powi(power);
            let x: Vec<bf16> =
                codes.iter().map(|code| bf16::from_f32(Element::to_f32(*code) * scale)).collect();
            for (scales, given) in
                [(Scales::Row, None), (Scales::Block, None), (Scales::Tensor, Some(scale))]
            {
                let found = quantized(&x, 256, scales, given);
                prop_assert!(found.0 == codes, "{scales}");
                prop_assert!(found.1.iter().all(|of| of.to_bits() == scale.to_bits()));
            }
        }

        #[test]
        fn norms_come_before_quantisation(values in prop::collection::vec(-1.0_f32..1.0, 4352)) {
            // More vectors than threads.
            let cols = 4352;
            let x: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
            let gain: Vec<bf16> = (0..cols).map(|col| bf16::from_f32(1.0 + col as f32 / 8192.0)).collect();
            let (wide, eps) = (cols + 128, 1e-5);
            let mut out = vec![F8E4M3::from_bits(0); wide];
            let (from, to) = (
                Rows { elements: &x, stride: cols },
                RowsMut { elements: &mut out, stride: wide },
            );
            let norm = Some(Norm { gain: &gain[..], eps });
            quantize(from, (1, cols), norm, (Scales::Row, None), to, None);
            for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact(wide)) {
                let squares = x.iter().map(|v| f64::from(v.to_f32()).powi(2)).sum::<f64>();
                let norm = (squares / cols as f64 + f64::from(eps)).sqrt().recip();
                let scale =
                    f64::from(f32::from_le_bytes([0, 1, 2, 3].map(|b| out[cols + b].to_bits())));
                for ((v, gain), code) in x.iter().zip(&gain).zip(out) {
                    let expected = f64::from(v.to_f32()) * norm * f64::from(gain.to_f32());
                    let found = f64::from(Element::to_f32(*code)) * scale;
                    let bound = (expected.abs() / 16.0).max(scale * 2_f64.powi(-10)) * (1.0 + 1e-4);
                    prop_assert!((found - expected).abs() <= bound, "{found}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn scales_of_their_own_are_those_behind_rows() {
        let x: Vec<bf16> = (0..768_u16).map(|at| bf16::from_f32(f32::from(at))).collect();
        for scales in [Scales::Row, Scales::Block] {
            let carried = quantized(&x, 256, scales, None);
            let groups = scales.of_row(256) as usize;
            let mut codes = vec![F8E4M3::from_bits(0x55); 768];
            // Rows of three, and one number between.
            let mut apart = vec![-1.0; groups * 4];
            let from = Rows { elements: &x, stride: 256 };
            let to = RowsMut { elements: &mut codes, stride: 256 };
            let of = RowsMut { elements: &mut apart, stride: 4 };
            quantize(from, (3, 256), None, (scales, None), to, Some(of));
            assert!(codes == carried.0, "{scales}");
            for (group, of) in apart.chunks(4).enumerate() {
                let at = |row: usize| row * 256 + group * (256 / groups);
                let expected = [carried.1[at(0)], carried.1[at(1)], carried.1[at(2)], -1.0];
                assert_eq!(of, expected, "{scales}");
            }
        }
    }

    #[test]
    fn zeros_have_a_scale_and_no_nan() {
        for (scales, given) in FORMS {
            let (codes, scales) = quantized(&[f16::ZERO; 512], 256, scales, given);
            assert!(codes.iter().all(|code| code.to_bits() == 0));
            assert!(scales.iter().all(|scale| *scale > 0.0));
        }
        // The least numbers, whose scale would have an infinite reciprocal, too.
        let (codes, _) = quantized(&[bf16::from_bits(1); 256], 256, Scales::Row, None);
        assert!(codes.iter().all(|code| !code.is_nan()));
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (scales, given) in FORMS {
                let mut x = [bf16::ONE; 512];
                x[300] = bf16::from_f32(bad);
                let values = decoded(&quantized(&x, 256, scales, given));
                assert!(values[300].is_nan(), "{bad} with {scales} scales");
                let others = |at: &usize| *at != 300;
                let is_alone = bad.is_nan() || given.is_some();
                let same = if scales == Scales::Block { 256..384 } else { 256..512 };
                assert!(same.clone().filter(others).all(|at| values[at].is_nan() != is_alone));
                assert!(
                    (0..512)
                        .filter(|at| !same.contains(at))
                        .all(|at| (values[at] - 1.0).abs() < 1e-6)
                );
            }
        }
    }
}
