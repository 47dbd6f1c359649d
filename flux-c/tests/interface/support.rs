//! A host communicator, and operands of one rank, as the tests give them.

use flux_tp_c::flux_status::FLUX_OK;
use flux_tp_c::*;
use half::bf16;
use std::ffi::CStr;
use std::ptr::{null, null_mut};

/// Handles travel to the threads of their ranks.
#[derive(Clone, Copy)]
pub(crate) struct Rank(pub(crate) *mut flux_comm);
// SAFETY: the interface takes handles on any thread.
unsafe impl Send for Rank {}

pub(crate) fn message() -> String {
    // SAFETY: the message of this thread.
    unsafe { CStr::from_ptr(flux_last_error_message()) }.to_str().unwrap().to_owned()
}

/// Checks a refusal and its words.
#[track_caller]
pub(crate) fn refused(status: flux_status, expected: flux_status, words: &str) {
    assert_eq!(status, expected, "{}", message());
    assert!(message().contains(words), "{} has not `{words}`", message());
}

#[track_caller]
pub(crate) fn done(status: flux_status) {
    assert_eq!(status, FLUX_OK, "{}", message());
}

pub(crate) fn host() -> flux_comm_options {
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

pub(crate) fn connected<const W: usize>(options: flux_comm_options) -> [Rank; W] {
    let mut comms = [null_mut(); W];
    // SAFETY: there is room for all.
    done(unsafe { flux_comm_init_all(W as u32, &raw const options, comms.as_mut_ptr()) });
    comms.map(Rank)
}

/// Of a world of one: at most 16 rows, 24 columns of 32 products.
pub(crate) fn options(kind: flux_op_kind) -> flux_op_options {
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

pub(crate) fn create(
    comm: *const flux_comm,
    options: flux_op_options,
) -> (flux_status, *mut flux_op) {
    let mut op = std::ptr::dangling_mut();
    // SAFETY: structures and a place of this test.
    let status = unsafe { flux_op_create(comm, &raw const options, &raw mut op) };
    (status, op)
}

pub(crate) fn created(comm: *const flux_comm, options: flux_op_options) -> *mut flux_op {
    let (status, op) = create(comm, options);
    done(status);
    op
}

pub(crate) fn tensor(values: &mut [bf16], rows: usize, cols: usize) -> flux_tensor {
    assert_eq!(values.len(), rows * cols);
    flux_tensor {
        data: values.as_mut_ptr().cast(),
        rows,
        cols,
        row_stride: 0,
        dtype: flux_dtype::FLUX_BF16 as i32,
    }
}

pub(crate) fn ones(elements: usize) -> Vec<bf16> {
    vec![bf16::ONE; elements]
}

pub(crate) fn operands(x: &flux_tensor, w: &flux_tensor, y: &flux_tensor) -> flux_operands {
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

pub(crate) fn forward(op: *const flux_op, operands: &flux_operands) -> flux_status {
    // SAFETY: tensors of this test, which outlive the call.
    unsafe { flux_op_forward_host(op, operands) }
}
