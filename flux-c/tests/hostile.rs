//! Every function of the interface with hostile counts, sizes and numbers.
//!
//! Each buffer ends at a page that cannot be accessed, so that one byte too many ends the test.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use flux_tp_c::flux_status::*;
use flux_tp_c::*;
use half::bf16;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};

const PAGE: usize = 64 << 10;
const HUGE: [usize; 5] = [usize::MAX, isize::MAX as usize, 1 << 62, 1 << 33, u32::MAX as usize];

/// Memory between two pages that cannot be accessed; it lives as long as the process.
fn guarded<T: Copy>(values: &[T]) -> *mut T {
    let bytes = size_of_val(values);
    assert!(bytes <= PAGE);
    // SAFETY: new pages; only the middle one is used below.
    let start = unsafe {
        rustix::mm::mmap_anonymous(null_mut(), 3 * PAGE, ProtFlags::empty(), MapFlags::PRIVATE)
    }
    .unwrap();
    let middle = start.wrapping_byte_add(PAGE);
    // SAFETY: the middle page of those that were mapped above.
    unsafe { rustix::mm::mprotect(middle, PAGE, MprotectFlags::READ | MprotectFlags::WRITE) }
        .unwrap();
    let place = middle.wrapping_byte_add(PAGE - bytes).cast::<T>();
    assert!(place.is_aligned());
    // SAFETY: the last bytes of the page, as many as the values have.
    unsafe { place.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    place
}

#[track_caller]
fn refused(status: flux_status) {
    assert!(
        matches!(
            status,
            FLUX_ERROR_ARGUMENT
                | FLUX_ERROR_HANDLE
                | FLUX_ERROR_OPERAND
                | FLUX_ERROR_CONNECT
                | FLUX_ERROR_BUILD
        ),
        "{status:?}"
    );
}

fn host() -> flux_comm_options {
    flux_comm_options {
        size: size_of::<flux_comm_options>(),
        transport: c"host".as_ptr(),
        timeout: 0.0,
        max_workspace: 0,
        sm_margin: 0,
        has_device: 0,
        device: 0,
        reserved: 0,
    }
}

fn comm() -> *mut flux_comm {
    let (options, place) = (guarded(&[host()]), guarded(&[null_mut::<flux_comm>()]));
    // SAFETY: the options and room for one handle.
    unsafe {
        assert_eq!(flux_comm_init_all(1, options, place), FLUX_OK);
        place.read()
    }
}

fn op_options() -> flux_op_options {
    flux_op_options {
        size: size_of::<flux_op_options>(),
        kind: flux_op_kind::FLUX_ALL_GATHER_GEMM as i32,
        dtype: flux_dtype::FLUX_BF16 as i32,
        max_m: 16,
        n: 24,
        k: 32,
        columns: [0; FLUX_MAX_WEIGHTS],
        flags: 0,
        activation: 0,
        rms_norm_eps: 0.0,
        scales: 0,
        output: 0,
        norm_scales: 0,
    }
}

fn create(comm: *const flux_comm, options: flux_op_options) -> (flux_status, *mut flux_op) {
    let place = guarded(&[null_mut::<flux_op>()]);
    // SAFETY: the options and room for one handle.
    unsafe { (flux_op_create(comm, guarded(&[options]), place), place.read()) }
}

fn op(comm: *const flux_comm) -> *mut flux_op {
    let (status, op) = create(comm, op_options());
    assert_eq!(status, FLUX_OK);
    op
}

#[test]
fn a_world_of_any_number_of_ranks_is_checked_before_anything_is_written() {
    let handle = std::ptr::dangling_mut::<flux_comm>();
    for size in [0, 17, 1 << 16, u32::MAX / 2, u32::MAX] {
        let place = guarded(&[handle]);
        // SAFETY: room for one handle, which is not written.
        unsafe {
            refused(flux_comm_init_all(size, guarded(&[host()]), place));
            assert_eq!(place.read(), handle);
            let meeting = c"127.0.0.1:9".as_ptr();
            let secret = guarded(&[7_u8; 16]).cast_const().cast::<c_void>();
            refused(flux_comm_init_rank(0, size, meeting, secret, 16, null(), place));
        }
    }
}

#[test]
fn sizes_of_secrets_and_structures_are_checked_before_they_are_read() {
    let (meeting, place) = (c"127.0.0.1:9".as_ptr(), guarded(&[null_mut::<flux_comm>()]));
    let secret = guarded(&[7_u8; 16]).cast_const().cast::<c_void>();
    for size in HUGE.into_iter().chain([0, 15, 4097]) {
        // SAFETY: no more of the secret than 16 bytes is read.
        refused(unsafe { flux_comm_init_rank(0, 2, meeting, secret, size, null(), place) });
        let short = guarded(&[size]);
        // SAFETY: no more of a structure is read than its size.
        unsafe {
            refused(flux_comm_init_all(1, short.cast(), place));
            refused(flux_comm_from_env(short.cast(), place));
            refused(flux_comm_init_rank(0, 2, meeting, secret, 16, short.cast(), place));
        }
    }
    // SAFETY: rank 7 of two.
    refused(unsafe { flux_comm_init_rank(7, 2, meeting, secret, 16, null(), place) });
    for deadline in [f64::NAN, f64::INFINITY, -1.0, f64::MAX, 1e-300] {
        let options = flux_comm_options { timeout: deadline, ..host() };
        // SAFETY: room for one handle.
        let status = unsafe { flux_comm_init_all(1, guarded(&[options]), place) };
        refused(status);
    }
}

#[test]
fn a_text_has_no_more_bytes_than_there_is_room() {
    let comm = comm();
    let op = op(comm);
    for capacity in [0, 1, 2, 9] {
        let room = guarded(&vec![9_u8; capacity.max(1)]);
        let needed = guarded(&[0_usize]);
        // SAFETY: room for `capacity` bytes, and for one number.
        unsafe {
            let room = room.byte_add(capacity.max(1) - capacity).cast::<c_char>();
            assert_eq!(flux_comm_explain(comm, room, capacity, needed), FLUX_OK);
            assert!(needed.read() > capacity);
            assert_eq!(flux_op_explain(op, room, capacity, null_mut()), FLUX_OK);
        }
    }
    // SAFETY: nothing is written where there is no place.
    unsafe {
        refused(flux_comm_explain(comm, null_mut(), usize::MAX, null_mut()));
        refused(flux_op_explain(op, null_mut(), usize::MAX, null_mut()));
        assert_eq!(flux_last_error_ranks(null_mut(), usize::MAX), 0);
    }
    assert_eq!((flux_op_destroy(op), flux_comm_destroy(comm)), (FLUX_OK, FLUX_OK));
}

#[test]
fn extents_of_an_op_are_checked_before_they_are_multiplied() {
    let comm = comm();
    let good = op_options();
    for huge in HUGE {
        for options in [
            flux_op_options { max_m: huge, ..good },
            flux_op_options { n: huge, ..good },
            flux_op_options { n: huge & !7, ..good },
            flux_op_options { k: huge, ..good },
            flux_op_options { k: huge & !7, ..good },
            flux_op_options { columns: [huge; FLUX_MAX_WEIGHTS], ..good },
            flux_op_options { columns: [huge & !7; FLUX_MAX_WEIGHTS], ..good },
            flux_op_options { size: huge, ..good },
        ] {
            let (status, op) = create(comm, options);
            refused(status);
            assert!(op.is_null());
        }
    }
    for number in [i32::MIN, -1, 99, i32::MAX] {
        for options in [
            flux_op_options { kind: number, ..good },
            flux_op_options { dtype: number, ..good },
            flux_op_options { activation: number, ..good },
            flux_op_options { scales: number, ..good },
            flux_op_options { output: number, ..good },
        ] {
            refused(create(comm, options).0);
        }
    }
    assert_eq!(flux_comm_destroy(comm), FLUX_OK);
}

#[test]
fn counts_and_numbers_of_an_op_are_checked() {
    let comm = comm();
    let op = op(comm);
    let (first, count) = (guarded(&[0_usize]), guarded(&[0_usize]));
    let rows = guarded(&[8_usize]);
    // SAFETY: one number of rows, and two places.
    unsafe {
        for huge in HUGE.into_iter().chain([18]) {
            refused(flux_op_prepare(op, rows, huge));
            refused(flux_op_prepare(op, guarded(&[huge]), 1));
            refused(flux_op_rows(op, huge, 0, first, count));
            refused(flux_op_weight_columns(op, huge, 0, first, count));
        }
        assert_eq!(flux_op_prepare(op, rows, 1), FLUX_OK);
        for rank in [1, 16, u32::MAX] {
            refused(flux_op_rows(op, 8, rank, first, count));
            refused(flux_op_columns(op, rank, first, count));
            refused(flux_op_weight_columns(op, 0, rank, first, count));
            refused(flux_op_inner(op, rank, first, count));
        }
        for who in [i32::MIN, 0, 3, i32::MAX] {
            refused(flux_comm_rebuild(comm, who, guarded(&[null_mut::<flux_comm>()])));
        }
        assert_eq!(flux_comm_place(comm, null_mut(), null_mut(), null_mut()), FLUX_OK);
        assert_eq!(flux_comm_memory(comm, null_mut(), null_mut(), null_mut()), FLUX_OK);
        refused(flux_comm_graphs(comm, null_mut()));
    }
    assert_eq!((flux_op_destroy(op), flux_comm_destroy(comm)), (FLUX_OK, FLUX_OK));
}

#[test]
fn a_matrix_that_no_memory_holds_is_not_read() {
    let comm = comm();
    let op = op(comm);
    let matrix = |rows: usize, cols: usize| flux_tensor {
        data: guarded(&vec![bf16::ONE; rows * cols]).cast(),
        rows,
        cols,
        row_stride: 0,
        dtype: flux_dtype::FLUX_BF16 as i32,
    };
    let (x, w, y) = (matrix(8, 32), matrix(24, 32), matrix(8, 24));
    let call_with = |x, w, y, size, weight_count, constant_weights| {
        let operands = flux_operands {
            size,
            x: guarded(&[x]),
            w: guarded(&[w]),
            scale_x: null(),
            scale_w: null(),
            bias: null(),
            residual: null(),
            gain: null(),
            norm_scale: null(),
            y: guarded(&[y]),
            y_norm: null(),
            y_norm_scale: null(),
            x_full: null(),
            weight_count,
            constant_weights,
        };
        // SAFETY: tensors whose memory is as they say, or that are refused.
        unsafe { flux_op_forward_host(op, guarded(&[operands])) }
    };
    let call = |x, w, y, size, weight_count| call_with(x, w, y, size, weight_count, 0);
    let size = size_of::<flux_operands>();
    for huge in HUGE {
        refused(call_with(x, w, y, size, 0, huge));
        refused(call(flux_tensor { rows: huge, ..x }, w, flux_tensor { rows: huge, ..y }, size, 0));
        refused(call(flux_tensor { cols: huge, ..x }, w, y, size, 0));
        refused(call(x, flux_tensor { rows: huge, ..w }, y, size, 0));
        refused(call(x, w, y, huge, 0));
        refused(call(x, w, y, size, huge));
    }
    // A stride that no address space holds; of a smaller one only the caller knows the memory.
    for huge in HUGE.into_iter().filter(|&huge| huge > 1 << 60) {
        refused(call(flux_tensor { row_stride: huge & !7, ..x }, w, y, size, 0));
        refused(call(x, flux_tensor { row_stride: huge & !7, ..w }, y, size, 0));
        refused(call(x, w, flux_tensor { row_stride: huge & !7, ..y }, size, 0));
    }
    // SAFETY: the size alone is read of a structure that is shorter.
    refused(unsafe { flux_op_forward_host(op, guarded(&[size - 8]).cast()) });
    assert_eq!(call(x, w, y, size, 0), FLUX_OK);
    assert_eq!((flux_op_destroy(op), flux_comm_destroy(comm)), (FLUX_OK, FLUX_OK));
}

#[test]
fn numbers_that_are_no_handles_are_refused_by_every_function() {
    for number in [0, 1, 5, 9, usize::MAX, guarded(&[0_u8]).addr()] {
        let comm = std::ptr::without_provenance_mut::<flux_comm>(number);
        let op = std::ptr::without_provenance_mut::<flux_op>(number);
        // SAFETY: no handle is read as an address, and nothing is written without one.
        let all = unsafe {
            [
                flux_comm_destroy(comm),
                flux_comm_rebuild(comm, 1, null_mut()),
                flux_comm_place(comm, null_mut(), null_mut(), null_mut()),
                flux_comm_graphs(comm, null_mut()),
                flux_comm_memory(comm, null_mut(), null_mut(), null_mut()),
                flux_comm_explain(comm, null_mut(), usize::MAX, null_mut()),
                flux_comm_check(comm),
                flux_comm_barrier(comm),
                flux_comm_abort(comm, u32::MAX),
                create(comm, op_options()).0,
                flux_op_destroy(op),
                flux_op_prepare(op, null(), usize::MAX),
                flux_op_rows(op, 0, 0, null_mut(), null_mut()),
                flux_op_columns(op, 0, null_mut(), null_mut()),
                flux_op_weight_columns(op, 0, 0, null_mut(), null_mut()),
                flux_op_inner(op, 0, null_mut(), null_mut()),
                flux_op_explain(op, null_mut(), usize::MAX, null_mut()),
                flux_op_forward_host(op, null()),
                flux_op_forward_cuda(op, null(), null_mut()),
            ]
        };
        assert_eq!(all, all.map(|_| FLUX_ERROR_HANDLE));
    }
}
