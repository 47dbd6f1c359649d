//! Communicators of processes, again and again: descriptors, threads and mappings come back. The
//! test starts its own binary again.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;

use common::options;
use flux_core::WorldSize;
use flux_core::layout::WorkspaceSize;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{Communicator, Stream, World};

/// Set for the processes that are ranks.
const IS_RANK: &str = "FLUX_TEST_IS_RANK";
const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 0, signals: 100, counters: 100 };

#[test]
fn a_thousand_communicators_of_processes_leave_nothing_behind() {
    let ranks = WorldSize::new(3).unwrap();
    let status = Launcher::new(ranks, std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "one_rank", "--nocapture", "--test-threads=1"])
        .env(IS_RANK, "1")
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

/// Descriptors, threads and mappings of shared memory, which return to the start value.
fn held() -> [usize; 3] {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    [
        count("/proc/self/fd"),
        count("/proc/self/task"),
        maps.lines().filter(|line| line.contains("/memfd:flux")).count(),
    ]
}

/// The entry of the processes that the test starts.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn one_rank() {
    assert!(std::env::var_os(IS_RANK).is_some(), "a process of the test above");
    let world = World::from_env().unwrap();
    // The threads on which it met the others end a moment later.
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let meets = |task: std::path::PathBuf| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with("flux-meet"))
    };
    while threads().any(meets) {
        std::thread::yield_now();
    }
    let before = held();
    for round in 0..1000 {
        let comm = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        comm.begin(Stream::Host).unwrap().finish().unwrap();
        if round % 10 == 0 {
            comm.reserve(WorkspaceSize { signals: 200, ..SIZE }).unwrap();
            assert_eq!(held()[2], 3, "a mapping of each rank's memory");
        }
    }
    // A join returns a moment before the system forgets the thread.
    let end = std::time::Instant::now() + std::time::Duration::from_mins(1);
    while held() != before && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert_eq!(held(), before);
    assert_eq!(before[2], 0);
}
