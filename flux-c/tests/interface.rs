//! The functions of the interface as C calls them: good calls, and each kind of bad one.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use flux_tp_c::flux_op_kind::{FLUX_ALL_GATHER_GEMM, FLUX_GEMM_ALL_REDUCE};
use flux_tp_c::flux_status::*;
use flux_tp_c::*;
use half::bf16;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

/// Handles travel to the threads of their ranks.
#[derive(Clone, Copy)]
struct Rank(*mut flux_comm);
// SAFETY: the interface takes handles on any thread.
unsafe impl Send for Rank {}

fn message() -> String {
    // SAFETY: the message of this thread.
    unsafe { CStr::from_ptr(flux_last_error_message()) }.to_str().unwrap().to_owned()
}

/// Checks a refusal and its words.
#[track_caller]
fn refused(status: flux_status, expected: flux_status, words: &str) {
    assert_eq!(status, expected, "{}", message());
    assert!(message().contains(words), "{} has not `{words}`", message());
}

#[track_caller]
fn done(status: flux_status) {
    assert_eq!(status, FLUX_OK, "{}", message());
}

fn host() -> flux_comm_options {
    let (transport, size) = (c"host".as_ptr(), size_of::<flux_comm_options>());
    flux_comm_options {
        size,
        transport,
        timeout: 0.0,
        max_workspace: 0,
        sm_margin: 0,
        has_device: 0,
        device: 0,
        reserved: 0,
    }
}

fn connected<const W: usize>(options: flux_comm_options) -> [Rank; W] {
    let mut comms = [null_mut(); W];
    // SAFETY: there is room for all.
    done(unsafe { flux_comm_init_all(W as u32, &raw const options, comms.as_mut_ptr()) });
    comms.map(Rank)
}

/// Of a world of one: at most 16 rows, 24 columns of 32 products.
fn options(kind: flux_op_kind) -> flux_op_options {
    let (size, dtype) = (size_of::<flux_op_options>(), flux_dtype::FLUX_BF16 as i32);
    let (columns, rms_norm_eps) = ([0; FLUX_MAX_WEIGHTS], 0.0);
    flux_op_options {
        size,
        kind: kind as i32,
        dtype,
        max_m: 16,
        n: 24,
        k: 32,
        columns,
        flags: 0,
        activation: 0,
        rms_norm_eps,
        scales: 0,
        output: 0,
        norm_scales: 0,
    }
}

fn create(comm: *const flux_comm, options: flux_op_options) -> (flux_status, *mut flux_op) {
    let mut op = std::ptr::dangling_mut();
    // SAFETY: structures and a place of this test.
    let status = unsafe { flux_op_create(comm, &raw const options, &raw mut op) };
    (status, op)
}

fn created(comm: *const flux_comm, options: flux_op_options) -> *mut flux_op {
    let (status, op) = create(comm, options);
    done(status);
    op
}

fn tensor(values: &mut [bf16], rows: usize, cols: usize) -> flux_tensor {
    assert_eq!(values.len(), rows * cols);
    flux_tensor {
        data: values.as_mut_ptr().cast(),
        rows,
        cols,
        row_stride: 0,
        dtype: flux_dtype::FLUX_BF16 as i32,
    }
}

fn ones(elements: usize) -> Vec<bf16> {
    vec![bf16::ONE; elements]
}

fn operands(x: &flux_tensor, w: &flux_tensor, y: &flux_tensor) -> flux_operands {
    let size = size_of::<flux_operands>();
    flux_operands {
        size,
        x,
        w,
        scale_x: null(),
        scale_w: null(),
        bias: null(),
        residual: null(),
        gain: null(),
        norm_scale: null(),
        y,
        y_norm: null(),
        y_norm_scale: null(),
        x_full: null(),
        weight_count: 0,
        constant_weights: 0,
    }
}

fn forward(op: *const flux_op, operands: &flux_operands) -> flux_status {
    // SAFETY: tensors of this test, which outlive the call.
    unsafe { flux_op_forward_host(op, operands) }
}

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
fn handles_that_are_null_foreign_or_destroyed_are_refused() {
    let [Rank(comm)] = connected(host());
    let op = created(comm, options(FLUX_ALL_GATHER_GEMM));
    refused(flux_comm_check(null()), FLUX_ERROR_HANDLE, "the communicator is NULL");
    refused(flux_comm_check(op.cast()), FLUX_ERROR_HANDLE, "is no communicator");
    refused(flux_op_destroy(comm.cast()), FLUX_ERROR_HANDLE, "is no op");
    let object = 5_u64;
    refused(flux_comm_barrier((&raw const object).cast()), FLUX_ERROR_HANDLE, "is no communicator");
    // SAFETY: no memory is read.
    refused(unsafe { flux_op_prepare(null(), null(), 1) }, FLUX_ERROR_HANDLE, "the op is NULL");

    refused(flux_comm_destroy(comm), FLUX_ERROR_HANDLE, "has 1 op(s): destroy them first");
    done(flux_comm_check(comm));
    done(flux_op_destroy(op));
    refused(flux_op_destroy(op), FLUX_ERROR_HANDLE, "has been destroyed");
    done(flux_comm_destroy(comm));
    refused(flux_comm_destroy(comm), FLUX_ERROR_HANDLE, "has been destroyed");
    let (status, op) = create(comm, options(FLUX_ALL_GATHER_GEMM));
    refused(status, FLUX_ERROR_HANDLE, "has been destroyed");
    assert!(op.is_null());
}

#[test]
fn bad_options_of_a_communicator_are_refused() {
    let refused_with = |options: flux_comm_options, words| {
        let mut comm = std::ptr::dangling_mut();
        // SAFETY: a structure and a place of this test.
        refused(
            unsafe { flux_comm_init_all(1, &raw const options, &raw mut comm) },
            FLUX_ERROR_ARGUMENT,
            words,
        );
        assert!(comm.is_null());
    };
    refused_with(flux_comm_options { size: 3, ..host() }, "options.size = 3");
    refused_with(
        flux_comm_options { transport: c"pigeon".as_ptr(), ..host() },
        "`pigeon` names no transport",
    );
    refused_with(flux_comm_options { timeout: -1.0, ..host() }, "options.timeout = -1");
    refused_with(flux_comm_options { timeout: f64::NAN, ..host() }, "options.timeout = NaN");
    refused_with(flux_comm_options { has_device: 1, ..host() }, "options.has_device = 1");
    refused_with(flux_comm_options { has_device: 2, ..host() }, "options.has_device = 2");
    refused_with(flux_comm_options { reserved: 1, ..host() }, "options.reserved = 1");
    let options = host();
    // SAFETY: no memory is written.
    refused(
        unsafe { flux_comm_init_all(2, &raw const options, null_mut()) },
        FLUX_ERROR_ARGUMENT,
        "comms is NULL",
    );
    let mut comms = [null_mut(); 17];
    // SAFETY: there is room for all.
    refused(
        unsafe { flux_comm_init_all(17, &raw const options, comms.as_mut_ptr()) },
        FLUX_ERROR_ARGUMENT,
        "world_size = 17",
    );
    let init = |meeting, secret: *const c_void, comm| {
        // SAFETY: text that ends, no secret, a place.
        unsafe { flux_comm_init_rank(0, 2, meeting, secret, 0, null(), comm) }
    };
    refused(init(null(), null(), comms.as_mut_ptr()), FLUX_ERROR_ARGUMENT, "meeting is NULL");
    refused(
        init(c"localhost:1".as_ptr(), null(), comms.as_mut_ptr()),
        FLUX_ERROR_ARGUMENT,
        "secret is NULL",
    );
    refused(
        init(c"/tmp".as_ptr(), c"".as_ptr().cast(), comms.as_mut_ptr()),
        FLUX_ERROR_ARGUMENT,
        "give NULL",
    );
    refused(
        init(c"/no/such/folder".as_ptr(), null(), comms.as_mut_ptr()),
        FLUX_ERROR_CONNECT,
        "/no/such/folder",
    );
}

#[test]
fn an_abort_from_another_thread_ends_a_wait_on_every_rank() {
    let ranks = connected::<3>(host());
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        // Rank 2 does not come.
        for comm in &ranks[..2] {
            let comm = *comm;
            scope.spawn(move || {
                let Rank(comm) = { comm };
                refused(flux_comm_barrier(comm), FLUX_ERROR_ABORTED, "rank 0 aborted: reason 7");
            });
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        done(flux_comm_abort(ranks[0].0, 7));
    });
    // Far below the deadline of 30 s.
    assert!(began.elapsed() < std::time::Duration::from_secs(10), "{:?}", began.elapsed());
    for Rank(comm) in ranks {
        refused(flux_comm_check(comm), FLUX_ERROR_ABORTED, "rank 0 aborted: reason 7");
        done(flux_comm_destroy(comm));
    }
}

#[test]
fn bad_options_of_an_op_are_refused() {
    let [Rank(comm)] = connected(host());
    let refused_with = |options, expected, words| {
        let (status, op) = create(comm, options);
        refused(status, expected, words);
        assert!(op.is_null());
    };
    let good = options(FLUX_ALL_GATHER_GEMM);
    refused_with(flux_op_options { size: 0, ..good }, FLUX_ERROR_ARGUMENT, "options.size = 0");
    refused_with(flux_op_options { kind: 0, ..good }, FLUX_ERROR_ARGUMENT, "options.kind = 0");
    refused_with(flux_op_options { dtype: 7, ..good }, FLUX_ERROR_ARGUMENT, "options.dtype = 7");
    refused_with(
        flux_op_options { activation: -1, ..good },
        FLUX_ERROR_ARGUMENT,
        "options.activation = -1",
    );
    refused_with(
        flux_op_options { flags: 256, ..good },
        FLUX_ERROR_ARGUMENT,
        "options.flags = 0x100",
    );
    refused_with(
        flux_op_options { rms_norm_eps: 1.0, ..good },
        FLUX_ERROR_ARGUMENT,
        "without FLUX_OP_RMS_NORM",
    );
    refused_with(
        flux_op_options { norm_scales: 2, ..good },
        FLUX_ERROR_ARGUMENT,
        "options.norm_scales = 2: give a flux_scales with FLUX_OP_RMS_NORM, else 0",
    );
    refused_with(
        flux_op_options { norm_scales: 4, flags: FLUX_OP_RMS_NORM, ..good },
        FLUX_ERROR_ARGUMENT,
        "options.norm_scales = 4",
    );
    refused_with(flux_op_options { n: 20, ..good }, FLUX_ERROR_OPERAND, "20");
    refused_with(flux_op_options { max_m: 0, ..good }, FLUX_ERROR_OPERAND, "m");
    refused_with(
        flux_op_options { flags: FLUX_OP_RESIDUAL, ..good },
        FLUX_ERROR_OPERAND,
        "ag_gemm has no residual",
    );
    refused_with(
        flux_op_options { flags: FLUX_OP_RMS_NORM, ..good },
        FLUX_ERROR_OPERAND,
        "ag_gemm has no rms_norm",
    );
    refused_with(
        flux_op_options { flags: FLUX_OP_F32_PARTIALS, ..good },
        FLUX_ERROR_OPERAND,
        "ag_gemm has no partials",
    );
    let reduces = options(FLUX_GEMM_ALL_REDUCE);
    refused_with(
        flux_op_options { activation: 10, ..good },
        FLUX_ERROR_ARGUMENT,
        "options.activation = 10",
    );
    refused_with(
        flux_op_options { activation: 5, ..good },
        FLUX_ERROR_OPERAND,
        "pad the gates and the ups with zeros to 16 rows each",
    );
    let transposed = flux_op_options { activation: 5, n: 32, flags: FLUX_OP_WEIGHTS_KN, ..good };
    refused_with(transposed, FLUX_ERROR_OPERAND, "create the op without FLUX_OP_WEIGHTS_KN");
    refused_with(
        flux_op_options { activation: 5, ..reduces },
        FLUX_ERROR_OPERAND,
        "gemm_ar has no activation",
    );
    refused_with(
        flux_op_options { activation: 1, ..reduces },
        FLUX_ERROR_OPERAND,
        "gemm_ar has no activation",
    );
    let several = flux_op_options { columns: [8, 16, 0, 0], ..good };
    refused_with(
        flux_op_options { columns: [8, 0, 16, 0], ..good },
        FLUX_ERROR_ARGUMENT,
        "options.columns[1] = 0",
    );
    refused_with(
        flux_op_options { columns: [8, 8, 0, 0], ..good },
        FLUX_ERROR_OPERAND,
        "n = 24, and the weights have 16 columns",
    );
    refused_with(
        flux_op_options { columns: [12, 12, 0, 0], ..good },
        FLUX_ERROR_OPERAND,
        "options.columns[0] = 12 ",
    );
    refused_with(
        flux_op_options { flags: FLUX_OP_WEIGHTS_KN, ..several },
        FLUX_ERROR_OPERAND,
        "without FLUX_OP_WEIGHTS_KN",
    );
    let gated = flux_op_options { n: 32, columns: [16, 16, 0, 0], activation: 5, ..several };
    refused_with(gated, FLUX_ERROR_OPERAND, "an op with gates");
    let sums = flux_op_options { kind: reduces.kind, ..several };
    refused_with(sums, FLUX_ERROR_OPERAND, "gemm_ar has no several_weights");
    let norm = flux_op_options { flags: FLUX_OP_RMS_NORM, rms_norm_eps: f32::INFINITY, ..reduces };
    refused_with(norm, FLUX_ERROR_OPERAND, "eps must be a finite number");
    // SAFETY: no memory is read or written.
    refused(unsafe { flux_op_create(comm, null(), null_mut()) }, FLUX_ERROR_ARGUMENT, "op is NULL");
    done(flux_comm_destroy(comm));
}

#[test]
fn a_workspace_above_the_limit_is_refused() {
    let [Rank(comm)] = connected(flux_comm_options { max_workspace: 1, ..host() });
    refused(
        create(comm, options(FLUX_ALL_GATHER_GEMM)).0,
        FLUX_ERROR_BUILD,
        "above the limit of 1",
    );
    done(flux_comm_destroy(comm));
}

#[test]
fn bad_operands_are_refused_and_a_good_call_then_works() {
    let [Rank(comm)] = connected(host());
    let op =
        created(comm, flux_op_options { flags: FLUX_OP_BIAS, ..options(FLUX_ALL_GATHER_GEMM) });
    let (mut x, mut w, mut b, mut y) =
        (ones(17 * 32), ones(24 * 32), ones(24), vec![bf16::NAN; 17 * 24]);
    let (tx, tw, tb) =
        (tensor(&mut x[..8 * 32], 8, 32), tensor(&mut w, 24, 32), tensor(&mut b, 1, 24));
    let ty = tensor(&mut y[..8 * 24], 8, 24);
    let good = flux_operands { bias: &raw const tb, ..operands(&tx, &tw, &ty) };
    let operand = FLUX_ERROR_OPERAND;

    // SAFETY: no memory is read.
    refused(unsafe { flux_op_forward_host(op, null()) }, FLUX_ERROR_ARGUMENT, "operands is NULL");
    refused(
        forward(op, &flux_operands { size: 8, ..good }),
        FLUX_ERROR_ARGUMENT,
        "operands.size = 8",
    );
    refused(
        forward(op, &flux_operands { w: null(), ..good }),
        FLUX_ERROR_ARGUMENT,
        "operands.w is NULL",
    );
    refused(
        forward(op, &flux_operands { bias: null(), ..good }),
        operand,
        "operands.bias is NULL, and the op was created with FLUX_OP_BIAS",
    );
    refused(
        forward(op, &flux_operands { gain: &raw const tb, ..good }),
        operand,
        "operands.gain is given",
    );
    let with_x = |x: flux_tensor| forward(op, &flux_operands { x: &raw const x, ..good });
    refused(
        with_x(flux_tensor { dtype: 2, ..tx }),
        operand,
        "x: the memory holds fp16, the view is of bf16",
    );
    refused(with_x(flux_tensor { dtype: 0, ..tx }), FLUX_ERROR_ARGUMENT, "operands.x->dtype = 0");
    refused(
        with_x(flux_tensor { rows: 7, ..tx }),
        operand,
        "x is [7, 32], but ag_gemm with m = 8 takes [8, 32]",
    );
    refused(with_x(flux_tensor { cols: 24, ..tx }), operand, "x is [8, 24]");
    let short = flux_tensor { rows: 16, ..tw };
    let words = "give this rank's part of the weight, as flux_op_columns says";
    refused(forward(op, &flux_operands { w: &raw const short, ..good }), operand, words);
    let transposed = flux_tensor { rows: 32, cols: 24, ..tw };
    let words = "it looks transposed: weights are [n, k], or [k, n] of an op with \
                 FLUX_OP_WEIGHTS_KN";
    refused(forward(op, &flux_operands { w: &raw const transposed, ..good }), operand, words);
    refused(with_x(flux_tensor { data: null_mut(), ..tx }), operand, "x: the pointer is null");
    refused(
        with_x(flux_tensor { data: tx.data.wrapping_byte_add(2), ..tx }),
        operand,
        "is not a multiple of 16 bytes",
    );
    refused(
        with_x(flux_tensor { row_stride: 36, ..tx }),
        operand,
        "row stride 36 is not a multiple of 8",
    );
    refused(
        with_x(flux_tensor { row_stride: 24, ..tx }),
        operand,
        "row stride 24 is below the 32 columns",
    );
    refused(forward(op, &flux_operands { y: &raw const tx, ..good }), operand, "y is [8, 32]");
    let inside = flux_tensor { data: tw.data, ..ty };
    refused(forward(op, &flux_operands { y: &raw const inside, ..good }), operand, "overlaps w");
    let (long_x, long_y) = (tensor(&mut x, 17, 32), tensor(&mut y, 17, 24));
    let long = flux_operands { x: &raw const long_x, y: &raw const long_y, ..good };
    refused(forward(op, &long), operand, "m = 17 is above max_m = 16");
    // SAFETY: nothing is launched.
    refused(
        unsafe { flux_op_forward_cuda(op, &raw const good, null_mut()) },
        operand,
        "call flux_op_forward_host",
    );

    done(forward(op, &good));
    assert!(y[..8 * 24].iter().all(|&y| y == bf16::from_f32(33.0)), "32 ones and the bias");
    done(flux_op_destroy(op));
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

#[test]
fn a_communicator_says_what_it_is() {
    let [Rank(comm)] = connected(host());
    let (mut rank, mut world, mut device, mut graphs) = (9, 9, 9, 9);
    let (mut text, mut needed) = ([1; 8], 0);
    // SAFETY: all are places of this test.
    unsafe {
        done(flux_comm_place(comm, &raw mut rank, &raw mut world, &raw mut device));
        done(flux_comm_place(comm, null_mut(), null_mut(), null_mut()));
        done(flux_comm_graphs(comm, &raw mut graphs));
        done(flux_comm_memory(comm, null_mut(), null_mut(), null_mut()));
        done(flux_comm_explain(comm, null_mut(), 0, &raw mut needed));
        refused(
            flux_comm_explain(comm, null_mut(), 3, null_mut()),
            FLUX_ERROR_ARGUMENT,
            "text is NULL",
        );
        done(flux_comm_explain(comm, text.as_mut_ptr(), text.len(), null_mut()));
        assert_eq!(CStr::from_ptr(text.as_ptr()).to_bytes().len(), 7, "cut");
    }
    assert_eq!((rank, world, device, graphs), (0, 1, -1, 0));
    assert!(needed > 8);
    assert_eq!(flux_abi_version(), FLUX_ABI_VERSION);
    done(flux_comm_destroy(comm));
}

#[test]
fn a_peer_that_leaves_is_named() {
    let [Rank(comm), Rank(other)] = connected(host());
    done(flux_comm_destroy(other));
    let status = flux_comm_barrier(comm);
    assert!(
        matches!(status, FLUX_ERROR_PEER_LEFT | FLUX_ERROR_PEER_LOST),
        "{status:?}: {}",
        message()
    );
    let mut ranks = [9; 2];
    // SAFETY: there is room for two.
    assert_eq!(unsafe { flux_last_error_ranks(ranks.as_mut_ptr(), 2) }, 1);
    assert_eq!(ranks, [1, 9]);
    done(flux_comm_destroy(comm));
}

#[test]
fn an_aborted_communicator_says_so_and_is_rebuilt() {
    let ranks = connected::<2>(host());
    // A rank that rebuilds aborts the communicator, too.
    let aborted = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for comm in ranks {
            let aborted = &aborted;
            scope.spawn(move || {
                let Rank(comm) = { comm };
                let mut number = 9;
                // SAFETY: a place.
                done(unsafe { flux_comm_place(comm, &raw mut number, null_mut(), null_mut()) });
                if number == 0 {
                    done(flux_comm_abort(comm, 7));
                    refused(flux_comm_check(comm), FLUX_ERROR_ABORTED, "rank 0 aborted");
                }
                aborted.wait();
                let mut rebuilt = null_mut();
                // SAFETY: a place.
                let rebuild = |who, rebuilt| unsafe { flux_comm_rebuild(comm, who, rebuilt) };
                refused(rebuild(0, &raw mut rebuilt), FLUX_ERROR_ARGUMENT, "who = 0");
                done(rebuild(flux_rebuild::FLUX_REBUILD_SURVIVORS as i32, &raw mut rebuilt));
                done(flux_comm_destroy(comm));
                done(flux_comm_check(rebuilt));
                done(flux_comm_barrier(rebuilt));
                done(flux_comm_destroy(rebuilt));
            });
        }
    });
}

#[test]
fn processes_meet_in_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    let meeting = std::ffi::CString::new(folder.path().to_str().unwrap()).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let meeting = &meeting;
            scope.spawn(move || {
                let (options, mut comm) = (host(), null_mut());
                // SAFETY: text that ends, a structure and a place of this test.
                done(unsafe {
                    flux_comm_init_rank(
                        rank,
                        2,
                        meeting.as_ptr(),
                        null(),
                        0,
                        &raw const options,
                        &raw mut comm,
                    )
                });
                done(flux_comm_barrier(comm));
                done(flux_comm_destroy(comm));
            });
        }
    });
}
