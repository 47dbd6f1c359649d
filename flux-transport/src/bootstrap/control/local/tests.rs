use super::*;
use crate::lateness::{AMPLE, assert_soon, scaled};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::time::Duration;

fn ends(world: u32) -> Vec<LocalControl> {
    LocalControl::world_of(WorldSize::new(world).unwrap())
}

fn soon() -> Instant {
    Instant::now() + AMPLE
}

fn each(ends: &[LocalControl], body: impl Fn(&LocalControl) + Sync) {
    std::thread::scope(|scope| {
        for end in ends {
            scope.spawn(|| body(end));
        }
    });
}

#[test]
fn many_steps_in_a_row_stay_in_step() {
    for world in [1, 2, 5, 8] {
        each(&ends(world), |end| {
            for step in 0..200u32 {
                if (step + end.rank().get()) % 7 == 0 {
                    std::thread::yield_now();
                }
                let all =
                    end.exchange(&(step * 100 + end.rank().get()).to_le_bytes(), soon()).unwrap();
                let expected: Vec<_> =
                    (0..world).map(|rank| (step * 100 + rank).to_le_bytes().to_vec()).collect();
                assert_eq!(all, expected);
                if step % 3 == 0 {
                    end.barrier(soon()).unwrap();
                }
            }
        });
    }
}

#[test]
fn descriptors_reach_every_peer_and_lead_to_the_same_file() {
    let mut files: Vec<std::fs::File> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
    for (rank, file) in (0u8..).zip(&mut files) {
        file.write_all(&[rank; 4]).unwrap();
    }
    each(&ends(3), |end| {
        let own = &files[end.rank().index()];
        let all = end.exchange_fds(&[own.as_fd(), own.as_fd()], soon()).unwrap();
        let counts: Vec<usize> = all.iter().map(Vec::len).collect();
        let expected: Vec<usize> =
            (0..3).map(|rank| if rank == end.rank().index() { 0 } else { 2 }).collect();
        assert_eq!(counts, expected);
        end.barrier(soon()).unwrap();
        if end.rank().get() == 0 {
            use std::io::Seek;
            for (rank, fds) in (0u8..).zip(all) {
                for fd in fds {
                    let mut file = std::fs::File::from(fd);
                    file.rewind().unwrap();
                    let mut text = Vec::new();
                    file.read_to_end(&mut text).unwrap();
                    assert_eq!(text, [rank; 4]);
                }
            }
        }
    });
}

#[test]
fn a_late_rank_is_named_and_the_end_refuses_further_steps() {
    let ends = ends(3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ends[2].barrier(Instant::now() + scaled(Duration::from_millis(50))).unwrap_err()
        });
        match ends[0].barrier(Instant::now() + scaled(Duration::from_millis(50))).unwrap_err() {
            ControlError::Timeout { step: "exchange", missing } => {
                assert!(missing.contains(&Rank::new(1)));
            }
            other => panic!("{other}"),
        }
    });
    assert!(matches!(ends[0].barrier(soon()), Err(ControlError::Protocol { .. })));
}

#[test]
fn a_step_behind_another_threads_ends_by_its_own_deadline_and_names_the_late_rank() {
    let ends = ends(2);
    std::thread::scope(|scope| {
        let long = scope.spawn(|| ends[0].barrier(soon()));
        while locked(&ends[0].shared.state).slots[0].posts[0].is_none() {
            std::thread::yield_now();
        }
        let short =
            ends[0].exchange(&[], Instant::now() + scaled(Duration::from_millis(50))).unwrap_err();
        assert!(!long.is_finished());
        ends[1].barrier(soon()).unwrap();
        long.join().unwrap().unwrap();
        assert!(
            matches!(&short, ControlError::Timeout { step: "exchange", missing }
                if *missing == [Rank::new(1)]),
            "{short}"
        );
    });
}

#[test]
fn different_steps_are_an_error_on_every_rank() {
    each(&ends(2), |end| {
        let error = if end.rank().get() == 0 {
            end.exchange_fds(&[], soon()).unwrap_err()
        } else {
            end.exchange(&[], soon()).unwrap_err()
        };
        assert!(
            matches!(error, ControlError::Protocol { rank, .. } if rank != end.rank()),
            "{error}"
        );
    });
}

#[test]
fn a_dropped_end_is_a_loss_at_once_and_a_goodbye_is_none() {
    let mut ends = ends(3);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let watcher: Arc<Watcher> = {
        let heard = Arc::clone(&heard);
        Arc::new(move |notice| heard.lock().unwrap().push(notice))
    };
    ends[0].watch(Arc::downgrade(&watcher));
    let two = ends.pop().unwrap();
    two.abort(3, 9);
    two.depart(4, Epoch::new(5));
    two.goodbye();
    drop(two);
    let by = Rank::new(2);
    let said = [
        Notice::Aborted { by, communicator: 3, reason: 9 },
        Notice::Departed { by, communicator: 4, last: Epoch::new(5) },
    ];
    assert_eq!(*heard.lock().unwrap(), said);
    let start = Instant::now();
    assert!(
        matches!(ends[0].barrier(soon()), Err(ControlError::PeerLeft { rank }) if rank.get() == 2)
    );
    ends.pop();
    assert_eq!(heard.lock().unwrap().last(), Some(&Notice::Lost(Rank::new(1))));
    assert_soon(start.elapsed(), Duration::from_secs(1));
    // who asks later hears of it as well
    let late = Arc::new(Mutex::new(None));
    let watcher: Arc<Watcher> = {
        let late = Arc::clone(&late);
        Arc::new(move |notice| *late.lock().unwrap() = Some(notice))
    };
    ends[0].watch(Arc::downgrade(&watcher));
    assert_eq!(*late.lock().unwrap(), Some(Notice::Lost(Rank::new(1))));
}
