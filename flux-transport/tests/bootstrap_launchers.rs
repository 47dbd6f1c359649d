//! Processes with each launcher's variables, on one host and on several.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;

mod lateness;
use lateness::assert_soon;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Child;
use std::time::{Duration, Instant};

use bootstrap_common::network::{SECRET, Site, told};
use bootstrap_common::process::{command, role, succeed};
use bootstrap_common::{ample, assert_empty, private};
use flux_core::Rank;
use flux_transport::{ControlError, World};

type Variables = Vec<(&'static str, OsString)>;

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn as_the_role_says() {
    match role().expect("a role").as_str() {
        "meets" => meets(),
        "sees a death" => sees_a_death(),
        role => panic!("no such role: {role}"),
    }
}

fn number(variable: &str) -> u32 {
    std::env::var(variable).unwrap().parse().unwrap()
}

/// Meets the others, finds itself where the test has put it, and leaves.
fn meets() {
    let world = World::from_env().unwrap();
    let seen = (world.rank().get(), world.size().get(), world.local_rank(), world.hosts().count());
    assert_eq!(
        seen,
        (number("TEST_RANK"), number("TEST_WORLD"), number("TEST_LOCAL"), number("TEST_HOSTS"))
    );
    let got = world.control().exchange(&world.rank().get().to_le_bytes(), ample()).unwrap();
    assert_eq!(got, world.size().ranks().map(|rank| rank.get().to_le_bytes()).collect::<Vec<_>>());
    world.control().barrier(ample()).unwrap();
}

/// Says that the group is there, and then either waits to be killed or for that of rank 3.
#[expect(clippy::print_stdout, reason = "read by the test that started this process")]
fn sees_a_death() {
    let world = World::from_env().unwrap();
    world.control().barrier(ample()).unwrap();
    println!("ready");
    if world.rank() == Rank::new(3) {
        std::thread::sleep(Duration::from_secs(1000));
    }
    let error = world.control().barrier(ample()).unwrap_err();
    assert!(matches!(error, ControlError::PeerLost { rank } if rank == Rank::new(3)), "{error}");
    // The kernel ends a killed rank's connections one by one; leaving at once could be seen first.
    std::thread::sleep(Duration::from_millis(300));
}

/// How a launcher describes rank `rank` of `hosts * local`, `local` of them a host.
type Describe = fn(rank: u32, hosts: u32, local: u32, port: u16) -> Variables;

fn text(value: impl std::fmt::Display) -> OsString {
    format!("{value}").into()
}

fn torchrun(rank: u32, hosts: u32, local: u32, port: u16) -> Variables {
    vec![
        ("RANK", text(rank)),
        ("WORLD_SIZE", text(hosts * local)),
        ("LOCAL_RANK", text(rank % local)),
        ("LOCAL_WORLD_SIZE", text(local)),
        ("MASTER_ADDR", text("127.0.0.1")),
        ("MASTER_PORT", text(port)),
    ]
}

fn slurm(rank: u32, hosts: u32, local: u32, port: u16) -> Variables {
    vec![
        ("SLURM_PROCID", text(rank)),
        ("SLURM_NTASKS", text(hosts * local)),
        ("SLURM_LOCALID", text(rank % local)),
        ("SLURM_JOB_ID", text(port)),
        ("SLURM_STEP_ID", text(0)),
        ("SLURM_STEP_NUM_NODES", text(hosts)),
        ("SLURM_STEP_NODELIST", text("localhost,other[1-3]")),
    ]
}

fn open_mpi(rank: u32, hosts: u32, local: u32, port: u16) -> Variables {
    vec![
        ("OMPI_COMM_WORLD_RANK", text(rank)),
        ("OMPI_COMM_WORLD_SIZE", text(hosts * local)),
        ("OMPI_COMM_WORLD_LOCAL_RANK", text(rank % local)),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", text(local)),
        ("PMIX_NAMESPACE", text(format!("prterun-{port}@1"))),
        // For several hosts, as who starts PyTorch by mpirun does.
        ("MASTER_ADDR", text("127.0.0.1")),
        ("MASTER_PORT", text(port)),
    ]
}

fn mpich(rank: u32, hosts: u32, local: u32, port: u16) -> Variables {
    vec![
        ("PMI_RANK", text(rank)),
        ("PMI_SIZE", text(hosts * local)),
        ("MPI_LOCALRANKID", text(rank % local)),
        ("MPI_LOCALNRANKS", text(local)),
        ("MASTER_ADDR", text("127.0.0.1")),
        ("MASTER_PORT", text(port)),
    ]
}

const LAUNCHERS: [(&str, Describe); 4] =
    [("torchrun", torchrun), ("slurm", slurm), ("openmpi", open_mpi), ("mpich", mpich)];

fn meet(describe: Describe, hosts: u32, local: u32) {
    let runtime = private();
    // Where torchrun's own store would be; nobody comes to it.
    let store = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    store.set_nonblocking(true).unwrap();
    let port = store.local_addr().unwrap().port();
    let start = |rank: u32| -> Child {
        let mut variables = describe(rank, hosts, local, port);
        let expected = [
            ("TEST_RANK", rank),
            ("TEST_WORLD", hosts * local),
            ("TEST_LOCAL", rank % local),
            ("TEST_HOSTS", hosts),
        ];
        variables.extend(expected.map(|(name, value)| (name, text(value))));
        if hosts > 1 {
            variables.extend([("FLUX_SECRET", text(SECRET)), ("FLUX_HOST_ID", text(rank / local))]);
        }
        command("meets", runtime.path(), &variables).spawn().unwrap()
    };
    succeed((0..hosts * local).map(start).collect());
    assert_empty(runtime.path());
    assert_eq!(store.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn processes_of_every_launcher_meet_on_one_host() {
    for (name, describe) in LAUNCHERS {
        println!("{name}");
        meet(describe, 1, 3);
    }
}

#[test]
fn processes_of_every_launcher_meet_on_several_hosts() {
    for (name, describe) in LAUNCHERS {
        println!("{name}");
        meet(describe, 2, 2);
    }
}

#[test]
fn a_secret_in_a_file_does_as_well_and_none_is_refused_with_how_to_set_it() {
    let (site, file) = (Site::new(), tempfile::NamedTempFile::new().unwrap());
    std::fs::write(file.path(), format!("{SECRET}\n")).unwrap();
    let start = |rank: u32, role: &str, secret: Option<OsString>| {
        let mut variables: Variables = site.variables(&told(rank, &[0, 1])).into();
        variables.retain(|(name, _)| *name != "FLUX_SECRET");
        variables.extend(secret.map(|path| ("FLUX_SECRET_FILE", path)));
        variables.extend(
            [("TEST_RANK", rank), ("TEST_WORLD", 2), ("TEST_LOCAL", 0), ("TEST_HOSTS", 2)]
                .map(|(name, value)| (name, text(value))),
        );
        command(role, site.directory.path(), &variables).spawn().unwrap()
    };
    succeed((0..2).map(|rank| start(rank, "meets", Some(file.path().into()))).collect());
    let end = start(1, "meets", None).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&end.stderr);
    assert!(!end.status.success() && said.contains("need a secret that they share"), "{said}");
}

#[test]
fn a_killed_rank_is_seen_on_other_hosts_within_a_second() {
    let (site, hosts) = (Site::new(), [0, 1, 0, 1, 2]);
    let mut children: Vec<Child> = (0..5)
        .map(|rank| {
            command("sees a death", site.directory.path(), &site.variables(&told(rank, &hosts)))
                .spawn()
                .unwrap()
        })
        .collect();
    for child in &mut children {
        let mut output = std::io::BufReader::new(child.stdout.as_mut().unwrap());
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert_ne!(
                std::io::BufRead::read_line(&mut output, &mut line).unwrap(),
                0,
                "a rank ended before the group was there"
            );
        }
    }
    let mut killed = children.remove(3);
    killed.kill().unwrap();
    let began = Instant::now();
    succeed(children);
    assert_soon(began.elapsed(), Duration::from_secs(1));
    killed.wait().unwrap();
    assert_empty(site.directory.path());
}
