//! What calls compute, and what an op says of itself.

use crate::support::*;
use flux_tp_c::flux_op_kind::{FLUX_ALL_GATHER_GEMM, FLUX_GEMM_ALL_REDUCE};
use flux_tp_c::flux_status::*;
use flux_tp_c::*;
use half::bf16;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

/// Rows of 8-bit operands with their scales behind them.
#[test]
fn operands_of_8_bits_have_scales() {
    let (rows, n, k, wide) = (2, 32, 32, 128);
    let one = 0x38_u8; // 1.0: an exponent of 7, the bias
    let mut x = vec![one; rows * wide];
    for (row, scale) in x.chunks_exact_mut(wide).zip([2.0_f32, 4.0]) {
        row[k..k + 4].copy_from_slice(&scale.to_le_bytes());
    }
    let (mut w, mut of_w, mut y) = (vec![one; n * k], vec![0.5_f32; n], ones(rows * n));
    let of = |data: *mut c_void, rows, cols, row_stride, dtype: flux_dtype| flux_tensor {
        data,
        rows,
        cols,
        row_stride,
        dtype: dtype as i32,
    };
    let behind = x[k..].as_mut_ptr().cast();
    let scale_x = of(behind, rows, 1, wide / 4, flux_dtype::FLUX_FP32);
    let x = of(x.as_mut_ptr().cast(), rows, k, wide, flux_dtype::FLUX_E4M3);
    let w = of(w.as_mut_ptr().cast(), n, k, 0, flux_dtype::FLUX_E4M3);
    let scale_w = of(of_w.as_mut_ptr().cast(), 1, n, 0, flux_dtype::FLUX_FP32);
    let y_tensor = tensor(&mut y, rows, n);

    let [Rank(comm)] = connected(host());
    let (dtype, output) = (flux_dtype::FLUX_E4M3 as i32, flux_dtype::FLUX_BF16 as i32);
    let scales = flux_scales::FLUX_SCALES_ROW as i32;
    let good = flux_op_options { n, k, dtype, scales, output, ..options(FLUX_ALL_GATHER_GEMM) };
    let op = created(comm, good);
    let plain = operands(&x, &w, &y_tensor);
    let scaled =
        flux_operands { scale_x: &raw const scale_x, scale_w: &raw const scale_w, ..plain };
    let words = "operands.scale_x is NULL, and the op was created with options.scales: give it";
    refused(forward(op, &plain), FLUX_ERROR_OPERAND, words);
    let apart = flux_tensor { row_stride: 1, ..scale_x };
    let apart = flux_operands { scale_x: &raw const apart, ..scaled };
    refused(forward(op, &apart), FLUX_ERROR_OPERAND, "does not lie behind the rows of x");
    done(forward(op, &scaled));
    done(flux_op_destroy(op));
    let sums = |scale: f32| std::iter::repeat_n(bf16::from_f32(scale * 16.0), n);
    assert!(y.iter().copied().eq(sums(2.0).chain(sums(4.0))), "{y:?}");

    let fast = FLUX_OP_FAST_ACCUMULATION;
    for (bad, words) in [
        (flux_op_options { scales: 0, ..good }, "scales = 0"),
        (flux_op_options { output: 3, ..good }, "output = 3"),
        (flux_op_options { output: 4, ..good }, "FLUX_FP32"),
        (flux_op_options { dtype: 1, ..good }, "options.dtype = 1, scales = 2"),
        (flux_op_options { dtype: 4, ..good }, "options.dtype is FLUX_FP32"),
        (flux_op_options { scales: 3, flags: fast, ..good }, "FLUX_OP_FAST_ACCUMULATION"),
    ] {
        refused(create(comm, bad).0, FLUX_ERROR_ARGUMENT, words);
    }
    done(flux_comm_destroy(comm));
}

#[test]
fn an_op_says_its_rows_and_prepares_numbers_of_them() {
    let ranks = connected::<3>(host());
    std::thread::scope(|scope| {
        for comm in ranks {
            scope.spawn(move || {
                let Rank(comm) = { comm };
                let op = created(comm, options(FLUX_ALL_GATHER_GEMM));
                let rows = |m, rank| {
                    let (mut first, mut count) = (9, 9);
                    // SAFETY: both are places.
                    (
                        unsafe { flux_op_rows(op, m, rank, &raw mut first, &raw mut count) },
                        first,
                        count,
                    )
                };
                assert_eq!(
                    [0, 1, 2].map(|rank| rows(8, rank)),
                    [(FLUX_OK, 0, 3), (FLUX_OK, 3, 3), (FLUX_OK, 6, 2)]
                );
                refused(rows(8, 3).0, FLUX_ERROR_OPERAND, "rank = 3");
                refused(rows(17, 0).0, FLUX_ERROR_OPERAND, "max_m = 16");
                let prepare = |rows: &[usize]| {
                    // SAFETY: as many numbers as there are.
                    unsafe { flux_op_prepare(op, rows.as_ptr(), rows.len()) }
                };
                done(prepare(&[1, 8, 16]));
                done(prepare(&[]));
                refused(prepare(&[17]), FLUX_ERROR_OPERAND, "max_m = 16");
                done(flux_op_destroy(op));
                done(flux_comm_destroy(comm));
            });
        }
    });
}

/// 80 columns or elements of k are 10 groups of 8, of which the first of three ranks has 4.
#[test]
fn an_op_says_its_columns_and_inner_elements_and_takes_operands_of_them() {
    let ranks = connected::<3>(host());
    std::thread::scope(|scope| {
        for (rank, comm) in (0..).zip(ranks) {
            scope.spawn(move || {
                let Rank(comm) = { comm };
                let gathers =
                    created(comm, flux_op_options { n: 80, ..options(FLUX_ALL_GATHER_GEMM) });
                let reduces =
                    created(comm, flux_op_options { k: 80, ..options(FLUX_GEMM_ALL_REDUCE) });
                let part = |of: unsafe extern "C" fn(
                    *const flux_op,
                    u32,
                    *mut usize,
                    *mut usize,
                ) -> flux_status,
                            op,
                            rank| {
                    let (mut first, mut count) = (9, 9);
                    // SAFETY: both are places.
                    done(unsafe { of(op, rank, &raw mut first, &raw mut count) });
                    (first, count)
                };
                assert_eq!(
                    [0, 1, 2].map(|rank| part(flux_op_columns, gathers, rank)),
                    [(0, 32), (32, 24), (56, 24)]
                );
                assert_eq!(
                    [0, 1, 2].map(|rank| part(flux_op_inner, reduces, rank)),
                    [(0, 32), (32, 24), (56, 24)]
                );
                assert_eq!(
                    (part(flux_op_inner, gathers, rank), part(flux_op_columns, reduces, rank)),
                    ((0, 32), (0, 24))
                );
                // SAFETY: NULL is no place.
                refused(
                    unsafe { flux_op_columns(gathers, 3, null_mut(), null_mut()) },
                    FLUX_ERROR_OPERAND,
                    "rank = 3",
                );

                let (_, inner) = part(flux_op_inner, reduces, rank);
                let (mut x, mut w, mut y) =
                    (ones(4 * inner), ones(24 * inner), vec![bf16::NAN; 4 * 24]);
                let (tx, tw, ty) =
                    (tensor(&mut x, 4, inner), tensor(&mut w, 24, inner), tensor(&mut y, 4, 24));
                let short = flux_tensor { cols: inner - 8, row_stride: inner, ..tx };
                let words = format!(
                    "x is [4, {}], but gemm_ar with m = 4 takes [4, {inner}] on rank {rank}",
                    inner - 8
                );
                refused(forward(reduces, &operands(&short, &tw, &ty)), FLUX_ERROR_OPERAND, &words);
                done(forward(reduces, &operands(&tx, &tw, &ty)));
                assert!(y.iter().all(|&y| y == bf16::from_f32(80.0)));
                done(flux_op_destroy(gathers));
                done(flux_op_destroy(reduces));
                done(flux_comm_destroy(comm));
            });
        }
    });
}

#[test]
fn a_residual_in_the_place_of_the_result_and_a_norm_are_applied() {
    let [Rank(comm)] = connected(host());
    let flags = FLUX_OP_RESIDUAL | FLUX_OP_RMS_NORM | FLUX_OP_CAPTURES | FLUX_OP_F32_PARTIALS;
    let op = created(
        comm,
        flux_op_options { flags, rms_norm_eps: 1e-6, ..options(FLUX_GEMM_ALL_REDUCE) },
    );
    let (mut x, mut w, mut gain, mut y, mut z) =
        (ones(4 * 32), ones(24 * 32), ones(24), ones(4 * 24), vec![bf16::NAN; 4 * 24]);
    let (tx, tw, tg) = (tensor(&mut x, 4, 32), tensor(&mut w, 24, 32), tensor(&mut gain, 1, 24));
    let (ty, tz) = (tensor(&mut y, 4, 24), tensor(&mut z, 4, 24));
    let good = flux_operands {
        residual: &raw const ty,
        gain: &raw const tg,
        y_norm: &raw const tz,
        ..operands(&tx, &tw, &ty)
    };
    refused(
        forward(op, &flux_operands { y_norm: null(), ..good }),
        FLUX_ERROR_OPERAND,
        "operands.y_norm is NULL",
    );
    done(forward(op, &good));
    assert!(y.iter().all(|&y| y == bf16::from_f32(33.0)) && z.iter().all(|&z| z == bf16::ONE));
    done(flux_op_destroy(op));
    done(flux_comm_destroy(comm));
}

/// Rows of equal elements, whose norms are ones.
#[test]
fn a_norm_is_written_as_the_next_x() {
    let [Rank(comm)] = connected(host());
    let made = |scales: flux_scales| {
        let flags = FLUX_OP_RMS_NORM;
        let options = options(FLUX_GEMM_ALL_REDUCE);
        created(comm, flux_op_options { flags, n: 32, norm_scales: scales as i32, ..options })
    };
    let (mut x, mut w, mut gain, mut y) =
        (ones(4 * 32), ones(32 * 32), ones(32), vec![bf16::NAN; 4 * 32]);
    let (tx, tw, tg) = (tensor(&mut x, 4, 32), tensor(&mut w, 32, 32), tensor(&mut gain, 1, 32));
    let ty = tensor(&mut y, 4, 32);
    let (mut z, mut scales) = (vec![0_u8; 4 * 128], [0.5_f32; 4]);
    let of = |data: *mut c_void, rows, cols, dtype: flux_dtype| flux_tensor {
        data,
        rows,
        cols,
        row_stride: 0,
        dtype: dtype as i32,
    };
    let codes = of(z.as_mut_ptr().cast(), 4, 32, flux_dtype::FLUX_E4M3);
    let wide = flux_tensor { cols: 128, ..codes };
    let one = of(scales.as_mut_ptr().cast(), 1, 1, flux_dtype::FLUX_FP32);
    let apart = flux_tensor { cols: 4, ..one };
    let good =
        flux_operands { gain: &raw const tg, y_norm: &raw const codes, ..operands(&tx, &tw, &ty) };

    // The code of 2, and of 448.
    let (two, most) = (0x40, 0x7e);
    let op = made(flux_scales::FLUX_SCALES_TENSOR);
    let words = "operands.norm_scale is NULL, and the op was created with FLUX_SCALES_TENSOR as \
                 options.norm_scales: give it";
    refused(forward(op, &good), FLUX_ERROR_OPERAND, words);
    done(forward(op, &flux_operands { norm_scale: &raw const one, ..good }));
    // SAFETY: the memory of this test, which no call is using.
    assert!(unsafe { std::slice::from_raw_parts(codes.data.cast::<u8>(), 128) } == [two; 128]);
    done(flux_op_destroy(op));

    let op = made(flux_scales::FLUX_SCALES_ROW);
    let words = "y_norm is [4, 32], but gemm_ar with m = 4 takes [4, 128]";
    refused(forward(op, &good), FLUX_ERROR_OPERAND, words);
    done(forward(op, &flux_operands { y_norm: &raw const wide, ..good }));
    assert!(z.chunks(128).all(|row| row[..32] == [most; 32]));
    assert!(z.chunks(128).all(|row| row[32..36] == (1.0_f32 / 448.0).to_le_bytes()));
    done(forward(op, &flux_operands { y_norm_scale: &raw const apart, ..good }));
    let least = (1.0_f32 / 448.0).to_bits();
    assert!(z[..128] == [most; 128] && scales.map(f32::to_bits) == [least; 4]);
    done(flux_op_destroy(op));
    done(flux_comm_destroy(comm));
}

#[test]
fn weights_of_either_layout_give_the_same_result() {
    let [Rank(comm)] = connected(host());
    let value = |i: usize| bf16::from_f32((i % 7) as f32 - 3.0);
    let mut x = (0..4 * 32).map(value).collect::<Vec<_>>();
    let mut nk = (0..24 * 32).map(value).collect::<Vec<_>>();
    let mut kn = (0..32 * 24).map(|i| nk[i % 24 * 32 + i / 24]).collect::<Vec<_>>();
    let (mut expected, mut y) = (vec![bf16::NAN; 4 * 24], vec![bf16::NAN; 4 * 24]);
    let (tx, tnk, tkn) = (tensor(&mut x, 4, 32), tensor(&mut nk, 24, 32), tensor(&mut kn, 32, 24));
    let (te, ty) = (tensor(&mut expected, 4, 24), tensor(&mut y, 4, 24));

    let rows = created(comm, options(FLUX_ALL_GATHER_GEMM));
    let columns = created(
        comm,
        flux_op_options { flags: FLUX_OP_WEIGHTS_KN, ..options(FLUX_ALL_GATHER_GEMM) },
    );
    done(forward(rows, &operands(&tx, &tnk, &te)));
    done(forward(columns, &operands(&tx, &tkn, &ty)));
    assert!(y == expected && y.iter().any(|&value| value != y[0]));
    refused(forward(columns, &operands(&tx, &tnk, &ty)), FLUX_ERROR_OPERAND, "w");
    done(flux_op_destroy(rows));
    done(flux_op_destroy(columns));
    done(flux_comm_destroy(comm));
}

#[test]
fn gathered_rows_are_handed_out_by_the_op_that_gathers() {
    let ranks = connected::<3>(host());
    std::thread::scope(|scope| {
        for comm in ranks {
            scope.spawn(move || {
                let Rank(comm) = { comm };
                let mut rank = 9;
                // SAFETY: a place.
                done(unsafe { flux_comm_place(comm, &raw mut rank, null_mut(), null_mut()) });
                let op = created(comm, options(FLUX_ALL_GATHER_GEMM));
                // Shards of 3, 2 and 2 rows.
                let all: Vec<_> = (0..7 * 32).map(|i| bf16::from_f32(i as f32)).collect();
                let rows = [0..3, 3..5, 5..7][rank as usize].clone();
                let mut x = all[rows.start * 32..rows.end * 32].to_vec();
                let (mut w, mut y, mut x_full) =
                    (ones(8 * 32), vec![bf16::NAN; 7 * 8], vec![bf16::NAN; 7 * 32]);
                let (tx, tw, ty) =
                    (tensor(&mut x, rows.len(), 32), tensor(&mut w, 8, 32), tensor(&mut y, 7, 8));
                let tf = tensor(&mut x_full, 7, 32);
                refused(
                    forward(
                        op,
                        &flux_operands { x_full: &raw const ty, ..operands(&tx, &tw, &ty) },
                    ),
                    FLUX_ERROR_OPERAND,
                    "x_full",
                );
                done(forward(
                    op,
                    &flux_operands { x_full: &raw const tf, ..operands(&tx, &tw, &ty) },
                ));
                assert!(x_full == all);
                let reduces =
                    created(comm, flux_op_options { k: 48, ..options(FLUX_GEMM_ALL_REDUCE) });
                let without = flux_operands { x_full: &raw const tf, ..operands(&tx, &tw, &ty) };
                refused(forward(reduces, &without), FLUX_ERROR_OPERAND, "gathers no rows");
                done(flux_op_destroy(op));
                done(flux_op_destroy(reduces));
                done(flux_comm_destroy(comm));
            });
        }
    });
}

/// Of weights with 32 and 24 columns the first of 3 ranks has 16 and 8, the others 8 and 8.
#[test]
fn several_weights_share_one_gather() {
    const COLUMNS: [usize; 2] = [32, 24];
    let ranks = connected::<3>(host());
    std::thread::scope(|scope| {
        for (rank, comm) in (0..3_u32).zip(ranks) {
            scope.spawn(move || {
                let Rank(comm) = { comm };
                let op = created(
                    comm,
                    flux_op_options {
                        n: 56,
                        columns: [32, 24, 0, 0],
                        flags: FLUX_OP_BIAS,
                        ..options(FLUX_ALL_GATHER_GEMM)
                    },
                );
                let part = |weight| {
                    let (mut first, mut count) = (9, 9);
                    // SAFETY: both are places.
                    done(unsafe {
                        flux_op_weight_columns(op, weight, rank, &raw mut first, &raw mut count)
                    });
                    first..first + count
                };
                let parts = [0, 1].map(part);
                assert_eq!(
                    parts,
                    [
                        [0..16, 16..24, 24..32][rank as usize].clone(),
                        [0..8, 8..16, 16..24][rank as usize].clone()
                    ]
                );
                // SAFETY: NULL is no place.
                refused(
                    unsafe { flux_op_weight_columns(op, 2, rank, null_mut(), null_mut()) },
                    FLUX_ERROR_OPERAND,
                    "weight = 2",
                );

                // Shards of 3, 2 and 2 rows; results below 256.
                let value = |i: usize| bf16::from_f32((i % 3) as f32);
                let all: Vec<_> = (0..7 * 32).map(value).collect();
                let rows = [0..3, 3..5, 5..7][rank as usize].clone();
                let mut x = all[rows.start * 32..rows.end * 32].to_vec();
                let full = COLUMNS.map(|n| (0..n * 32).map(|i| value(i / 5)).collect::<Vec<_>>());
                let mut w =
                    [0, 1].map(|i: usize| full[i][parts[i].start * 32..parts[i].end * 32].to_vec());
                let mut bias =
                    [0, 1].map(|i: usize| parts[i].clone().map(value).collect::<Vec<_>>());
                let mut y = [0, 1].map(|i: usize| vec![bf16::NAN; 7 * parts[i].len()]);
                let mut x_full = vec![bf16::NAN; 7 * 32];
                let (tx, tf) = (tensor(&mut x, rows.len(), 32), tensor(&mut x_full, 7, 32));
                let tensors = |of: &mut [Vec<bf16>; 2],
                               rows: &dyn Fn(usize) -> usize,
                               cols: &dyn Fn(usize) -> usize| {
                    let [first, second] = of;
                    [tensor(first, rows(0), cols(0)), tensor(second, rows(1), cols(1))]
                };
                let n = |i: usize| parts[i].len();
                let tw = tensors(&mut w, &n, &|_| 32);
                let (tb, ty) = (tensors(&mut bias, &|_| 1, &n), tensors(&mut y, &|_| 7, &n));
                let good = flux_operands {
                    bias: tb.as_ptr(),
                    x_full: &raw const tf,
                    weight_count: 2,
                    ..operands(&tx, &tw[0], &ty[0])
                };
                let good = flux_operands { w: tw.as_ptr(), y: ty.as_ptr(), ..good };
                for weight_count in [0, 1, 3] {
                    let words = format!(
                        "operands.weight_count = {weight_count}, and the op was created with 2 \
                         weights"
                    );
                    refused(
                        forward(op, &flux_operands { weight_count, ..good }),
                        FLUX_ERROR_OPERAND,
                        &words,
                    );
                }
                refused(
                    forward(op, &flux_operands { bias: null(), ..good }),
                    FLUX_ERROR_OPERAND,
                    "operands.bias is NULL",
                );
                refused(
                    forward(op, &flux_operands { y: null(), ..good }),
                    FLUX_ERROR_ARGUMENT,
                    "operands.y is NULL",
                );
                let unknown = [tw[0], flux_tensor { dtype: 0, ..tw[1] }];
                refused(
                    forward(op, &flux_operands { w: unknown.as_ptr(), ..good }),
                    FLUX_ERROR_ARGUMENT,
                    "operands.w[1].dtype = 0",
                );
                let short = [tw[0], flux_tensor { rows: 0, ..tw[1] }];
                let words = "as flux_op_weight_columns says";
                refused(
                    forward(op, &flux_operands { w: short.as_ptr(), ..good }),
                    FLUX_ERROR_OPERAND,
                    words,
                );

                done(forward(op, &good));
                assert!(x_full == all);
                for (weight, part) in parts.iter().enumerate() {
                    for (at, found) in y[weight].iter().enumerate() {
                        let (row, column) = (at / part.len(), part.start + at % part.len());
                        let product = |k: usize| {
                            all[row * 32 + k].to_f32() * full[weight][column * 32 + k].to_f32()
                        };
                        let sum = (0..32).map(product).sum::<f32>() + value(column).to_f32();
                        assert_eq!(
                            *found,
                            bf16::from_f32(sum),
                            "weight {weight}, row {row}, column {column}"
                        );
                    }
                }
                done(flux_op_destroy(op));
                done(flux_comm_destroy(comm));
            });
        }
    });
}

#[test]
fn equal_rows_of_a_batch_invariant_op_have_equal_bits() {
    let [Rank(comm)] = connected(host());
    let value = |i: usize| bf16::from_f32((i % 37) as f32 / 7.0 - 2.0);
    let op = created(
        comm,
        flux_op_options { flags: FLUX_OP_BATCH_INVARIANT, ..options(FLUX_ALL_GATHER_GEMM) },
    );
    let mut w = (0..24 * 32).map(value).collect::<Vec<_>>();
    let tw = tensor(&mut w, 24, 32);
    let mut rows = Vec::new();
    for m in 1..=4 {
        let mut x = (0..m * 32).map(|i| value(i % 32)).collect::<Vec<_>>();
        let mut y = vec![bf16::NAN; m * 24];
        done(forward(op, &operands(&tensor(&mut x, m, 32), &tw, &tensor(&mut y, m, 24))));
        rows.extend(y.chunks_exact(24).map(<[bf16]>::to_vec));
    }
    assert!(rows.iter().all(|row| *row == rows[0]));
    let mut text = [0; 4096];
    // SAFETY: a place of this test, as large as is said.
    done(unsafe { flux_op_explain(op, text.as_mut_ptr(), text.len(), null_mut()) });
    // SAFETY: the library has ended it with a zero.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) };
    assert!(text.to_string_lossy().contains("batch-invariant"));
    let unknown =
        flux_op_options { flags: FLUX_OP_FAST_ACCUMULATION << 1, ..options(FLUX_ALL_GATHER_GEMM) };
    let mut none = null_mut();
    // SAFETY: options and a place for the handle, which outlive the call.
    refused(
        unsafe { flux_op_create(comm, &raw const unknown, &raw mut none) },
        FLUX_ERROR_ARGUMENT,
        "0xff",
    );
    done(flux_op_destroy(op));
    done(flux_comm_destroy(comm));
}
