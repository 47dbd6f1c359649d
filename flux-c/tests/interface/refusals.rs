//! Options and operands that an op refuses.

use crate::support::*;
use flux_tp_c::flux_op_kind::{FLUX_ALL_GATHER_GEMM, FLUX_GEMM_ALL_REDUCE};
use flux_tp_c::flux_status::*;
use flux_tp_c::*;
use half::bf16;
use std::ptr::{null, null_mut};

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
