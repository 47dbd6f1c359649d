//! Quantised rows: the bits of the host on every machine, as operands of the next call.

use super::{Machine, Node, Number, defaults};
use flux_kernels::cpu::{self, Norm, Rows, RowsMut};
use flux_kernels::harness::data::raw;
use flux_ops::{AllGatherGemm, CallError, Epsilon, F8E4M3, Layout, Quantizer, Scales};
use half::{bf16, f16};

const EPS: f32 = 1e-5;

/// Of many magnitudes, one of them NaN and one infinite.
fn values<T: Number>(rows: usize, cols: usize) -> Vec<T> {
    let value = |at: usize| {
        let bits = raw(7, at as u32, 0);
        let power = (bits >> 20).cast_signed() % 12 - 6;
        T::from_f32(((bits % 2001) as f32 - 1000.0) / 1000.0 * 2_f32.powi(power))
    };
    let mut values: Vec<T> = (0..rows * cols).map(value).collect();
    if rows > 3 {
        values[cols + 5] = T::from_f32(f32::NAN);
        values[2 * cols + 7] = T::from_f32(f32::INFINITY);
        values[3 * cols..4 * cols].fill(T::from_f32(0.0));
    }
    values
}

fn same_bits<T: Number>(node: &Node, rows: usize, cols: usize, apart: bool) {
    let quantizer = Quantizer::new(&node.comm).unwrap();
    let (x, gain) = (values::<T>(rows, cols), values::<T>(1, cols));
    for scales in Scales::OF_QUANTIZED {
        let groups = scales.of_row(cols as u32) as usize;
        let unfit = scales == Scales::Block && !cols.is_multiple_of(128);
        if unfit || (apart && groups == 0) {
            continue;
        }
        let behind = groups > 0 && !apart;
        let wide = if behind { (cols + 4 * groups).next_multiple_of(128) } else { cols };
        let of_scales = Layout::strided(groups, rows, rows + 3);
        // Rows with a gap before the next.
        let stride = wide + 32;
        let given = (scales == Scales::Tensor).then_some(0.03125);
        for norm in [None, Some(Norm { gain: &gain[..], eps: EPS })] {
            let nothing = F8E4M3::from_f32(f32::NAN);
            let mut expected = vec![nothing; Layout::strided(rows, wide, stride).span()];
            let mut expected_scales = vec![f32::NAN; of_scales.span()];
            let (from, to) =
                (Rows { elements: &x, stride: cols }, RowsMut { elements: &mut expected, stride });
            let to_scales = RowsMut { elements: &mut expected_scales, stride: rows + 3 };
            let to_scales = apart.then_some(to_scales);
            cpu::quantize(from, (rows, cols), norm, (scales, given), to, to_scales);
            let mut out = node.poisoned::<F8E4M3>(expected.len());
            let mut out_scale = node.upload(&vec![f32::NAN; expected_scales.len().max(1)]);
            let (x, gain, scale) =
                (node.upload(&x), node.upload(&gain), node.upload(&[0.03125_f32]));
            {
                let (x, scale) = (node.view(&x, (rows, cols)), node.view(&scale, (1, 1)));
                let gain = node.view(&gain, (cols,));
                let mut out = node.view_mut(&mut out, Layout::strided(rows, wide, stride));
                let call = match given {
                    None => quantizer.rows(&x, scales),
                    Some(_) => quantizer.tensor(&x, &scale),
                };
                let call =
                    if norm.is_some() { call.rms_norm(&gain, Epsilon::from(EPS)) } else { call };
                if apart {
                    let mut out_scale = node.view_mut(&mut out_scale, of_scales);
                    call.scales_to(&mut out_scale).write(&mut out, node.stream()).unwrap();
                } else {
                    call.write(&mut out, node.stream()).unwrap();
                }
            }
            let bits = |of: Vec<F8E4M3>| of.iter().map(F8E4M3::to_bits).collect::<Vec<_>>();
            let (found, expected) = (bits(node.download(&out)), bits(expected));
            let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
            let case = format!("{rows} x {cols}, {scales}, norm {}, {apart}", norm.is_some());
            assert_eq!(differs, None, "{case}");
            let bits = |of: Vec<f32>| of.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            if apart {
                assert_eq!(bits(node.download(&out_scale)), bits(expected_scales), "{case}");
            }
        }
    }
}

pub fn quantised_rows_have_the_bits_of_the_host(machine: Machine) {
    machine.run(1, defaults, |node| {
        // More vectors than threads; no whole warp; few rows.
        for (rows, cols) in [(5, 4352), (9, 48), (1, 128), (4, 1280)] {
            for apart in [false, true] {
                same_bits::<bf16>(node, rows, cols, apart);
                same_bits::<f16>(node, rows, cols, apart);
            }
        }
    });
}

/// The rows that a call gathers, as they were quantised.
pub fn quantised_rows_are_gathered_with_their_scales(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        machine.run(world, defaults, |node| {
            let (rows, n, k) = (4, 128 * world as usize, 256);
            let (m, wide) = (rows * world as usize, k + 128);
            let quantizer = Quantizer::new(&node.comm).unwrap();
            let op =
                AllGatherGemm::<F8E4M3, bf16>::scaled(m, n, k, Scales::Block).build(&node.comm);
            let op = op.unwrap();
            // Row `i` of all is its number everywhere.
            let first = node.rank.index() * rows;
            let row = |at: usize| bf16::from_f32((first + at / k) as f32);
            let x = node.upload(&(0..rows * k).map(row).collect::<Vec<_>>());
            let w = node.upload(&vec![F8E4M3::from_f32(1.0); 128 * k]);
            let scale_w = node.upload(&[0.5_f32, 0.5]);
            let mut codes = node.poisoned::<F8E4M3>(rows * wide);
            let mut y = node.poisoned::<bf16>(m * 128);
            {
                let x = node.view(&x, (rows, k));
                let mut out = node.view_mut(&mut codes, (rows, wide));
                quantizer.rows(&x, Scales::Block).write(&mut out, node.stream()).unwrap();
            }
            {
                let wide = node.view(&codes, (rows, wide));
                let (x, scale_x) = wide.with_scales(k, Scales::Block).unwrap();
                let (w, scale_w) = (node.view(&w, (128, k)), node.view(&scale_w, (1, 2)));
                let mut y = node.view_mut(&mut y, (m, 128));
                op.call(&x)
                    .scale_x(&scale_x)
                    .weight(&w, &mut y)
                    .scale_w(&scale_w)
                    .on(node.stream())
                    .unwrap();
            }
            for (at, y) in node.download(&y).iter().enumerate() {
                let expected = (at / 128 * k) as f32 / 2.0;
                // A rounded scale: a step of bf16, and some of fp32.
                let error = (y.to_f32() - expected).abs();
                assert!(error <= expected / 128.0, "{y}, not {expected}");
            }
        });
    }
}

pub fn what_cannot_be_quantised_is_refused(machine: Machine) {
    machine.run(1, defaults, |node| {
        let quantizer = Quantizer::new(&node.comm).unwrap();
        let (x, gain) = (node.upload(&[bf16::ONE; 4 * 64]), node.upload(&[bf16::ONE; 128]));
        let mut out = node.poisoned::<F8E4M3>(4 * 128);
        let x = node.view(&x, (4, 64));
        let (short, gain) = (node.view(&gain, (32,)), node.view(&gain, (64,)));
        let stream = || node.stream();
        let mut dense = node.view_mut(&mut out, (4, 64));
        let error = quantizer.rows(&x, Scales::Row).write(&mut dense, stream()).unwrap_err();
        let said = "out is [4, 64], but quantising these rows with row scales takes [4, 128]";
        assert_eq!(error.to_string(), said);
        let error = quantizer.rows(&x, Scales::Tensor).write(&mut dense, stream()).unwrap_err();
        let said = "scale is not given, but quantising these rows with tensor scales takes [1, 1]";
        assert_eq!(error.to_string(), said);
        let error = quantizer.rows(&x, Scales::Block).write(&mut dense, stream()).unwrap_err();
        assert!(
            matches!(error, CallError::QuantizedColumns { k: 64, multiple: 128, .. }),
            "{error}"
        );
        let mut scales = node.upload(&[f32::NAN; 8]);
        let mut short_scales = node.view_mut(&mut scales, (1, 3));
        let call = quantizer.rows(&x, Scales::Row).scales_to(&mut short_scales);
        let error = call.write(&mut dense, stream()).unwrap_err();
        let said = "out_scale is [1, 3], but quantising these rows with row scales takes [1, 4]";
        assert_eq!(error.to_string(), said);
        drop(short_scales);
        let mut own = node.view_mut(&mut scales, (1, 4));
        let given = node.upload(&[1.0_f32]);
        let given = node.view(&given, (1, 1));
        let call = quantizer.tensor(&x, &given).scales_to(&mut own);
        let error = call.write(&mut dense, stream()).unwrap_err();
        assert!(matches!(error, CallError::Quantized { expected: None, .. }), "{error}");
        drop(dense);
        let mut carried = node.view_mut(&mut out, (4, 128));
        let call = quantizer.rows(&x, Scales::Row).scales_to(&mut own);
        let error = call.write(&mut carried, stream()).unwrap_err();
        let said = "out is [4, 128], but quantising these rows with row scales takes [4, 64]";
        assert_eq!(error.to_string(), said);
        drop((carried, own));
        let mut wide = node.view_mut(&mut out, (4, 128));
        let call = quantizer.rows(&x, Scales::Row).rms_norm(&short, Epsilon::from(EPS));
        let error = call.write(&mut wide, stream()).unwrap_err();
        assert!(matches!(error, CallError::Quantized { operand: "gain", .. }), "{error}");
        let call = quantizer.rows(&x, Scales::Row).rms_norm(&gain, Epsilon::from(-1.0));
        let error = call.write(&mut wide, stream()).unwrap_err();
        assert!(matches!(error, CallError::Epsilon { value: -1.0 }), "{error}");
    });
}
