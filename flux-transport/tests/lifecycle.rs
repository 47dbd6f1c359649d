//! Connecting and leaving, again and again: threads, descriptors and memory come back.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]
// One test: it counts the process's threads.
#![cfg(target_os = "linux")]

mod common;

use common::{each_rank, options};
use flux_core::layout::WorkspaceSize;
use flux_transport::{Communicator, Stream};
use std::time::{Duration, Instant};

/// Mappings of this process.
fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Threads, open descriptors and resident KiB of this process.
fn usage() -> (u64, usize, u64) {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (field("Threads:"), std::fs::read_dir("/proc/self/fd").unwrap().count(), field("VmRSS:"))
}

fn cycle(rounds: u32) {
    const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 1 << 20, signals: 1000, counters: 100 };
    for _ in 0..rounds {
        // half of the cycles make a new world, half a new communicator of the same
        each_rank(4, |world| {
            for round in 0..2 {
                let comm = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
                comm.begin(Stream::Host).unwrap().finish().unwrap();
                if round == 0 {
                    comm.reserve(WorkspaceSize { signals: 2000, ..SIZE }).unwrap();
                }
            }
        });
    }
}

#[test]
fn a_thousand_communicators_leave_nothing_behind() {
    let threads = usage().0;
    cycle(50);
    let (_, descriptors, kib) = usage();
    let mapped = mappings();
    cycle(500);
    // a scope waits for its threads' results; the system takes a moment longer to forget them
    let end = Instant::now() + Duration::from_mins(1);
    while usage().0 > threads && Instant::now() < end {
        std::thread::yield_now();
    }
    let (threads_after, descriptors_after, kib_after) = usage();
    assert_eq!(threads_after, threads);
    assert_eq!(descriptors_after, descriptors);
    // The allocator reuses arenas of ended threads, two mappings each, and adds 0 to 10 mappings on
    // two cores. One mapping lost in each tenth cycle would be 50.
    assert!(mappings() <= mapped + 40, "{mapped} mappings before, {} after", mappings());
    // A cycle of 4 ranks touches three pads of 125 to 250 KiB each: 500 lost ones would be 1 GiB.
    assert!(kib_after < kib + (50 << 10), "{kib} KiB before, {kib_after} KiB after");
}
