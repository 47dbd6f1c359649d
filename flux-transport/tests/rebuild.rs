//! A broken communicator's ranks get a working one: with who is left, or with all.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;

mod lateness;
use common::{Words, each_rank, options};
use flux_core::Rank;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_transport::internal::control::{GaveUp, Notice, Watcher};
use flux_transport::{
    Communicator, ConnectError, Doing, Fault, Label, Options, Rebuild, Stream, TransportError,
    World,
};
use lateness::{AMPLE, assert_soon, scaled};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 4096, signals: 8, counters: 2 };

/// One call in which every rank signals every other, and checks what it hears.
fn call(comm: &Communicator) -> Result<(), TransportError> {
    let call = comm.begin_as(Stream::Host, Some(Label::new("signals", [1, 2, 3])))?;
    let words = Words::new(call.memory(), comm.rank());
    let protocol = words.open();
    let peers = || comm.world_size().ranks().filter(|&peer| peer != comm.rank());
    peers().for_each(|peer| protocol.publish(peer, comm.rank().get()));
    let heard = peers().try_for_each(|peer| words.wait(&protocol, peer.get(), peer));
    let left = heard.and_then(|()| words.leave(protocol, false));
    call.finish()?;
    left.map_err(|_| TransportError::Broken { fault: comm.status().unwrap_err() })
}

#[test]
fn survivors_of_a_loss_go_on_in_a_smaller_world() {
    std::thread::scope(|scope| {
        for world in World::local(4).unwrap() {
            scope.spawn(move || {
                let old = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
                if world.rank().get() == 1 {
                    (0..3).for_each(|_| call(&old).unwrap());
                    let dies = AssertUnwindSafe(move || {
                        let _both = (old, world);
                        resume_unwind(Box::new("a rank's panic"));
                    });
                    assert!(catch_unwind(dies).is_err());
                    return;
                }
                let fault = loop {
                    if let Err(TransportError::Broken { fault }) = call(&old) {
                        break fault;
                    }
                };
                assert!(
                    matches!(fault, Fault::PeerLost { rank, .. } if rank.get() == 1),
                    "{fault}"
                );
                let new = old.rebuild_blocking(Rebuild::Survivors).unwrap();
                assert_eq!(
                    (new.world_size().get(), new.rank().get()),
                    (3, world.rank().get().saturating_sub(1))
                );
                drop(world);
                (0..10).for_each(|_| call(&new).unwrap());
                assert_eq!(old.status(), Err(fault), "the old one stays broken");
                assert!(matches!(old.begin(Stream::Host), Err(TransportError::Broken { .. })));
            });
        }
    });
}

#[test]
fn a_late_rank_is_named_by_all_fails_itself_and_is_left_out() {
    let deadline = scaled(Duration::from_millis(400));
    let timed_out = Barrier::new(4);
    each_rank(4, |world| {
        let old =
            Communicator::connect_blocking(&world, Options { deadline, ..options(SIZE) }).unwrap();
        call(&old).unwrap();
        let late = world.rank().get() == 2;
        if late {
            timed_out.wait();
            assert!(matches!(
                old.begin(Stream::Host),
                Err(TransportError::Broken { fault: Fault::Aborted { .. } })
            ));
            let refused = old.rebuild_blocking(Rebuild::Survivors).unwrap_err();
            assert!(matches!(refused, ConnectError::GivenUp { by } if by.get() != 2), "{refused}");
            return;
        }
        let start = Instant::now();
        assert!(matches!(call(&old), Err(TransportError::Broken { .. })));
        let took = start.elapsed();
        assert!(took >= deadline, "{took:?}");
        assert_soon(took, deadline + Duration::from_millis(500));
        let failure = old.failure().unwrap();
        assert!(
            matches!(&failure.fault, Fault::Timeout { rank, peer, late, .. }
            if *rank == old.rank() && peer.get() == 2 && late.as_slice() == [*peer]),
            "{failure}"
        );
        assert!(
            matches!(
                failure.ranks[2].doing,
                Doing::After(call) if call.to_string() == "call 1 (signals 1x2x3)",
            ),
            "{failure}"
        );
        timed_out.wait();
        let new = old.rebuild_blocking(Rebuild::Survivors).unwrap();
        assert_eq!(new.world_size().get(), 3);
        (0..10).for_each(|_| call(&new).unwrap());
    });
}

#[test]
fn a_rank_that_failed_by_itself_before_hears_who_gave_it_up() {
    let both = Barrier::new(2);
    each_rank(2, |world| {
        let old = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        if world.rank().get() == 1 {
            old.abort(7);
        }
        both.wait();
        if world.rank().get() == 0 {
            world.control().give_up(&GaveUp {
                communicator: 0,
                late: 1 << 1,
                record: FaultRecord::default(),
            });
        }
        both.wait();
        if world.rank().get() == 1 {
            assert!(
                matches!(old.status(), Err(Fault::Aborted { rank, .. }) if rank.get() == 1),
                "the first fault is its own"
            );
            let refused = old.rebuild_blocking(Rebuild::Survivors).unwrap_err();
            assert!(matches!(refused, ConnectError::GivenUp { by } if by.get() == 0), "{refused}");
        }
    });
}

#[test]
fn a_whole_world_is_rebuilt_after_an_abort_and_from_a_rebuilt_one() {
    each_rank(3, |world| {
        let mut comm = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        for round in 0..4 {
            // a peer may have aborted before this call is over
            let _ = call(&comm);
            if comm.rank().get() == round % 3 {
                comm.abort(1 + round);
            }
            comm = pollster::block_on(comm.rebuild(Rebuild::Whole)).unwrap();
            assert_eq!((comm.rank(), comm.world_size().get()), (world.rank(), 3));
        }
        call(&comm).unwrap();
    });
}

#[test]
fn threads_that_are_gone_have_no_replacement() {
    std::thread::scope(|scope| {
        for world in World::local(3).unwrap() {
            scope.spawn(move || {
                let old = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
                if world.rank().get() == 0 {
                    let dies = AssertUnwindSafe(move || {
                        let _both = (old, world);
                        resume_unwind(Box::new("a rank's panic"));
                    });
                    assert!(catch_unwind(dies).is_err());
                    return;
                }
                while call(&old).is_ok() {}
                let refused = old.rebuild_blocking(Rebuild::Whole).unwrap_err();
                assert!(
                    matches!(refused, ConnectError::NoReplacement { lost: 1, .. }),
                    "{refused}"
                );
            });
        }
    });
}

#[test]
fn survivors_go_on_without_a_rank_whose_program_has_ended_in_good_order() {
    let left = Barrier::new(3);
    each_rank(3, |world| {
        let old = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        if world.rank().get() == 0 {
            old.abort(7);
        }
        if world.rank().get() == 2 {
            drop((old, world));
            left.wait();
            return;
        }
        left.wait();
        let new = old.rebuild_blocking(Rebuild::Survivors).unwrap();
        assert_eq!(new.world_size().get(), 2);
        (0..10).for_each(|_| call(&new).unwrap());
    });
}

#[test]
fn who_cannot_connect_in_a_new_group_gives_up_those_that_may_have() {
    let heard: Arc<Mutex<Vec<Notice>>> = Arc::default();
    each_rank(2, |world| {
        let old = Communicator::connect_blocking(&world, options(SIZE)).unwrap();
        let soon = || Instant::now() + AMPLE;
        if world.rank().get() == 0 {
            let group = world.control().regroup(&[], soon()).unwrap().control;
            let watcher: Arc<Watcher> = {
                let heard = Arc::clone(&heard);
                Arc::new(move |notice| heard.lock().unwrap().push(notice))
            };
            group.watch(Arc::downgrade(&watcher));
            // Not what a rank says that connects.
            group.exchange(&[99], soon()).unwrap();
            drop((old, world));
            let _ = group.barrier(soon());
            group.settle();
        } else {
            assert!(old.rebuild_blocking(Rebuild::Survivors).is_err());
        }
    });
    let heard = heard.lock().unwrap();
    assert!(
        matches!(heard[..], [Notice::GaveUp { by, what }]
            if by.get() == 1 && what.late().eq([Rank::new(0)])),
        "{heard:?}"
    );
}
