//! A rendezvous of the program's own: futures under any runtime, and a mesh that does not depend
//! on how ranks have met. The tests start their own binary again.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod bootstrap_common;
mod lateness;

use async_trait::async_trait;
use bootstrap_common::loopback::free_address;
use bootstrap_common::process::{command, role};
use bootstrap_common::{ample, assert_empty, private};
use flux_transport::{
    BootstrapError, Communicator, ControlError, Launch, Rank, Rebuild, Rendezvous, Select,
    ThreadRendezvous, World, WorldError, WorldSize,
};
use lateness::{AMPLE, assert_soon};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn size(ranks: u32) -> WorldSize {
    WorldSize::new(ranks).unwrap()
}

/// Every rank writes a file, and reads those of all.
#[derive(Debug)]
struct Files {
    rank: u32,
    world: u32,
    folder: PathBuf,
}

#[async_trait]
impl Rendezvous for Files {
    async fn exchange(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let path = |rank: u32| self.folder.join(format!("{generation}-{rank}"));
        let part = self.folder.join(format!("{}.part", self.rank));
        std::fs::write(&part, payload).unwrap();
        std::fs::rename(part, path(self.rank)).unwrap();
        let mut given = Vec::new();
        for rank in 0..self.world {
            while !path(rank).exists() {
                if Instant::now() >= deadline {
                    return Err(BootstrapError::Rendezvous { source: "too late".into() });
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            given.push(std::fs::read(path(rank)).unwrap());
        }
        Ok(given)
    }
}

/// Ranks as threads, each of which meets the others as `meet` has it.
fn each(world: u32, meet: impl Fn(Rank, Arc<ThreadRendezvous>) + Sync) {
    std::thread::scope(|scope| {
        for (rank, end) in size(world).ranks().zip(ThreadRendezvous::group(size(world))) {
            let meet = &meet;
            scope.spawn(move || meet(rank, end));
        }
    });
}

/// A world that has met works.
fn works(world: &World) {
    assert_eq!((world.launch(), world.hosts().count()), (Launch::Processes, 1));
    let said = world.control().exchange(&[world.rank().get() as u8], ample()).unwrap();
    assert_eq!(said, world.size().ranks().map(|rank| vec![rank.get() as u8]).collect::<Vec<_>>());
    assert_eq!(world.local_rank(), world.rank().get());
}

#[test]
fn futures_run_under_pollster_and_under_tokio() {
    each(3, |rank, end| {
        let meet = World::builder(rank, size(3)).meet(end);
        let world = pollster::block_on(meet).unwrap();
        works(&world);
        pollster::block_on(Communicator::connect(&world, Select::Host)).unwrap();
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        let ranks: Vec<_> = size(3)
            .ranks()
            .zip(ThreadRendezvous::group(size(3)))
            .map(|(rank, end)| {
                tokio::spawn(async move {
                    // All at once on one thread: nobody holds it while it waits.
                    let world = World::builder(rank, size(3)).meet(end).await.unwrap();
                    Communicator::connect(&world, Select::Host).await.unwrap().rank()
                })
            })
            .collect();
        for (task, rank) in ranks.into_iter().zip(size(3).ranks()) {
            assert_eq!(task.await.unwrap(), rank);
        }
    });
}

#[test]
fn a_dropped_future_ends_its_wait() {
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let directory = private();
    runtime.block_on(async {
        let end = ThreadRendezvous::group(size(2)).remove(0);
        let waits = World::builder(Rank::new(0), size(2)).meet(end);
        assert!(tokio::time::timeout(Duration::from_millis(100), waits).await.is_err());
    });
    let began = Instant::now();
    while threads() > before {
        assert!(began.elapsed() < AMPLE, "a thread waits on");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_soon(began.elapsed(), Duration::from_secs(1));
    assert_empty(directory.path());
}

#[test]
fn a_rank_that_does_not_come_is_named_by_the_deadline() {
    let end = ThreadRendezvous::group(size(3)).remove(1);
    let soon = Duration::from_millis(50);
    let error =
        World::builder(Rank::new(1), size(3)).deadline(soon).meet_blocking(end).unwrap_err();
    assert!(
        matches!(&error, WorldError::Bootstrap(BootstrapError::Timeout { missing, .. })
            if missing[..] == [Rank::new(0), Rank::new(2)]),
        "{error}"
    );
}

/// One that gives other bytes for this rank.
#[derive(Debug)]
struct Gives(Arc<ThreadRendezvous>, Option<&'static [u8]>);

#[async_trait]
impl Rendezvous for Gives {
    async fn exchange(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let payload = self.1.map_or(payload, <[u8]>::to_vec);
        self.0.exchange(generation, payload, deadline).await
    }
}

#[test]
fn a_rank_that_cannot_be_met_tells_all_at_once() {
    let began = Instant::now();
    for (given, said) in [
        (&b"fluxcantits address is no more"[..], "rank 1 cannot be met: its address is no more"),
        (b"", "rank 1 gave what is no place to meet it"),
        (b"fluxhere", "rank 1 gave what is no place to meet it"),
    ] {
        each(3, |rank, end| {
            let given = (rank == Rank::new(1)).then_some(given);
            let end = Arc::new(Gives(end, given));
            let error = World::builder(rank, size(3)).meet_blocking(end).unwrap_err();
            assert!(error.to_string().ends_with(said), "{error}");
        });
    }
    assert_soon(began.elapsed(), Duration::from_secs(2));
}

/// Notes the generations that it was asked for.
#[derive(Debug)]
struct Notes(Arc<ThreadRendezvous>, Mutex<Vec<u64>>);

#[async_trait]
impl Rendezvous for Notes {
    async fn exchange(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        self.1.lock().unwrap().push(generation);
        self.0.exchange(generation, payload, deadline).await
    }
}

#[test]
fn each_rebuild_of_the_whole_is_the_next_generation() {
    each(2, |rank, end| {
        let notes = Arc::new(Notes(end, Mutex::default()));
        let builder = World::builder(rank, size(2)).generation(7);
        let world = builder.meet_blocking(Arc::clone(&notes) as Arc<dyn Rendezvous>).unwrap();
        let mut comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
        for _ in 0..2 {
            comm = comm.rebuild_blocking(Rebuild::Whole).unwrap();
            comm.barrier().unwrap();
        }
        assert_eq!(*notes.1.lock().unwrap(), [7, 8, 9]);
    });
}

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn as_the_role_says() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let rank: u32 = variable("TEST_RANK").parse().unwrap();
    let builder = World::builder(Rank::new(rank), size(3));
    let place = variable("TEST_PLACE");
    let world = match role().as_deref() {
        Some("files") => {
            let files = Files { rank, world: 3, folder: place.into() };
            builder.meet_blocking(Arc::new(files)).unwrap()
        }
        Some("unix") => builder.on_host(place).unwrap(),
        Some("tcp") => {
            let secret =
                flux_transport::Secret::new(*b"a secret of the tests, long enough").unwrap();
            builder.across_hosts(&place, secret).unwrap()
        }
        role => panic!("no such role: {role:?}"),
    };
    world.control().barrier(ample()).unwrap();
    println!("ready");
    if rank == 1 {
        std::thread::sleep(Duration::from_secs(1000));
    }
    let error = world.control().barrier(ample()).unwrap_err();
    assert!(matches!(error, ControlError::PeerLost { rank } if rank == Rank::new(1)), "{error}");
    println!("seen");
    // Nobody leaves before all have seen it.
    std::thread::sleep(Duration::from_millis(300));
}

#[test]
fn a_killed_rank_is_named_within_a_fifth_of_a_second_whatever_the_rendezvous_was() {
    let free = free_address();
    // On one host, and as if each rank were on its own.
    for (role, apart) in [("files", false), ("files", true), ("unix", false), ("tcp", true)] {
        let (folder, runtime) = (private(), private());
        let place = if role == "tcp" {
            free.to_string().into()
        } else {
            folder.path().as_os_str().to_owned()
        };
        let start = |rank: u32| {
            let host = if apart { rank } else { 0 };
            let variables: [(&'static str, OsString); 4] = [
                ("TEST_RANK", rank.to_string().into()),
                ("TEST_PLACE", place.clone()),
                ("FLUX_HOST_ID", host.to_string().into()),
                ("FLUX_ADDRESS", free.ip().to_string().into()),
            ];
            command(role, runtime.path(), &variables).spawn().unwrap()
        };
        let mut ranks: Vec<_> = (0..3).map(start).collect();
        let mut lines: Vec<_> = ranks
            .iter_mut()
            .map(|rank| BufReader::new(rank.stdout.take().unwrap()).lines())
            .collect();
        for lines in &mut lines {
            assert!(lines.any(|line| line.unwrap().contains("ready")), "{role}: a rank has ended");
        }
        let began = Instant::now();
        ranks[1].kill().unwrap();
        for rank in [0, 2] {
            assert!(lines[rank].any(|line| line.unwrap().contains("seen")), "{role}: rank {rank}");
        }
        assert_soon(began.elapsed(), Duration::from_millis(200));
        for (rank, mut process) in ranks.into_iter().enumerate() {
            assert_eq!(process.wait().unwrap().success(), rank != 1, "{role}: rank {rank}");
        }
        assert_empty(runtime.path());
    }
}
