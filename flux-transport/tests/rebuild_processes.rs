//! Ranks that are processes rebuild while one of them is stopped.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod bootstrap_common;
mod lateness;

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use bootstrap_common::process::{command, role, succeed};
use bootstrap_common::{ample, private};
use flux_core::Rank;
use flux_transport::{Communicator, ConnectError, ControlError, Options, Rebuild, Select, World};
use lateness::scaled;
use rustix::process::{Pid, Signal, kill_process};

/// The same for all ranks, as they are told how late the machine is.
fn deadline() -> Duration {
    scaled(Duration::from_secs(1))
}

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn as_the_role_says() {
    let role = role().expect("a role");
    let signs = Signs(Path::new(&role));
    let world = World::from_env().unwrap();
    let comm = Communicator::connect_blocking(
        &world,
        Options { deadline: deadline(), ..Select::Host.into() },
    )
    .unwrap();
    if world.rank().get() == 0 {
        signs.give("the leader rebuilds");
        let refused = comm.rebuild_blocking(Rebuild::Survivors).unwrap_err();
        assert!(matches!(refused, ConnectError::GivenUp { by } if by.get() != 0), "{refused}");
        return;
    }
    signs.wait_for("the leader is stopped");
    let late = comm.rebuild_blocking(Rebuild::Survivors).unwrap_err();
    assert!(
        matches!(&late, ConnectError::Control(ControlError::Timeout { missing, .. })
            if *missing == [Rank::new(0)]),
        "{late}"
    );
    let new = comm.rebuild_blocking(Rebuild::Survivors).unwrap();
    assert_eq!((new.world_size().get(), new.rank().get()), (2, world.rank().get() - 1));
    new.barrier().unwrap();
    signs.give(&format!("rank {} has rebuilt", world.rank()));
}

/// Files by which processes tell each other how far they are.
struct Signs<'d>(&'d Path);

impl Signs<'_> {
    fn give(&self, sign: &str) {
        std::fs::write(self.0.join(sign), "").unwrap();
    }

    fn wait_for(&self, sign: &str) {
        let end = ample();
        while !self.0.join(sign).exists() {
            assert!(std::time::Instant::now() < end, "no sign: {sign}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Processes that do not outlive a test that fails, stopped ones least of all.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_leader_that_is_stopped_after_it_came_is_left_out_by_the_second_attempt() {
    let (directory, signs) = (private(), private());
    let start = |rank: u32| {
        let set = [("FLUX_RANK", rank), ("FLUX_WORLD_SIZE", 3), ("FLUX_LOCAL_RANK", rank)];
        let mut set: Vec<_> = set.map(|(name, value)| (name, value.to_string().into())).into();
        set.push(("FLUX_RENDEZVOUS", directory.path().into()));
        command(signs.path().to_str().unwrap(), directory.path(), &set).spawn().unwrap()
    };
    let mut ranks = Ranks((0..3).map(start).collect());
    let (signs, leader) = (Signs(signs.path()), Pid::from_child(&ranks.0[0]));
    signs.wait_for("the leader rebuilds");
    // It says at once that it waits for the others, which do not come yet.
    std::thread::sleep(deadline() / 4);
    kill_process(leader, Signal::STOP).unwrap();
    signs.give("the leader is stopped");
    signs.wait_for("rank 1 has rebuilt");
    signs.wait_for("rank 2 has rebuilt");
    kill_process(leader, Signal::CONT).unwrap();
    succeed(std::mem::take(&mut ranks.0));
}
