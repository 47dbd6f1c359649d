//! Ranks that are left: they learn who does what, and make a group of their own.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod bootstrap_common;

mod lateness;
use bootstrap_common::{after, ample, each, group};
use flux_core::Rank;
use flux_core::layout::FaultRecord;
use flux_transport::ControlError;
use flux_transport::internal::control::ControlPlane;
use flux_transport::internal::control::{Answer, Answerer, GaveUp, Notice, Watcher, local_planes};
use lateness::{assert_soon, scaled};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

type Planes = Vec<Arc<dyn ControlPlane>>;

/// Two groups of the same size: ranks as threads, and ranks that talk over sockets.
fn groups(world: u32) -> [Planes; 2] {
    [local_planes(world).unwrap(), group(world)]
}

fn numbers(planes: &[Arc<dyn ControlPlane>]) -> Vec<Vec<Vec<u8>>> {
    each(planes, |plane| plane.exchange(&plane.rank().get().to_le_bytes(), ample()).unwrap())
}

#[test]
fn survivors_are_renumbered_in_order_and_out_of_step_no_more() {
    for mut planes in groups(5) {
        drop(planes.remove(3));
        // A step that failed leaves the old group of no use.
        assert!(each(&planes, |plane| plane.exchange(b"x", ample())).iter().all(Result::is_err));
        let groups = each(&planes, |plane| plane.regroup(&[], ample()).unwrap());
        assert!(groups.iter().all(|group| group.members == [0, 1, 2, 4].map(Rank::new)));
        let survivors: Planes = groups.into_iter().map(|group| group.control).collect();
        let ranks: Vec<_> =
            survivors.iter().map(|plane| (plane.rank().get(), plane.world().get())).collect();
        assert_eq!(ranks, [(0, 4), (1, 4), (2, 4), (3, 4)]);
        drop(planes);
        let all: Vec<Vec<u8>> = (0..4_u32).map(|rank| rank.to_le_bytes().to_vec()).collect();
        assert_eq!(numbers(&survivors), vec![all; 4]);
    }
}

#[test]
fn any_ranks_may_be_gone_or_given_up() {
    const WORLD: u32 = 4;
    // Of each rank one of three: it is left, it is gone, it is given up.
    for fates in 0..3_u32.pow(WORLD) {
        let fate = |rank: u32| fates / 3_u32.pow(rank) % 3;
        let left: Vec<u32> = (0..WORLD).filter(|&rank| fate(rank) == 0).collect();
        let given_up: Vec<Rank> =
            (0..WORLD).filter(|&rank| fate(rank) == 2).map(Rank::new).collect();
        for planes in groups(WORLD) {
            let (planes, others): (Planes, Planes) =
                planes.into_iter().partition(|plane| left.contains(&plane.rank().get()));
            // Those that are gone are dropped; those that were given up are there, and silent.
            let silent: Planes =
                others.into_iter().filter(|plane| given_up.contains(&plane.rank())).collect();
            let survivors =
                each(&planes, |plane| plane.regroup(&given_up, ample()).unwrap().control);
            let size = survivors.len() as u32;
            for (place, plane) in (0..).zip(&survivors) {
                assert_eq!(
                    (plane.rank().get(), plane.world().get()),
                    (place, size),
                    "fates {fates}"
                );
            }
            let all: Vec<Vec<u8>> = (0..size).map(|rank| rank.to_le_bytes().to_vec()).collect();
            assert!(numbers(&survivors).iter().all(|got| *got == all), "fates {fates}");
            drop(silent);
        }
    }
}

#[test]
fn a_rank_that_was_given_up_is_left_out_and_cannot_make_a_group_of_its_own() {
    for planes in groups(3) {
        let late = Rank::new(0);
        let survivors =
            each(&planes[1..], |plane| plane.regroup(&[late], ample()).unwrap().control);
        assert_eq!(survivors[0].world().get(), 2);
        planes[1..].iter().for_each(|plane| plane.goodbye());
        assert!(planes[0].regroup(&[], ample()).is_err());
        assert_eq!(numbers(&survivors).len(), 2);
    }
}

#[test]
fn a_rank_that_waits_hears_at_once_that_the_others_go_on_without_it() {
    for planes in groups(3) {
        let without = [&[][..], &[Rank::new(0)], &[Rank::new(0)]];
        let mut ends = each(&planes, |plane| plane.regroup(without[plane.rank().index()], ample()));
        assert!(matches!(ends.remove(0), Err(ControlError::GivenUp { by }) if by.get() != 0));
        assert!(ends.into_iter().all(|end| end.unwrap().control.world().get() == 2));
    }
}

#[test]
fn of_two_ranks_that_leave_each_other_out_at_most_one_goes_on() {
    for round in 0..200 {
        for planes in groups(2) {
            let alone = |plane: &dyn ControlPlane| {
                plane.regroup(&[Rank::new(1 - plane.rank().get())], ample())
            };
            let ends = each(&planes, alone);
            assert!(ends.iter().filter(|end| end.is_ok()).count() <= 1, "round {round}");
            assert!(
                ends.iter().all(|end| matches!(end, Ok(_) | Err(ControlError::GivenUp { .. }))),
                "round {round}"
            );
        }
    }
}

#[test]
fn a_rank_that_came_later_is_not_taken_for_late_and_those_that_are_left_make_one_group() {
    let deadline = scaled(Duration::from_secs(2));
    for planes in groups(3) {
        let start = Instant::now();
        let survivors = each(&planes[..2], |plane| {
            // Rank 2 does not come, rank 0 comes half a deadline after rank 1; both go on without
            // it.
            let begins =
                start + if plane.rank().get() == 0 { deadline / 2 } else { Duration::ZERO };
            std::thread::sleep(begins.saturating_duration_since(Instant::now()));
            let group = plane.regroup(&[], Instant::now() + deadline).unwrap_or_else(|error| {
                let ControlError::Timeout { missing, .. } = error else {
                    panic!("rank {}: {error}", plane.rank())
                };
                assert_eq!(missing, [Rank::new(2)], "to rank {}", plane.rank());
                plane.regroup(&missing, Instant::now() + deadline).unwrap()
            });
            group.control
        });
        assert_eq!(numbers(&survivors).len(), 2, "they are of one group");
        assert!(matches!(planes[2].regroup(&[], ample()), Err(ControlError::GivenUp { .. })));
    }
}

#[test]
fn a_rank_that_has_stopped_waiting_is_not_there() {
    for planes in groups(2) {
        // One after the other, not at one time.
        for plane in planes.iter().rev() {
            let rank = plane.rank().get();
            let refused = plane.regroup(&[], after(50));
            assert!(
                matches!(&refused, Err(ControlError::Timeout { missing, .. })
                    if *missing == [Rank::new(1 - rank)]),
                "{refused:?}"
            );
        }
        assert_eq!(
            numbers(&each(&planes, |plane| plane.regroup(&[], ample()).unwrap().control)).len(),
            2
        );
    }
}

#[test]
fn a_rank_that_has_left_in_good_order_is_gone() {
    for mut planes in groups(3) {
        planes.remove(1).goodbye();
        let survivors = each(&planes, |plane| plane.regroup(&[], ample()).unwrap().control);
        assert_eq!(numbers(&survivors).len(), 2);
    }
}

#[test]
fn ranks_that_do_not_ask_are_named_to_all_and_the_next_attempt_goes_on_without_them() {
    for planes in groups(4) {
        let deadline = scaled(Duration::from_millis(300));
        let start = Instant::now();
        for refused in
            each(&planes[..3], |plane| plane.regroup(&[], Instant::now() + deadline).map(drop))
        {
            assert!(matches!(refused, Err(ControlError::Timeout { missing, .. })
                    if missing == [Rank::new(3)]));
        }
        assert_soon(start.elapsed(), deadline + Duration::from_millis(500));
        let survivors =
            each(&planes[..3], |plane| plane.regroup(&[Rank::new(3)], ample()).unwrap().control);
        assert_eq!(numbers(&survivors).len(), 3);
    }
}

#[test]
fn every_rank_answers_for_its_communicators_whatever_it_does() {
    for mut planes in groups(4) {
        let answerers: Vec<Arc<Answerer>> = planes
            .iter()
            .map(|plane| {
                let rank = plane.rank().get();
                // Rank 2 is silent.
                let answer: Arc<Answerer> =
                    Arc::new(move |number| (number == 7 && rank != 2).then(|| vec![rank as u8; 3]));
                plane.answer_with(Arc::downgrade(&answer));
                answer
            })
            .collect();
        drop(planes.remove(3));
        let start = Instant::now();
        let answers = planes[0].ask(7, Instant::now() + scaled(Duration::from_millis(200)));
        assert_soon(start.elapsed(), Duration::from_secs(1));
        assert_eq!(
            answers,
            [Answer::Reply(vec![0; 3]), Answer::Reply(vec![1; 3]), Answer::Silent, Answer::Lost]
        );
        assert_eq!(planes[1].ask(8, after(50))[0], Answer::Silent, "it has no such communicator");
        drop(answerers);
    }
}

#[test]
fn questions_at_the_same_time_have_their_own_answers_and_their_own_time() {
    let patience = scaled(Duration::from_secs(1));
    for planes in groups(3) {
        let answerers: Vec<Arc<Answerer>> = planes
            .iter()
            .map(|plane| {
                let rank = plane.rank().get();
                // Rank 2 is silent, so every question lasts until its deadline.
                let answer: Arc<Answerer> =
                    Arc::new(move |number| (rank != 2).then(|| vec![rank as u8, number as u8]));
                plane.answer_with(Arc::downgrade(&answer));
                answer
            })
            .collect();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for number in 0..8_u8 {
                let plane = &planes[0];
                scope.spawn(move || {
                    let answers = plane.ask(number.into(), Instant::now() + patience);
                    assert_eq!(
                        answers,
                        [
                            Answer::Reply(vec![0, number]),
                            Answer::Reply(vec![1, number]),
                            Answer::Silent
                        ]
                    );
                });
            }
        });
        assert_soon(start.elapsed(), 4 * patience);
        drop(answerers);
    }
}

#[test]
fn what_was_said_before_is_heard_when_a_rank_has_settled() {
    for planes in groups(2) {
        for round in 0..100 {
            let heard: Arc<Mutex<Vec<Notice>>> = Arc::default();
            let watcher: Arc<Watcher> = {
                let heard = Arc::clone(&heard);
                Arc::new(move |notice| heard.lock().unwrap().push(notice))
            };
            planes[0].watch(Arc::downgrade(&watcher));
            let what = GaveUp {
                communicator: round,
                late: 1,
                record: FaultRecord { epoch: round, ..FaultRecord::default() },
            };
            planes[1].give_up(&what);
            planes[0].settle();
            assert_eq!(*heard.lock().unwrap(), [Notice::GaveUp { by: Rank::new(1), what }]);
        }
    }
}
