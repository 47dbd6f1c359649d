//! A call that has seen its program allocates nothing, on the caller's thread and the mover's.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;

use common::{Words, each_rank, options};
use flux_core::layout::WorkspaceSize;
use flux_core::program::Transfer;
use flux_transport::{Communicator, Job, RowTransfers, Stream};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counting what all threads take.
struct Counting;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_call_allocates_nothing() {
    const CHUNKS: u32 = 3000;
    let size = WorkspaceSize { half_bytes: u64::from(CHUNKS) * 16, signals: CHUNKS, counters: 0 };
    let aligned = Barrier::new(2);
    each_rank(2, |world| {
        let comm = Communicator::connect_blocking(&world, options(size)).unwrap();
        let rank = comm.rank().get();
        let x = vec![0u8; CHUNKS as usize * 16];
        let transfer = |row| Transfer {
            dest: 1 - rank,
            row,
            rows: 1,
            cols: 16,
            raise: row,
            ..Transfer::default()
        };
        let transfers: Vec<Transfer> = (0..CHUNKS).map(transfer).collect();
        let words = Words::new(comm.begin(Stream::Host).unwrap().memory(), comm.rank());
        let address = x.as_ptr().expose_provenance() as u64;
        let place_bytes = size.half_bytes;
        let job = Job::Rows(RowTransfers {
            x: address,
            row_stride: 16,
            row_bytes: 16,
            element_bytes: 1,
            rows: 1,
            place_bytes,
            full_places: u32::MAX,
            transfers: &transfers,
            forwards: &[],
        });
        let one = || {
            let mut call = comm.begin(Stream::Host).unwrap();
            // SAFETY: `x` outlives the call.
            let started = unsafe { call.start(&job) }.unwrap();
            words.leave(words.open(), started.pushes).unwrap();
            call.finish().unwrap();
            comm.status().unwrap();
        };
        one();
        aligned.wait();
        let before = TAKEN.load(Ordering::Relaxed);
        aligned.wait();
        for _ in 0..20 {
            one();
        }
        aligned.wait();
        let after = TAKEN.load(Ordering::Relaxed);
        aligned.wait();
        assert_eq!(after, before);
    });
}
