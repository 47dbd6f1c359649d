//! The control plane of processes, each rank a thread with sockets of its own.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;

mod lateness;
use lateness::{AMPLE, assert_soon};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use bootstrap_common::{after, ample, each, group};
use flux_core::Rank;
use flux_core::signal::Epoch;
use flux_transport::internal::control::ControlPlane;
use flux_transport::internal::control::{Notice, Watcher};
use flux_transport::{ControlError, Launch};

/// Most bytes of a step, with those that say which step of a communicator it is.
const LIMIT: usize = 64 * 1024 + 5;

/// What `plane` hears from now on. The watcher lives as long as the returned one.
fn notices(plane: &Arc<dyn ControlPlane>) -> (Arc<Watcher>, mpsc::Receiver<Notice>) {
    let (sender, receiver) = mpsc::channel();
    let sender = Mutex::new(sender);
    let watcher: Arc<Watcher> =
        Arc::new(move |notice| sender.lock().unwrap().send(notice).unwrap_or_default());
    plane.watch(Arc::downgrade(&watcher));
    (watcher, receiver)
}

fn memfd(content: &[u8]) -> OwnedFd {
    let mut file =
        File::from(rustix::fs::memfd_create("flux-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.write_all(content).unwrap();
    file.into()
}

fn content(fd: OwnedFd) -> Vec<u8> {
    // At a place of its own: all who hold the file share its offset.
    let file = File::from(fd);
    let mut content = vec![0; file.metadata().unwrap().len().try_into().unwrap()];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

#[test]
fn payloads_reach_every_rank_in_rank_order() {
    for world in [1, 2, 3, 8, 16] {
        let planes = group(world);
        for round in 0..3_u32 {
            // Sizes differ by rank and go from none to the limit.
            let payload = |rank: u32| {
                vec![u8::try_from(rank).unwrap(); [0, 1, LIMIT][(rank + round) as usize % 3]]
            };
            let expected: Vec<_> = (0..world).map(payload).collect();
            for got in each(&planes, |plane| {
                plane.exchange(&payload(plane.rank().get()), ample()).unwrap()
            }) {
                assert!(got == expected, "world {world}, round {round}");
            }
        }
        assert!(
            planes
                .iter()
                .all(|plane| plane.kind() == Launch::Processes && plane.world().get() == world)
        );
        each(&planes, |plane| plane.barrier(ample()).unwrap());
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    let planes = group(4);
    let late = Duration::from_millis(150);
    let began = Instant::now();
    let passed = each(&planes, |plane| {
        if plane.rank() == Rank::new(2) {
            std::thread::sleep(late);
        }
        plane.barrier(ample()).unwrap();
        began.elapsed()
    });
    assert!(passed.iter().all(|&passed| passed >= late), "{passed:?}");
}

#[test]
fn thousand_steps_of_ranks_at_their_own_pace_stay_in_step() {
    let planes = group(5);
    each(&planes, |plane| {
        for step in 0..1000_u32 {
            // One rank after the other lags behind.
            if step % 50 == plane.rank().get() * 10 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let got = plane.exchange(&step.to_le_bytes(), ample()).unwrap();
            assert!(got.iter().all(|theirs| *theirs == step.to_le_bytes()), "step {step}");
        }
    });
}

#[test]
fn a_payload_over_the_limit_is_refused_and_the_ranks_stay_in_step() {
    let planes = group(2);
    let error = planes[0].exchange(&vec![0; LIMIT + 1], ample()).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, ControlError::Protocol { rank, .. } if rank == Rank::new(0))
            && text.contains("65542"),
        "{text}"
    );
    let many: Vec<OwnedFd> = (0..65).map(|_| memfd(b"")).collect();
    let many: Vec<BorrowedFd<'_>> = many.iter().map(AsFd::as_fd).collect();
    let text = planes[0].exchange_fds(&many, ample()).unwrap_err().to_string();
    assert!(text.contains("65 descriptors"), "{text}");
    for got in each(&planes, |plane| plane.exchange(b"on", ample()).unwrap()) {
        assert_eq!(got, [b"on", b"on"]);
    }
}

#[test]
fn a_late_rank_is_named_by_the_timeout_and_the_step_is_not_taken_up_again() {
    let planes = group(4);
    let errors = each(&planes[..2], |plane| plane.exchange(b"x", after(100)).unwrap_err());
    for error in errors {
        let ControlError::Timeout { missing, step } = error else { panic!("{error}") };
        assert_eq!((missing, step), (vec![Rank::new(2), Rank::new(3)], "exchange"));
    }
    // A late frame of the failed step must not pass for one of the next.
    let error = planes[0].barrier(ample()).unwrap_err();
    assert!(
        matches!(error, ControlError::Protocol { rank, .. } if rank == Rank::new(0)),
        "{error}"
    );
}

#[test]
fn ranks_in_different_steps_tell_each_other_apart() {
    let planes = group(2);
    let errors = each(&planes, |plane| match plane.rank().get() {
        0 => plane.exchange(b"x", ample()).unwrap_err(),
        _ => plane.exchange_fds(&[], ample()).unwrap_err(),
    });
    assert_eq!(
        errors[0].to_string(),
        "rank 1: it is at step 0 (exchange of descriptors), rank 0 is at step 0 (exchange)"
    );
    assert_eq!(
        errors[1].to_string(),
        "rank 0: it is at step 0 (exchange), rank 1 is at step 0 (exchange of descriptors)"
    );
}

#[test]
fn descriptors_go_both_ways_and_name_the_same_file() {
    let planes = group(3);
    let got = each(&planes, |plane| {
        let own = plane.rank().get();
        // One, two and three descriptors.
        let files: Vec<_> =
            (0..=own).map(|index| memfd(format!("{own}.{index}").as_bytes())).collect();
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let got = plane.exchange_fds(&borrowed, ample()).unwrap();
        for fd in got.iter().flatten() {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        got.into_iter()
            .map(|fds| fds.into_iter().map(content).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    });
    for (own, by_rank) in got.into_iter().enumerate() {
        for (rank, contents) in by_rank.into_iter().enumerate() {
            let count = if rank == own { 0 } else { rank + 1 };
            let expected: Vec<_> =
                (0..count).map(|index| format!("{rank}.{index}").into_bytes()).collect();
            assert_eq!(contents, expected, "from {rank} at {own}");
        }
    }
}

#[test]
fn an_exchange_of_no_descriptors_is_one() {
    let planes = group(2);
    assert!(
        each(&planes, |plane| plane.exchange_fds(&[], ample()).unwrap())
            .iter()
            .flatten()
            .all(Vec::is_empty)
    );
}

#[test]
fn a_rank_that_goes_without_goodbye_is_lost_to_waiters_and_watchers_at_once() {
    let mut planes = group(3);
    let watched: Vec<_> = planes[..2].iter().map(notices).collect();
    let going = planes.pop().unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| (planes[0].barrier(ample()).unwrap_err(), Instant::now()));
        std::thread::sleep(Duration::from_millis(50));
        let gone = Instant::now();
        drop(going);
        let (error, seen) = waiter.join().unwrap();
        assert!(
            matches!(error, ControlError::PeerLost { rank } if rank == Rank::new(2)),
            "{error}"
        );
        assert_soon(seen - gone, Duration::from_secs(1));
    });
    for (_, notices) in &watched {
        assert_eq!(notices.recv_timeout(AMPLE), Ok(Notice::Lost(Rank::new(2))));
        assert!(notices.recv_timeout(Duration::from_millis(50)).is_err(), "told twice");
    }
    // Who starts to watch afterwards hears of it too.
    let (_watcher, late) = notices(&planes[1]);
    assert_eq!(late.recv_timeout(AMPLE), Ok(Notice::Lost(Rank::new(2))));
}

#[test]
fn a_goodbye_is_no_loss_but_no_step_can_be_taken_with_it() {
    let mut planes = group(2);
    let (_watcher, notices) = notices(&planes[0]);
    let going = planes.pop().unwrap();
    going.goodbye();
    assert!(matches!(going.barrier(ample()), Err(ControlError::Protocol { rank, .. })
            if rank == Rank::new(1)));
    drop(going);
    let error = planes[0].barrier(ample()).unwrap_err();
    assert!(matches!(error, ControlError::PeerLeft { rank } if rank == Rank::new(1)), "{error}");
    assert!(notices.recv_timeout(Duration::from_millis(100)).is_err());
}

#[test]
fn what_a_rank_sent_before_it_left_still_counts() {
    let mut planes = group(2);
    let last = planes.pop().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            last.exchange(b"last", ample()).unwrap();
            last.goodbye();
        });
        // The frame and the goodbye are in before this rank looks.
        let got = planes[0].exchange(b"first", ample()).unwrap();
        assert_eq!(got, [b"first".to_vec(), b"last".to_vec()]);
    });
}

#[test]
fn what_a_rank_says_of_a_communicator_reaches_every_peers_watcher_and_nobody_else() {
    let planes = group(3);
    let watched: Vec<_> = planes.iter().map(notices).collect();
    let (by, last) = (Rank::new(1), Epoch::new(u32::MAX));
    planes[1].abort(3, 77);
    planes[1].depart(4, last);
    for expected in [
        Notice::Aborted { by, communicator: 3, reason: 77 },
        Notice::Departed { by, communicator: 4, last },
    ] {
        for (rank, (_, notices)) in watched.iter().enumerate().filter(|(rank, _)| *rank != 1) {
            assert_eq!(notices.recv_timeout(AMPLE), Ok(expected), "rank {rank}");
        }
    }
    assert!(planes[1].tell(Rank::new(2), 5, [1, 2, 3, 4]));
    let told = Notice::Told { by, communicator: 5, words: [1, 2, 3, 4] };
    assert_eq!(watched[2].1.recv_timeout(AMPLE), Ok(told));
    for rank in [0, 1] {
        let nothing = watched[rank].1.recv_timeout(Duration::from_millis(50));
        assert!(nothing.is_err(), "rank {rank}: {nothing:?}");
    }
    each(&planes, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn a_watcher_may_drop_the_last_handle_of_its_plane() {
    let mut planes = group(2);
    let going = planes.pop().unwrap();
    let plane = planes.pop().unwrap();
    let (sender, receiver) = mpsc::channel();
    let held = Mutex::new(Some(Arc::clone(&plane)));
    let watcher: Arc<Watcher> = Arc::new(move |_| {
        drop(held.lock().unwrap().take());
        let _ = sender.send(());
    });
    plane.watch(Arc::downgrade(&watcher));
    drop(plane);
    drop(going);
    receiver.recv_timeout(AMPLE).unwrap();
}
