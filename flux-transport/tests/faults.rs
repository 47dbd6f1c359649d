//! Ranks that are late, gone or panicking: who is named, how fast, and that nothing hangs.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;

mod lateness;
use common::{Words, each_rank, options};
use flux_core::Rank;
use flux_core::layout::{WorkspaceSize, signal_offset};
use flux_core::program::Transfer;
use flux_core::signal::Epoch;
use flux_transport::{
    CallState, Communicator, ConnectError, ControlError, Fault, Job, Options, RowTransfers, Stream,
    TransportError, Wait, World,
};
use lateness::{AMPLE, assert_soon, scaled};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 4096, signals: 8, counters: 2 };
const SECOND: Duration = Duration::from_secs(1);

fn connect(world: &World) -> Communicator {
    Communicator::connect_blocking(world, options(SIZE)).unwrap()
}

/// An executor that waits for `signal` of `peer` in the next call; says how long it took to fail.
fn wait_in_vain(comm: &Communicator, signal: u32, peer: u32) -> Duration {
    let call = match comm.begin(Stream::Host) {
        Ok(call) => call,
        // a peer was so fast that it is known before the call
        Err(TransportError::Broken { .. }) => return Duration::ZERO,
        Err(other) => panic!("{other}"),
    };
    let words = Words::new(call.memory(), comm.rank());
    let start = Instant::now();
    words.wait(&words.open(), signal, Rank::new(peer)).unwrap_err();
    call.finish().unwrap();
    start.elapsed()
}

#[test]
fn a_late_rank_gets_a_timeout_that_names_it_and_the_fault_stays() {
    let waited = Barrier::new(3);
    each_rank(3, |world| {
        let deadline = scaled(Duration::from_millis(200));
        let comm =
            Communicator::connect_blocking(&world, Options { deadline, ..options(SIZE) }).unwrap();
        if world.rank().get() != 0 {
            // It is late, but has not left.
            waited.wait();
        } else {
            let took = wait_in_vain(&comm, 5, 2);
            assert!(took >= deadline, "{took:?}");
            assert_soon(took, SECOND);
            let fault = comm.status().unwrap_err();
            match &fault {
                Fault::Timeout {
                    rank,
                    peer,
                    wait: Wait::Signal,
                    signal: 5,
                    expected,
                    seen,
                    epoch,
                    ..
                } => {
                    assert_eq!((rank.get(), peer.get()), (0, 2));
                    assert_eq!((*expected, *seen, *epoch), (Epoch::FIRST, 0, Epoch::FIRST));
                }
                other => panic!("{other}"),
            }
            comm.abort(77);
            assert_eq!(comm.status(), Err(fault.clone()), "the first fault is the fault");
            match comm.begin(Stream::Host) {
                Err(TransportError::Broken { fault: again }) => assert_eq!(again, fault),
                other => panic!("{other:?}"),
            }
            waited.wait();
        }
    });
}

#[test]
fn ranks_that_failed_because_of_a_late_one_and_have_left_are_not_taken_for_late() {
    let late = Rank::new(2);
    let named = Mutex::new(Vec::new());
    let (begun, told, refused, done) =
        (Barrier::new(5), Barrier::new(5), Barrier::new(5), Barrier::new(5));
    let meet = |barriers: &[&Barrier]| barriers.iter().for_each(|barrier| _ = barrier.wait());
    each_rank(5, |world| {
        let comm =
            Communicator::connect_blocking(&world, Options { deadline: SECOND, ..options(SIZE) })
                .unwrap();
        let rank = world.rank().get();
        // Compared at the end, so that no rank waits for one whose comparison has failed.
        let names = |fault: Fault| match fault {
            Fault::Timeout { late, .. } => named.lock().unwrap().push((rank, late)),
            other => panic!("{other}"),
        };
        match rank {
            // It waits for the late one in vain, and leaves.
            1 => {
                begun.wait();
                wait_in_vain(&comm, 5, late.get());
                names(comm.status().unwrap_err());
                drop((comm, world));
                meet(&[&told, &refused, &done]);
            }
            // It is refused a call because of that, and leaves.
            0 => {
                meet(&[&begun, &told]);
                match comm.begin(Stream::Host) {
                    Err(TransportError::Broken { fault }) => names(fault),
                    other => panic!("{other:?}"),
                }
                drop((comm, world));
                meet(&[&refused, &done]);
            }
            2 => meet(&[&begun, &told, &refused, &done]),
            // They wait for one of these each, in calls that they began before.
            _ => {
                let call = comm.begin(Stream::Host).unwrap();
                meet(&[&begun, &told, &refused]);
                let words = Words::new(call.memory(), comm.rank());
                words.wait(&words.open(), 6, Rank::new(rank - 3)).unwrap_err();
                call.finish().unwrap();
                names(comm.status().unwrap_err());
                done.wait();
            }
        }
    });
    let mut named = named.into_inner().unwrap();
    named.sort_by_key(|&(rank, _)| rank);
    assert_eq!(named, [0, 1, 3, 4].map(|rank| (rank, vec![late])));
}

#[test]
fn a_call_that_fails_after_a_peers_did_has_failed_though_that_was_heard_first() {
    let (begun, told) = (Barrier::new(3), Barrier::new(3));
    each_rank(3, |world| {
        let comm =
            Communicator::connect_blocking(&world, Options { deadline: SECOND, ..options(SIZE) })
                .unwrap();
        let rank = world.rank().get();
        let call = (rank == 0).then(|| comm.begin(Stream::Host).unwrap());
        begun.wait();
        if rank == 1 {
            wait_in_vain(&comm, 5, 2);
            comm.status().unwrap_err();
        }
        told.wait();
        if let Some(call) = call {
            assert!(comm.is_broken(), "as another thread may ask during the call");
            let words = Words::new(call.memory(), comm.rank());
            words.wait(&words.open(), 6, Rank::new(2)).unwrap_err();
            call.finish().unwrap();
            assert_eq!(comm.calls().last().unwrap().state, CallState::Failed);
        }
    });
}

#[test]
fn a_rank_that_does_not_come_to_a_host_step_is_named() {
    let late = Barrier::new(3);
    each_rank(3, |world| {
        let comm = Communicator::connect_blocking(
            &world,
            Options { deadline: scaled(Duration::from_millis(300)), ..options(SIZE) },
        )
        .unwrap();
        if world.rank().get() != 1 {
            match comm.barrier().unwrap_err() {
                TransportError::Control(ControlError::Timeout { missing, .. }) => {
                    assert_eq!(missing, [Rank::new(1)]);
                }
                other => panic!("{other}"),
            }
        }
        late.wait();
    });
}

#[test]
fn a_rank_that_panics_is_lost_to_all_within_a_second() {
    let connected = Barrier::new(4);
    std::thread::scope(|scope| {
        for world in World::local(4).unwrap() {
            let connected = &connected;
            scope.spawn(move || {
                let rank = world.rank().get();
                let comm = connect(&world);
                connected.wait();
                if rank == 2 {
                    std::thread::sleep(Duration::from_millis(50));
                    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                        let _both = (comm, world);
                        std::panic::resume_unwind(Box::new("a rank's panic"));
                    }));
                    assert!(panic.is_err());
                    return;
                }
                // one in a call, one in a step of the control plane, one at rest
                match rank {
                    0 => assert_soon(wait_in_vain(&comm, 0, 2), SECOND),
                    1 => {
                        let start = Instant::now();
                        let error = comm.barrier().unwrap_err();
                        assert!(matches!(error, TransportError::Broken { fault: Fault::PeerLost { rank, .. } } if rank.get() == 2), "{error}");
                        assert_soon(start.elapsed(), SECOND);
                    }
                    _ => assert!(wait_until(|| comm.status().is_err())),
                }
                match comm.status().unwrap_err() {
                    Fault::PeerLost { rank, .. } => assert_eq!(rank.get(), 2),
                    other => panic!("{other}"),
                }
                assert!(matches!(comm.begin(Stream::Host), Err(TransportError::Broken { fault: Fault::PeerLost { .. } })));
                assert!(comm.reserve(WorkspaceSize { signals: 100, ..SIZE }).is_err());
            });
        }
    });
}

#[test]
fn a_communicator_dropped_by_a_panic_is_lost_though_its_world_lives() {
    each_rank(2, |world| {
        let comm = connect(&world);
        if world.rank().get() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                let _dropped = comm;
                std::panic::resume_unwind(Box::new("a rank's panic"));
            }));
            assert!(panic.is_err());
            world.control().barrier(Instant::now() + AMPLE).unwrap();
        } else {
            assert_soon(wait_in_vain(&comm, 0, 1), SECOND);
            assert!(matches!(comm.status(), Err(Fault::PeerLost { rank, .. }) if rank.get() == 1));
            world.control().barrier(Instant::now() + AMPLE).unwrap();
        }
    });
}

#[test]
fn a_rank_that_leaves_in_good_order_is_no_loss() {
    let left = Barrier::new(2);
    std::thread::scope(|scope| {
        for world in World::local(2).unwrap() {
            let left = &left;
            scope.spawn(move || {
                let comm = connect(&world);
                if world.rank().get() == 0 {
                    drop((comm, world));
                    left.wait();
                } else {
                    left.wait();
                    assert_eq!(comm.status(), Ok(()));
                    let error = comm.barrier().unwrap_err();
                    assert!(
                        matches!(error, TransportError::Control(ControlError::PeerLeft { rank })
                        if rank.get() == 0),
                        "{error}"
                    );
                }
            });
        }
    });
}

/// Makes a call with no executor, so that it ends.
fn make_a_call(comm: &Communicator) {
    comm.begin(Stream::Host).unwrap().finish().unwrap();
}

#[test]
fn a_rank_that_leaves_before_a_call_ends_it_at_once_wherever_it_is() {
    let left = Barrier::new(3);
    let is_gone = |fault: &Fault| {
        assert!(matches!(fault, Fault::PeerLeft { rank, .. } if rank.get() == 1), "{fault}");
    };
    each_rank(4, |world| {
        let comm = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        match world.rank().get() {
            // It stays in the world: only its communicator is gone.
            1 => {
                std::thread::sleep(Duration::from_millis(50));
                drop(comm);
                left.wait();
            }
            // One waits for it in a call, which it is in.
            0 => {
                assert_soon(wait_in_vain(&comm, 0, 1), SECOND);
                left.wait();
                is_gone(&comm.status().unwrap_err());
                let failure = comm.failure().unwrap().to_string();
                assert!(
                    failure.starts_with("rank 1 has left")
                        && failure.contains("rank 1: has left and made no call"),
                    "{failure}"
                );
            }
            // One begins a call that it has left before, and nothing is wrong until then.
            2 => {
                left.wait();
                world.control().settle();
                assert_eq!(comm.status(), Ok(()));
                match comm.begin(Stream::Host) {
                    Err(TransportError::Broken { fault }) => is_gone(&fault),
                    other => panic!("{other:?}"),
                }
                is_gone(&comm.status().unwrap_err());
            }
            // One makes none.
            _ => assert_eq!(comm.status(), Ok(())),
        }
        world.control().barrier(Instant::now() + AMPLE).unwrap();
    });
}

#[test]
fn a_rank_that_leaves_after_its_last_call_is_missed_by_nobody() {
    let left = Barrier::new(2);
    each_rank(2, |world| {
        let comm = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        if world.rank().get() == 0 {
            make_a_call(&comm);
            drop(comm);
            left.wait();
        } else {
            left.wait();
            make_a_call(&comm);
            assert_eq!(comm.status(), Ok(()));
        }
    });
}

#[test]
fn an_abort_ends_the_waits_of_all_ranks() {
    each_rank(3, |world| {
        let comm = connect(&world);
        if world.rank().get() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            comm.abort(42);
        } else {
            assert_soon(wait_in_vain(&comm, 0, 1), SECOND);
        }
        match comm.status().unwrap_err() {
            Fault::Aborted { rank, reason, .. } => assert_eq!((rank.get(), reason), (1, 42)),
            other => panic!("{other}"),
        }
        let refused = comm.barrier().unwrap_err();
        assert!(matches!(refused, TransportError::Broken { .. }), "{refused}");
        // Its world is in step.
        world.control().barrier(Instant::now() + AMPLE).unwrap();
    });
}

#[test]
fn a_broken_communicator_is_replaced_on_the_same_world() {
    each_rank(2, |world| {
        for round in 0..3 {
            let comm = connect(&world);
            if world.rank().get() == 0 {
                comm.abort(1 + round);
            }
            assert!(wait_until(|| comm.status().is_err()));
            assert!(matches!(comm.begin(Stream::Host), Err(TransportError::Broken { .. })));
        }
        assert_eq!(connect(&world).status(), Ok(()));
    });
}

fn wait_until(done: impl Fn() -> bool) -> bool {
    let end = Instant::now() + AMPLE;
    while !done() && Instant::now() < end {
        std::thread::yield_now();
    }
    done()
}

#[test]
fn a_call_given_up_after_its_transfers_breaks_the_communicator() {
    each_rank(2, |world| {
        let comm = connect(&world);
        let rank = world.rank().get();
        let x = [rank; 16];
        let transfers = [Transfer { dest: 1 - rank, rows: 1, cols: 16, ..Transfer::default() }];
        let address = x.as_ptr().expose_provenance() as u64;
        let job = Job::Rows(RowTransfers {
            x: address,
            row_stride: 64,
            row_bytes: 64,
            element_bytes: 4,
            rows: 1,
            place_bytes: 64,
            full_places: u32::MAX,
            transfers: &transfers,
            forwards: &[],
        });
        let mut call = comm.begin(Stream::Host).unwrap();
        // SAFETY: `x` outlives the call.
        unsafe { call.start(&job) }.unwrap();
        // SAFETY: `x` outlives the call.
        let again = unsafe { call.start(&job) };
        assert!(matches!(again, Err(TransportError::MoverUnusable { .. })));
        // Whoever gives up first breaks it for both.
        comm.barrier().unwrap();
        drop(call);
        assert!(matches!(
            comm.begin(Stream::Host),
            Err(TransportError::Broken { fault: Fault::Aborted { .. } })
        ));
        world.control().barrier(Instant::now() + AMPLE).unwrap();
    });
}

/// Whether rank 0's push raises its signal at rank 1, after the rank has given up the call or not.
fn a_push_is_announced(given_up: bool) -> bool {
    let announced = AtomicBool::new(false);
    each_rank(2, |world| {
        let comm = connect(&world);
        if world.rank().get() == 0 {
            let x = [1; 16];
            let transfers =
                [Transfer { dest: 1, rows: 1, cols: 16, raise: 3, ..Transfer::default() }];
            let address = x.as_ptr().expose_provenance() as u64;
            let job = Job::Rows(RowTransfers {
                x: address,
                row_stride: 16,
                row_bytes: 16,
                element_bytes: 1,
                rows: 1,
                place_bytes: 16,
                full_places: u32::MAX,
                transfers: &transfers,
                forwards: &[],
            });
            let mut call = comm.begin(Stream::Host).unwrap();
            if given_up {
                comm.abort(7);
            }
            // SAFETY: `x` outlives the call.
            unsafe { call.start(&job) }.unwrap();
            let at = call.memory().pads[1] + signal_offset(3, Epoch::FIRST.half());
            call.finish().unwrap();
            let signal = std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap());
            // SAFETY: a signal of the peer's pad, which lives until the barrier and is accessed as
            // a whole.
            let raised = unsafe { AtomicU32::from_ptr(signal) }.load(Ordering::Acquire)
                == Epoch::FIRST.get();
            announced.store(raised, Ordering::Relaxed);
        }
        world.control().barrier(Instant::now() + AMPLE).unwrap();
    });
    announced.into_inner()
}

#[test]
fn a_mover_announces_nothing_in_a_call_that_was_given_up() {
    assert_eq!([false, true].map(a_push_is_announced), [true, false]);
}

#[test]
fn a_wait_that_is_given_up_breaks_its_own_communicator_alone() {
    each_rank(3, |world| {
        let hasty =
            Communicator::connect_blocking(&world, Options { deadline: SECOND, ..options(SIZE) })
                .unwrap();
        let other = connect(&world);
        if world.rank().get() == 0 {
            wait_in_vain(&hasty, 5, 2);
            assert!(matches!(hasty.status(), Err(Fault::Timeout { .. })));
        }
        other.barrier().unwrap();
        assert!(hasty.status().is_err());
        assert_eq!(other.status(), Ok(()));
        other.barrier().unwrap();
    });
}

#[test]
fn a_call_whose_executor_does_not_return_breaks_the_communicator_and_one_that_had_none_does_not() {
    each_rank(2, |world| {
        let comm = connect(&world);
        let looked_at = comm.begin(Stream::Host).unwrap();
        let _ = looked_at.memory();
        drop(looked_at);
        assert_eq!(comm.status(), Ok(()));
        comm.barrier().unwrap();
        if world.rank().get() == 0 {
            // As in a ReduceScatter without transfers: the peer may have a partial tile by now.
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let mut call = comm.begin(Stream::Host).unwrap();
                // SAFETY: there is nothing to move.
                let started = unsafe { call.start(&Job::Nothing) }.unwrap();
                let words = Words::new(&started.view, comm.rank());
                words.open().publish(Rank::new(1), 3);
                std::panic::resume_unwind(Box::new("an executor's panic"));
            }));
            assert!(panic.is_err());
            assert!(matches!(comm.calls().last(), Some(call) if call.state == CallState::Failed));
        }
        world.control().barrier(Instant::now() + AMPLE).unwrap();
        assert!(
            matches!(comm.begin(Stream::Host), Err(TransportError::Broken { fault: Fault::Aborted { rank, .. } }) if rank.get() == 0)
        );
    });
}

#[test]
fn a_rank_that_cannot_connect_fails_all() {
    for bad in [Duration::ZERO, Duration::MAX] {
        each_rank(3, |world| {
            let deadline = if world.rank().get() == 1 { bad } else { AMPLE };
            let start = Instant::now();
            match (
                world.rank().get(),
                Communicator::connect_blocking(&world, Options { deadline, ..options(SIZE) })
                    .unwrap_err(),
            ) {
                (1, ConnectError::Deadline { deadline, .. }) => assert_eq!(deadline, bad),
                (_, ConnectError::PeerFailed { rank, reason }) => {
                    assert_eq!(rank.get(), 1);
                    assert!(reason.ends_with("it must be positive and at most 86400s"), "{reason}");
                }
                (_, other) => panic!("{other}"),
            }
            assert_soon(start.elapsed(), SECOND);
            // The world is as it was: all have taken one step.
            Communicator::connect_blocking(&world, options(SIZE)).unwrap().barrier().unwrap();
        });
    }
}
