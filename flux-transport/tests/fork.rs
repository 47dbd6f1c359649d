//! Ranks that fork: only the process that connected is the rank. The tests start their own binary
//! again.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;
mod lateness;

use common::options;
use flux_core::layout::WorkspaceSize;
use flux_core::{Rank, WorldSize};
use flux_transport::launch::{Failed, Launcher, Others};
use flux_transport::{Communicator, Fault, Stream, World};
use lateness::{AMPLE, assert_soon};
use std::time::{Duration, Instant};

/// What a rank process does.
const ROLE: &str = "FLUX_TEST_ROLE";
const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 0, signals: 100, counters: 100 };

fn launched(role: &str) -> Launcher {
    Launcher::new(WorldSize::new(2).unwrap(), std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "one_rank", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
}

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn one_rank() {
    let role = std::env::var(ROLE).unwrap();
    let world = World::from_env().unwrap();
    let comm = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
    let forks = comm.rank() == Rank::new(1);
    match role.as_str() {
        "its child leaves" if forks => {
            let child = fork(|| drop((comm.clone(), world)));
            // SAFETY: a child of this process; its status is not asked for.
            assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
            comm.barrier().unwrap();
        }
        "its child leaves" => comm.barrier().unwrap(),
        "is killed" if forks => {
            fork(|| {
                // Of no group that the launcher ends, and without its pipes.
                // SAFETY: system calls; the child prints nothing.
                unsafe {
                    libc::setsid();
                    libc::close(1);
                    libc::close(2);
                }
                std::thread::sleep(Duration::from_secs(5));
            });
            comm.barrier().unwrap();
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .unwrap();
        }
        "is killed" => {
            comm.barrier().unwrap();
            let began = Instant::now();
            while comm.status().is_ok() {
                assert!(began.elapsed() < AMPLE);
            }
            assert_soon(began.elapsed(), Duration::from_secs(1));
            let fault = comm.status().unwrap_err();
            assert!(
                matches!(fault, Fault::PeerLost { rank, .. } if rank == Rank::new(1)),
                "{fault}"
            );
        }
        "leaves without a word" if forks => {
            comm.begin(Stream::Host).unwrap().finish().unwrap();
            world.control().barrier(Instant::now() + AMPLE).unwrap();
            drop(comm);
            // SAFETY: ends the process, without handlers and destructors.
            unsafe { libc::_exit(0) };
        }
        "leaves without a word" => {
            comm.begin(Stream::Host).unwrap().finish().unwrap();
            world.control().barrier(Instant::now() + AMPLE).unwrap();
            let gone = world.control().barrier(Instant::now() + AMPLE);
            assert!(gone.is_err(), "rank 1 takes no further step");
            assert_eq!(comm.status(), Ok(()), "it had left the communicator before");
        }
        role => panic!("no such role: {role}"),
    }
}

/// Runs `body` in a child, which then ends without a word; returns its number.
fn fork(body: impl FnOnce()) -> i32 {
    // SAFETY: the child uses what no other thread of this process holds a lock of: this test's
    // thread is the only one that allocates or uses the communicator.
    match unsafe { libc::fork() } {
        0 => {
            body();
            // SAFETY: ends the child, which is done, and not the process that forked.
            unsafe { libc::_exit(0) }
        }
        child => child,
    }
}

#[test]
fn a_child_of_a_rank_leaves_nothing_in_its_name() {
    let status = launched("its child leaves").run().unwrap();
    assert!(status.success(), "a rank failed; its words are above: {status}");
}

#[test]
fn a_killed_rank_is_lost_at_once_though_its_child_lives() {
    let go_on = |failed: &Failed| {
        assert_eq!(failed.rank, Rank::new(1));
        Others::GoOn
    };
    let status = launched("is killed").on_failure(go_on).run().unwrap();
    assert_eq!(flux_transport::launch::exit_code(status), 128 + 9);
}

#[test]
fn a_rank_that_has_left_its_communicator_may_end_as_it_likes() {
    let status = launched("leaves without a word").run().unwrap();
    assert!(status.success(), "a rank failed; its words are above: {status}");
}
