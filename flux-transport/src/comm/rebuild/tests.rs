//! Who is given up where survivors do not come together.

use super::*;
use crate::{Options, Select};
use std::sync::Barrier;
use std::time::Duration;

/// Ranks 0 and 2 of four rebuild: rank 1 has left, and rank 3 comes to the new group and takes no step in it. What they get, and whom they have given up (bits).
fn rebuild_with_one_that_stops(drops_the_old: bool) -> Vec<(Communicator, ConnectError)> {
    let worlds = World::local(4).unwrap();
    let (left, failed) = (Barrier::new(4), Barrier::new(3));
    let rank = |world: World| {
        let comm = Communicator::connect_blocking(&world, Options { deadline: Duration::from_millis(600), ..Select::Host.into() }).unwrap();
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
                let group = world.control().regroup(&[], Instant::now() + Duration::from_secs(20)).unwrap();
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

/// Whether an error is that rank 3 was waited for in vain. Else it must be that another rank was first to find that, and has left the new group.
fn names_rank_3(error: &ConnectError) -> bool {
    match error {
        ConnectError::Control(ControlError::PeerLeft { rank }) => {
            assert!([0, 2].contains(&rank.get()), "{error}");
            false
        }
        other => {
            assert_eq!(other.to_string(), "connecting: the deadline passed while waiting for rank 3");
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
            scope.spawn(move || assert_eq!(again().or_else(|_| again()).unwrap().world_size().get(), 2));
        }
    });
}

#[test]
fn who_is_late_in_a_new_group_and_answers_is_named_and_not_given_up() {
    let survivors = rebuild_with_one_that_stops(false);
    assert!(survivors.iter().filter(|(_, error)| names_rank_3(error)).count() > 0);
    assert!(survivors.iter().all(|(comm, _)| comm.inner.health.given_up() == 0));
}
