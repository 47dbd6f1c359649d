//! Communicators and handles.

use crate::support::*;
use flux_tp_c::flux_op_kind::FLUX_ALL_GATHER_GEMM;
use flux_tp_c::flux_status::*;
use flux_tp_c::*;
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

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
