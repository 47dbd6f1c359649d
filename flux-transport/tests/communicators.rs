//! Several communicators of one world: none takes another's words for its own.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod common;

mod lateness;
use common::{each_rank, options};
use flux_core::layout::WorkspaceSize;
use flux_core::{Rank, WorldSize};
use flux_transport::{
    Communicator, ConnectError, ControlError, Fault, Options, Rebuild, TransportError, World,
    reason,
};
use lateness::{AMPLE, assert_soon, scaled};
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

/// A step of a communicator.
type Take<'t> = &'t dyn Fn(&Communicator) -> Result<(), TransportError>;

const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 4096, signals: 8, counters: 2 };

fn connect(world: &World) -> Communicator {
    Communicator::connect_blocking(world, options(SIZE)).unwrap()
}

fn two_ranks(work: impl Fn(World) + Sync) {
    ranks(2, work);
}

/// Runs `work` on each rank, as threads and as processes meet.
fn ranks(size: u32, work: impl Fn(World) + Sync) {
    each_rank(size, &work);
    let directory =
        tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (work, path) = (&work, directory.path());
            scope.spawn(move || {
                work(
                    World::builder(Rank::new(rank), WorldSize::new(size).unwrap())
                        .on_host(path)
                        .unwrap(),
                );
            });
        }
    });
}

/// This rank's order of two communicators, the other rank's being another.
fn in_its_order<'a>(world: &World, [a, b]: [&'a Communicator; 2]) -> [&'a Communicator; 2] {
    if world.rank().get() == 0 { [a, b] } else { [b, a] }
}

#[test]
fn steps_in_different_orders_are_refused_on_every_rank_which_are_then_still_in_step() {
    two_ranks(|world| {
        let (a, b) = (connect(&world), connect(&world));
        let grown = WorkspaceSize { signals: 16, ..SIZE };
        let steps: [(&str, Take<'_>); 3] = [
            ("exchange", &|comm| comm.exchange(b"same").map(drop)),
            ("barrier", &Communicator::barrier),
            ("growing the workspace", &|comm| comm.reserve(grown)),
        ];
        for (step, take) in steps {
            for comm in in_its_order(&world, [&a, &b]) {
                let text = take(comm).unwrap_err().to_string();
                let is_at = |number| format!("is at: {step} (communicator {number})");
                assert!(
                    text.contains(&is_at(0))
                        && text.contains(&is_at(1))
                        && text.ends_with("in one order"),
                    "{text}"
                );
            }
        }
        for comm in [&a, &b] {
            assert_eq!((comm.status(), comm.workspace_size()), (Ok(()), SIZE));
            comm.reserve(grown).unwrap();
        }
        assert_eq!(a.exchange(b"a").unwrap(), [b"a"; 2]);
        assert_eq!(connect(&world).exchange(b"c").unwrap(), [b"c"; 2]);
    });
}

#[test]
fn an_exchange_takes_as_many_bytes_on_every_plane_and_refuses_more_without_the_step() {
    two_ranks(|world| {
        let comm = connect(&world);
        let most = vec![7; 64 << 10];
        if world.rank().get() == 0 {
            let text = comm.exchange(&[&most[..], &[7]].concat()).unwrap_err().to_string();
            assert!(text.contains("rank 0: exchange: 65537") && text.ends_with("65536"), "{text}");
        }
        assert_eq!(comm.exchange(&most).unwrap(), [&most[..]; 2]);
    });
}

#[test]
fn communicators_that_ranks_rebuild_in_different_orders_are_refused_and_can_be_rebuilt_in_one() {
    two_ranks(|world| {
        let (a, b) = (connect(&world), connect(&world));
        for comm in in_its_order(&world, [&a, &b]) {
            match comm.rebuild_blocking(Rebuild::Survivors).unwrap_err() {
                ConnectError::Disagreement { values, .. } => {
                    let rebuilt =
                        ["rank 0: rebuild of communicator", "rank 1: rebuild of communicator"];
                    assert!(rebuilt.iter().all(|rank| values.contains(rank)), "{values}");
                }
                other => panic!("{other}"),
            }
        }
        for comm in [&a, &b] {
            let new = comm.rebuild_blocking(Rebuild::Survivors).unwrap();
            assert_eq!(new.exchange(b"new").unwrap(), [b"new"; 2]);
        }
    });
}

#[test]
fn an_abort_and_a_rebuild_break_their_own_communicator_alone_on_every_rank() {
    two_ranks(|world| {
        let (aborted, rebuilt, other) = (connect(&world), connect(&world), connect(&world));
        if world.rank().get() == 0 {
            aborted.abort(7);
        }
        // What rank 0 said has come before its part of a step.
        other.barrier().unwrap();
        assert!(matches!(aborted.status(), Err(Fault::Aborted { rank, reason: 7, .. })
                if rank.get() == 0));
        assert_eq!(other.status(), Ok(()));
        let new = rebuilt.rebuild_blocking(Rebuild::Survivors).unwrap();
        other.barrier().unwrap();
        assert_eq!([&new, &other].map(Communicator::status), [Ok(()), Ok(())]);
        assert!(rebuilt.status().is_err());
    });
}

#[test]
fn a_failed_step_is_no_fault_and_says_what_helps() {
    let (tell, is_told) = channel();
    let is_told = Mutex::new(is_told);
    each_rank(2, |world| {
        let patient = connect(&world);
        let hasty = Communicator::connect_blocking(
            &world,
            Options { deadline: scaled(Duration::from_secs(1)), ..options(SIZE) },
        )
        .unwrap();
        if world.rank().get() == 0 {
            assert!(matches!(
                hasty.barrier(),
                Err(TransportError::Control(ControlError::Timeout { .. }))
            ));
            for comm in [&hasty, &patient] {
                let text = comm.barrier().unwrap_err().to_string();
                assert!(
                    text.contains("in all communicators of the world: rebuild them on every rank"),
                    "{text}"
                );
                assert_eq!(comm.status(), Ok(()));
            }
            tell.send(()).unwrap();
        } else {
            is_told.lock().unwrap().recv_timeout(AMPLE).unwrap();
        }
        patient.rebuild_blocking(Rebuild::Survivors).unwrap().barrier().unwrap();
    });
}

#[test]
fn reasons_that_are_no_callers_are_not_taken_from_one() {
    each_rank(2, |world| {
        for asked in [0, reason::RESERVED, reason::PANICKED, u32::MAX, reason::RESERVED - 1] {
            let (aborted, other) = (connect(&world), connect(&world));
            if world.rank().get() == 0 {
                aborted.abort(asked);
            }
            other.barrier().unwrap();
            let expected = if asked == reason::RESERVED - 1 { asked } else { 1 };
            assert!(
                matches!(aborted.status(), Err(Fault::Aborted { reason, .. })
                    if reason == expected),
                "{:?}",
                aborted.status()
            );
            assert_eq!(other.status(), Ok(()));
        }
    });
}

#[test]
fn a_panic_of_a_rank_breaks_all_of_its_communicators_at_the_others() {
    two_ranks(|world| {
        let (panics, other) = (connect(&world), connect(&world));
        if world.rank().get() == 0 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                let _dropped = panics;
                resume_unwind(Box::new("a rank's panic"));
            }));
            assert!(panic.is_err());
            other.barrier().unwrap();
        } else {
            other.barrier().unwrap();
            let lost = |comm: &Communicator| matches!(comm.status(), Err(Fault::PeerLost { rank, .. }) if rank.get() == 0);
            assert_eq!([&panics, &other].map(lost), [true, true]);
        }
    });
}

#[test]
fn an_abort_by_another_thread_ends_a_step_that_waits_on_every_rank() {
    ranks(3, |world| {
        let (comm, began) = (connect(&world), std::time::Instant::now());
        let aborted = || {
            let error = comm.barrier().unwrap_err();
            assert!(
                matches!(
                    &error,
                    TransportError::Broken { fault: Fault::Aborted { rank, reason: 7, .. } }
                        if rank.get() == 0
                ),
                "{error}"
            );
        };
        // Rank 2 does not come, and of rank 0's threads one waits for the step and one for its
        // turn.
        std::thread::scope(|scope| match world.rank().get() {
            0 => {
                scope.spawn(aborted);
                scope.spawn(aborted);
                // One that comes later is refused at once.
                std::thread::sleep(scaled(Duration::from_millis(50)));
                comm.abort(7);
            }
            1 => aborted(),
            _ => std::thread::sleep(scaled(Duration::from_millis(100))),
        });
        assert_soon(began.elapsed(), Duration::from_secs(2));
        if world.rank().get() == 2 {
            aborted();
        }
    });
}
