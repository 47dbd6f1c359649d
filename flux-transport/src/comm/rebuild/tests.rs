//! Who is given up where survivors do not come together, and where they cannot.

use super::*;
use crate::bootstrap::{Environment, join};
use crate::comm::mock::MockTransport;
use crate::lateness::{AMPLE, assert_soon, scaled};
use crate::{Options, Select};
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::sync::Barrier;
use std::time::Duration;

fn deadline() -> Duration {
    scaled(Duration::from_millis(600))
}

/// Ranks 0 and 2 of four rebuild: rank 1 has left, and rank 3 comes to the new group and takes no
/// step in it. What they get, and whom they have given up (bits).
fn rebuild_with_one_that_stops(drops_the_old: bool) -> Vec<(Communicator, ConnectError)> {
    let worlds = World::local(4).unwrap();
    let (left, failed) = (Barrier::new(4), Barrier::new(3));
    let rank = |world: World| {
        let comm = Communicator::connect_blocking(
            &world,
            Options { deadline: deadline(), ..Select::Host.into() },
        )
        .unwrap();
        match world.rank().get() {
            1 => {
                drop((comm, world));
                left.wait();
                None
            }
            3 => {
                left.wait();
                // A live rank answers for the communicator that it has.
                let _comm = (!drops_the_old).then_some(comm);
                let group = world.control().regroup(&[], Instant::now() + AMPLE).unwrap();
                assert_eq!(group.members, [0, 2, 3].map(Rank::new));
                failed.wait();
                None
            }
            _ => {
                left.wait();
                let error = comm.rebuild_blocking(Rebuild::Survivors).unwrap_err();
                failed.wait();
                Some((comm, error))
            }
        }
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| rank(world))).collect();
        ranks.into_iter().filter_map(|rank| rank.join().unwrap()).collect()
    })
}

/// Whether an error is that rank 3 was waited for in vain. Else it must be that another rank was
/// first to find that, and has left the new group.
fn names_rank_3(error: &ConnectError) -> bool {
    match error {
        ConnectError::Control(ControlError::PeerLeft { rank }) => {
            assert!([0, 2].contains(&rank.get()), "{error}");
            false
        }
        other => {
            assert_eq!(
                other.to_string(),
                "connecting: the deadline passed while waiting for rank 3"
            );
            true
        }
    }
}

#[test]
fn who_stops_in_a_new_group_is_named_by_its_old_number_and_given_up() {
    let survivors = rebuild_with_one_that_stops(true);
    let mut named = 0;
    for (comm, error) in &survivors {
        let names = names_rank_3(error);
        assert_eq!(comm.inner.health.given_up(), u32::from(names) << 3, "{error}");
        named += u32::from(names);
    }
    assert!(named > 0);
    std::thread::scope(|scope| {
        for (comm, _) in &survivors {
            // Who had not found it finds it now.
            let again = || comm.rebuild_blocking(Rebuild::Survivors);
            scope.spawn(move || {
                assert_eq!(again().or_else(|_| again()).unwrap().world_size().get(), 2);
            });
        }
    });
}

#[test]
fn who_is_late_in_a_new_group_and_answers_is_named_and_not_given_up() {
    let survivors = rebuild_with_one_that_stops(false);
    assert!(survivors.iter().filter(|(_, error)| names_rank_3(error)).count() > 0);
    assert!(survivors.iter().all(|(comm, _)| comm.inner.health.given_up() == 0));
}

/// Two connected ranks, each as it says; rank 1 with its world, which it may keep longer than its
/// communicator.
fn pair(zero: impl FnOnce(Communicator) + Send, one: impl FnOnce(Communicator, World) + Send) {
    let [first, second] = <[World; 2]>::try_from(World::local(2).unwrap()).unwrap();
    let connect = |world: &World| {
        Communicator::connect_blocking(
            world,
            Options { deadline: deadline(), ..Select::Host.into() },
        )
        .unwrap()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| one(connect(&second), second));
        zero(connect(&first));
    });
}

#[test]
fn who_answers_is_waited_for_as_long_as_its_calls_may_take_to_end() {
    let rebuilds = |comm: Communicator| {
        assert_eq!(comm.rebuild_blocking(Rebuild::Survivors).unwrap().world_size().get(), 2);
    };
    let ends_its_calls = |comm: Communicator, _world| {
        std::thread::sleep(5 * deadline() / 2);
        rebuilds(comm);
    };
    pair(rebuilds, ends_its_calls);
}

#[test]
fn who_answers_and_does_not_come_is_given_up_when_its_calls_have_had_their_time() {
    let found = Barrier::new(2);
    let rebuilds = |comm: Communicator| {
        let began = Instant::now();
        let error = comm.regrouped_by(began + 3 * deadline() / 2).unwrap_err();
        assert_eq!(error.to_string(), "regrouping: the deadline passed while waiting for rank 1");
        assert_eq!(comm.inner.health.given_up(), 1 << 1);
        assert!(began.elapsed() >= 3 * deadline() / 2);
        assert_soon(began.elapsed(), 2 * deadline());
        found.wait();
    };
    let does_something_else = |_comm, _world| {
        found.wait();
    };
    pair(rebuilds, does_something_else);
}

#[test]
fn who_does_not_answer_is_given_up_after_one_deadline() {
    let found = Barrier::new(2);
    let rebuilds = |comm: Communicator| {
        found.wait();
        let began = Instant::now();
        let error = comm.rebuild_blocking(Rebuild::Survivors).unwrap_err();
        assert_eq!(error.to_string(), "regrouping: the deadline passed while waiting for rank 1");
        assert_eq!(comm.inner.health.given_up(), 1 << 1);
        assert!(began.elapsed() >= deadline());
        assert_soon(began.elapsed(), 2 * deadline());
        found.wait();
    };
    let drops_its_communicator = |comm, _world| {
        drop(comm);
        found.wait();
        found.wait();
    };
    pair(rebuilds, drops_its_communicator);
}

/// Two ranks that take themselves for those of two hosts.
fn on_two_hosts() -> Vec<World> {
    let directory =
        tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o700)).tempdir().unwrap();
    let free = crate::loopback::free_address();
    let rank = |rank: u32| {
        let set: [(&str, OsString); 7] = [
            ("FLUX_RANK", rank.to_string().into()),
            ("FLUX_WORLD_SIZE", "2".into()),
            ("FLUX_LOCAL_RANK", "0".into()),
            ("FLUX_RENDEZVOUS", format!("tcp://{free}").into()),
            ("FLUX_SECRET", "a secret of the tests, long enough".into()),
            ("FLUX_HOST_ID", rank.to_string().into()),
            ("XDG_RUNTIME_DIR", directory.path().into()),
        ];
        let variable =
            |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone());
        World::new(
            0,
            join(&Environment::parse(&variable).unwrap(), Instant::now() + AMPLE).unwrap(),
        )
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..2).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn survivors_on_several_hosts_are_refused_before_anything_is_broken() {
    let worlds = on_two_hosts();
    let connected = |world| {
        Communicator::new(
            world,
            &Select::Host.into(),
            Box::new(MockTransport::default()),
            String::new(),
        )
    };
    let comms: Vec<Communicator> = worlds.iter().map(connected).collect();
    let refused = comms[0].rebuild_blocking(Rebuild::Survivors).unwrap_err();
    assert!(
        matches!(refused, ConnectError::AcrossHosts { hosts: 2 })
            && refused.to_string().contains("Rebuild::Whole"),
        "{refused}"
    );
    // What it had said before its part of a step would have come.
    std::thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(|| comm.barrier().unwrap());
        }
    });
    assert!(comms.iter().all(|comm| comm.status() == Ok(())));
}
