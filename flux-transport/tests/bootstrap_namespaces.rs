//! Ranks of one host in PID namespaces of their own, as in a container for each rank.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;
mod lateness;
#[path = "../../flux-kernels/tests/skipped/mod.rs"]
mod skipped;

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bootstrap_common::process::{command, role, succeed};
use bootstrap_common::{ample, assert_empty, private};
use flux_core::Rank;
use flux_core::layout::WorkspaceSize;
use flux_transport::{Communicator, Fault, Options, Select, Stream, World};
use lateness::AMPLE;

/// A PID namespace with a `/proc` of its own, where a user other than root may make one, too. What
/// runs in it ends with `unshare`.
const UNSHARE: [&str; 6] =
    ["--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"];
/// Longer than the loss of a rank may take on the latest machine.
const DEADLINE: Duration = Duration::from_mins(10);

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn as_the_role_says() {
    assert_eq!(role().as_deref(), Some("rank"));
    rank();
}

/// Shares memory with the other rank and makes a call; then rank 1 waits to be killed, and rank 0
/// for that.
#[expect(clippy::print_stdout, reason = "read by the test that started this process")]
fn rank() {
    assert_eq!(std::process::id(), 1, "a PID namespace of its own");
    let world = World::from_env().unwrap();
    let said = world.control().exchange(&world.rank().get().to_le_bytes(), ample()).unwrap();
    assert_eq!(said, [0u32, 1].map(|rank| rank.to_le_bytes().to_vec()));
    let reserve = WorkspaceSize { half_bytes: 4096, signals: 10, counters: 10 };
    let options =
        Options { select: Select::Host, deadline: DEADLINE, reserve, ..Options::default() };
    let comm = Communicator::connect_blocking(&world, options).unwrap();
    comm.begin(Stream::Host).unwrap().finish().unwrap();
    comm.barrier().unwrap();
    println!("ready");
    if world.rank() == Rank::new(1) {
        std::thread::sleep(Duration::from_secs(1000));
    }
    let began = Instant::now();
    let fault = loop {
        match comm.status() {
            Ok(()) => assert!(began.elapsed() < AMPLE, "the death of rank 1 is not seen"),
            Err(fault) => break fault,
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(fault, Fault::PeerLost { rank, .. } if rank == Rank::new(1)), "{fault}");
}

/// Whether this system lets this user make such a namespace; else says why not.
fn permitted() -> bool {
    let why = match Command::new("unshare").args(UNSHARE).arg("true").output() {
        Ok(end) if end.status.success() => return true,
        Ok(end) => String::from_utf8_lossy(&end.stderr).trim().to_owned(),
        Err(error) => format!("unshare cannot be started: {error}"),
    };
    skipped::skip("bootstrap_namespaces", &why);
    false
}

/// A rank in a namespace of its own, as torchrun in a container describes it.
fn start(rank: u32, runtime: &std::path::Path) -> Child {
    let variables: [(&'static str, OsString); 6] = [
        ("RANK", rank.to_string().into()),
        ("WORLD_SIZE", "2".into()),
        ("LOCAL_RANK", rank.to_string().into()),
        ("LOCAL_WORLD_SIZE", "2".into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", "29500".into()),
    ];
    let inner = command("rank", runtime, &variables);
    let mut outer = Command::new("unshare");
    outer.args(UNSHARE).arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn ranks_in_pid_namespaces_of_their_own_meet_share_memory_and_see_a_death() {
    if !permitted() {
        return;
    }
    let runtime = private();
    let mut ranks: Vec<Child> = (0..2).map(|rank| start(rank, runtime.path())).collect();
    for at in 0..ranks.len() {
        let mut lines = BufReader::new(ranks[at].stdout.as_mut().unwrap()).lines();
        if !lines.any(|line| line.unwrap().contains("ready")) {
            // It has ended, and its words say what is wrong; the other may wait for ever.
            for rank in &mut ranks {
                rank.kill().unwrap();
            }
            return succeed(ranks);
        }
    }
    let mut killed = ranks.pop().unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    succeed(ranks);
    assert_empty(runtime.path());
}
