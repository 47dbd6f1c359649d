//! Hostile clients while a group forms, and hosts without resources: the group forms or says why.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;
#[path = "../../flux-kernels/tests/skipped/mod.rs"]
mod skipped;

mod lateness;
use lateness::{AMPLE, assert_soon};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bootstrap_common::network::{Site, told};
use bootstrap_common::process::{ROLE, command, role, succeed};
use bootstrap_common::{
    after, ample, assert_empty, each, environment, join_all, private, raw_client,
};
use flux_core::WorldSize;
use flux_core::layout::WorkspaceSize;
use flux_transport::internal::control::join;
use flux_transport::launch::{Launcher, exit_code};
use flux_transport::{BootstrapError, Environment};
use flux_transport::{Communicator, Options, Rebuild, Select, Stream, World, WorldError};
use rustix::process::{Resource, Rlimit};

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn as_the_role_says() {
    let role = role().expect("a role");
    let world = match role.split_once(' ') {
        Some(("limited", limit)) => {
            let limit = Some(limit.parse().unwrap());
            rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit })
                .unwrap();
            World::from_env()
        }
        _ if role == "rebuilds" => return rebuilds(&World::from_env().unwrap()),
        _ if role == "grows" => return grows(&World::from_env().unwrap()),
        _ if role == "launches" => return launches(),
        _ if role == "shares" => return shares(&World::from_env().unwrap()),
        _ => World::from_env(),
    };
    match world {
        Ok(world) => {
            world.control().barrier(ample()).unwrap();
            println!("met");
        }
        Err(WorldError::Bootstrap(error)) => println!("failed: {error}"),
        Err(error) => panic!("{error}"),
    }
}

/// Rebuilds twice: rank 0 has no descriptors for it the first time.
fn rebuilds(world: &World) {
    let comm =
        Communicator::connect_blocking(world, Options { deadline: AMPLE, ..Select::Host.into() })
            .unwrap();
    let leads = world.rank().get() == 0;
    let before = rustix::process::getrlimit(Resource::Nofile);
    if leads {
        // All below the first that is free are taken: one is left.
        let free = std::fs::File::open("/dev/null").unwrap().as_raw_fd().cast_unsigned();
        rustix::process::setrlimit(
            Resource::Nofile,
            Rlimit { current: Some(u64::from(free) + 1), maximum: before.maximum },
        )
        .unwrap();
    }
    let began = Instant::now();
    let refused = comm.rebuild_blocking(Rebuild::Survivors).unwrap_err().to_string();
    assert_soon(began.elapsed(), Duration::from_secs(5));
    let expected = if leads {
        "regrouping: Too many open files"
    } else {
        "rank 0 could not connect the ranks that are left: Too many open files"
    };
    assert!(refused.starts_with(expected), "{refused}");
    if leads {
        rustix::process::setrlimit(Resource::Nofile, before).unwrap();
    }
    let again = comm.rebuild_blocking(Rebuild::Survivors).unwrap();
    assert_eq!(
        (again.world_size(), again.rank()),
        (world.size(), world.rank()),
        "nobody was given up"
    );
    again.barrier().unwrap();
}

/// Grows memory that rank 1 has a descriptor for of its own, and none for that of rank 0.
fn grows(world: &World) {
    let options = Options { deadline: AMPLE, ..Select::Host.into() };
    let comm = Communicator::connect_blocking(world, options).unwrap();
    let short = world.rank().get() == 1;
    let before = rustix::process::getrlimit(Resource::Nofile);
    if short {
        let free = std::fs::File::open("/dev/null").unwrap().as_raw_fd().cast_unsigned();
        rustix::process::setrlimit(
            Resource::Nofile,
            Rlimit { current: Some(u64::from(free) + 1), maximum: before.maximum },
        )
        .unwrap();
    }
    let refused = comm
        .reserve(WorkspaceSize { half_bytes: 1 << 20, signals: 8, counters: 1 })
        .unwrap_err()
        .to_string();
    rustix::process::setrlimit(Resource::Nofile, before).unwrap();
    assert!(refused.contains("rank 1") && refused.contains("Too many open files"), "{refused}");
    // All have refused it together, and are in step.
    comm.reserve(WorkspaceSize { half_bytes: 1 << 20, signals: 8, counters: 1 }).unwrap();
    comm.barrier().unwrap();
}

/// Starts two ranks in whatever namespace this process is in.
fn launches() {
    let ranks = Launcher::new(WorldSize::new(2).unwrap(), std::env::current_exe().unwrap());
    let status = ranks
        .args(["--ignored", "--exact", "as_the_role_says", "--nocapture"])
        .env(ROLE, "shares")
        .run()
        .unwrap();
    assert_eq!(exit_code(status), 0, "a rank failed; its words are above");
}

/// Shares memory with its peers where nothing can be made in /dev/shm.
fn shares(world: &World) {
    let shm = Path::new("/dev/shm");
    let refused = std::fs::File::create(shm.join("flux-test")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull, "{refused}");
    let reserve = WorkspaceSize { half_bytes: 1 << 20, signals: 8, counters: 1 };
    let options = Options { reserve, deadline: AMPLE, ..Select::Host.into() };
    let comm = Communicator::connect_blocking(world, options).unwrap();
    comm.reserve(WorkspaceSize { half_bytes: 2 << 20, ..reserve }).unwrap();
    comm.begin(Stream::Host).unwrap().finish().unwrap();
    assert_empty(shm);
    comm.barrier().unwrap();
}

/// What the processes said last, by rank.
fn verdicts(children: Vec<Child>) -> Vec<String> {
    let said = |child: Child| {
        let end = child.wait_with_output().unwrap();
        assert!(end.status.success(), "{}", String::from_utf8_lossy(&end.stderr));
        let said = String::from_utf8(end.stdout).unwrap();
        // On one core the test harness begins the line with the test's name.
        let mut lines = said
            .lines()
            .map(|line| line.strip_prefix("test as_the_role_says ... ").unwrap_or(line));
        lines
            .find(|line| line.starts_with("met") || line.starts_with("failed: "))
            .unwrap()
            .to_owned()
    };
    children.into_iter().map(said).collect()
}

/// Pseudorandom bytes; the same in every run.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(step).collect()
}

/// A place where ranks meet, as a stranger sees it.
trait Meeting: Sync {
    type Client: Send;
    fn ranks(&self) -> Vec<Environment>;
    /// `None` where nobody listens.
    fn try_connect(&self) -> Option<Self::Client>;
    /// Whether the other end may still take it.
    fn say(&self, client: &mut Self::Client, bytes: &[u8]) -> bool;
    /// Where files could be left.
    fn directory(&self) -> &Path;

    fn connect(&self) -> Self::Client {
        let deadline = ample();
        loop {
            if let Some(client) = self.try_connect() {
                return client;
            }
            assert!(Instant::now() < deadline, "rank 0 does not listen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct OnHost(tempfile::TempDir);

impl Meeting for OnHost {
    type Client = OwnedFd;

    fn ranks(&self) -> Vec<Environment> {
        (0..4).map(|rank| environment(self.0.path(), rank, 4)).collect()
    }

    fn try_connect(&self) -> Option<OwnedFd> {
        raw_client::connect_once(self.0.path())
    }

    fn say(&self, client: &mut OwnedFd, bytes: &[u8]) -> bool {
        raw_client::say(client, bytes)
    }

    fn directory(&self) -> &Path {
        self.0.path()
    }
}

struct AcrossHosts(Site);

impl Meeting for AcrossHosts {
    type Client = TcpStream;

    fn ranks(&self) -> Vec<Environment> {
        self.0.ranks(&[0, 1, 0, 1])
    }

    fn try_connect(&self) -> Option<TcpStream> {
        TcpStream::connect(self.0.address).ok()
    }

    fn say(&self, client: &mut TcpStream, bytes: &[u8]) -> bool {
        client.write_all(bytes).is_ok()
    }

    fn directory(&self) -> &Path {
        self.0.directory.path()
    }
}

struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A group forms although 1,000 clients come and go, 100 talk nonsense, 10 drip and 10 stay silent.
fn form_under_abuse<M: Meeting>(
    meeting: &M,
    nonsense: impl Fn(u64) -> Vec<u8>,
    drip: &[u8],
    also: impl Fn() + Sync,
) {
    let done = AtomicBool::new(false);
    let ranks = meeting.ranks();
    let (last, early) = ranks.split_last().unwrap();
    let began = Instant::now();
    let planes = std::thread::scope(|scope| {
        // Also when a rank fails: the scope waits for the threads below.
        let _end = Done(&done);
        let early = scope.spawn(move || join_all(early, ample()));
        let _silent: Vec<_> = (0..10).map(|_| meeting.connect()).collect();
        for _ in 0..10 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let mut client = meeting.try_connect();
                    let mut bytes = drip.iter().cycle();
                    while client
                        .as_mut()
                        .is_some_and(|client| meeting.say(client, &[*bytes.next().unwrap()]))
                        && !done.load(Ordering::Relaxed)
                    {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                also();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for number in 0..1000 {
            drop(meeting.connect());
            if number % 10 == 0 {
                meeting.say(&mut meeting.connect(), &nonsense(number));
            }
        }
        let last = join(last, ample()).unwrap();
        early.join().unwrap().into_iter().map(Result::unwrap).chain([last]).collect::<Vec<_>>()
    });
    assert_soon(began.elapsed(), Duration::from_secs(20));
    assert_empty(meeting.directory());
    each(&planes, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn a_group_on_one_host_forms_under_abuse() {
    form_under_abuse(
        &OnHost(private()),
        |number| noise(number, 1 + number as usize % 300),
        b"fluxhelo",
        || {},
    );
}

/// Where this process listens: rank 0, and all ranks in the second step.
fn listening() -> Vec<SocketAddrV4> {
    let sockets: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| {
            std::fs::read_link(entry.ok()?.path())
                .ok()?
                .to_str()?
                .strip_prefix("socket:[")?
                .strip_suffix(']')
                .map(str::to_owned)
        })
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let place = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let ours = fields[3] == "0A" && sockets.iter().any(|inode| inode == fields[9]);
        let (address, port) = fields[1].split_once(':').unwrap();
        let [address, port] = [address, port].map(|hex| u32::from_str_radix(hex, 16).unwrap());
        // The four bytes as they lie in memory.
        let address = Ipv4Addr::from(address.to_ne_bytes());
        ours.then(|| SocketAddrV4::new(address, port.try_into().unwrap()))
    };
    table.lines().skip(1).filter_map(place).collect()
}

#[test]
fn a_group_across_hosts_forms_under_abuse_of_all_its_ports() {
    let meeting = AcrossHosts(Site::new());
    // A length that is possible, one that is not, and what a web browser says.
    let nonsense = |number: u64| match number / 10 % 3 {
        0 => [&100_u32.to_le_bytes()[..], &noise(number, 100)].concat(),
        1 => noise(number, 1 + number as usize % 300),
        _ => b"GET / HTTP/1.1\r\nHost: flux\r\n\r\n".to_vec(),
    };
    let scan = || {
        for place in listening() {
            if let Ok(mut client) = TcpStream::connect(place) {
                let port = place.port();
                let _ = client.write_all(&noise(port.into(), port as usize % 50));
            }
        }
    };
    // Room for an answer, a byte of it at a time.
    form_under_abuse(&meeting, nonsense, &[200, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], scan);
}

#[test]
fn who_says_nothing_or_drips_is_closed_long_before_the_deadline() {
    let site = Site::new();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| join(&site.rank(&told(0, &[0, 1])), ample()).unwrap());
        let (mut silent, mut slow) = (site.connect(), site.connect());
        let began = Instant::now();
        // The challenge, and then the end.
        let mut heard = Vec::new();
        let dripping = scope.spawn(move || {
            slow.write_all(&[200, 0, 0, 0]).unwrap();
            while slow.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        silent.read_to_end(&mut heard).unwrap();
        assert!(heard[4..].starts_with(b"fluxauth") && heard.len() == 60, "{heard:?}");
        dripping.join().unwrap();
        assert_soon(began.elapsed(), Duration::from_secs(5));
        join(&site.rank(&told(1, &[0, 1])), ample()).unwrap();
        waiting.join().unwrap();
    });
}

#[test]
fn descriptors_for_the_ranks_are_taken_from_strangers() {
    for across in [false, true] {
        let (site, directory) = (Site::new(), private());
        let start = |rank: u32| {
            // Enough for four ranks, and for a few strangers.
            let role = if rank == 0 { "limited 36" } else { "free" };
            if across {
                return command(
                    role,
                    site.directory.path(),
                    &site.variables(&told(rank, &[0, 1, 0, 1])),
                )
                .spawn()
                .unwrap();
            }
            let set = [
                ("FLUX_RANK", rank.to_string()),
                ("FLUX_WORLD_SIZE", "4".to_owned()),
                ("FLUX_LOCAL_RANK", rank.to_string()),
            ];
            let mut set: Vec<_> = set.map(|(name, value)| (name, value.into())).into();
            set.push(("FLUX_RENDEZVOUS", directory.path().into()));
            command(role, directory.path(), &set).spawn().unwrap()
        };
        let mut children = vec![start(0)];
        let silent_here: Vec<_> =
            (0..60).filter(|_| !across).map(|_| raw_client::connect(directory.path())).collect();
        let silent_there: Vec<_> = (0..60).filter(|_| across).map(|_| site.connect()).collect();
        children.extend((1..4).map(start));
        succeed(children);
        drop((silent_here, silent_there));
        assert_empty(directory.path());
        assert_empty(site.directory.path());
    }
}

#[test]
fn too_few_descriptors_for_the_ranks_are_said_to_all_of_them() {
    for across in [false, true] {
        let (site, directory) = (Site::new(), private());
        let start = |rank: u32| {
            let role = if rank == 0 { "limited 12" } else { "free" };
            if across {
                return command(
                    role,
                    site.directory.path(),
                    &site.variables(&told(rank, &[0; 12])),
                )
                .spawn()
                .unwrap();
            }
            let set = [
                ("FLUX_RANK", rank.to_string()),
                ("FLUX_WORLD_SIZE", "12".to_owned()),
                ("FLUX_LOCAL_RANK", rank.to_string()),
            ];
            let mut set: Vec<_> = set.map(|(name, value)| (name, value.into())).into();
            set.push(("FLUX_RENDEZVOUS", directory.path().into()));
            command(role, directory.path(), &set).spawn().unwrap()
        };
        let began = Instant::now();
        for verdict in verdicts((0..12).map(start).collect()) {
            assert!(
                verdict.contains("rank 0 could not connect the ranks: Too many open files"),
                "{verdict}"
            );
        }
        assert_soon(began.elapsed(), Duration::from_secs(15));
        assert_empty(directory.path());
        assert_empty(site.directory.path());
    }
}

/// Processes in this role make a world, and all succeed.
fn all_succeed(role: &str, world: u32) {
    let directory = private();
    let start = |rank: u32| {
        let set = [("FLUX_RANK", rank), ("FLUX_WORLD_SIZE", world), ("FLUX_LOCAL_RANK", rank)];
        let mut set: Vec<_> = set.map(|(name, value)| (name, value.to_string().into())).into();
        set.push(("FLUX_RENDEZVOUS", directory.path().into()));
        command(role, directory.path(), &set).spawn().unwrap()
    };
    succeed((0..world).map(start).collect());
}

#[test]
fn a_rank_that_cannot_connect_those_that_are_left_says_so_and_is_not_given_up() {
    all_succeed("rebuilds", 3);
}

#[test]
fn a_rank_that_cannot_take_a_descriptor_blames_nobody_else() {
    all_succeed("grows", 2);
}

fn torchrun(rank: u32, runtime: &Path) -> Vec<(&'static str, std::ffi::OsString)> {
    let set = [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", "2".to_owned()),
        ("LOCAL_WORLD_SIZE", "2".to_owned()),
    ];
    let mut set: Vec<_> = set.map(|(name, value)| (name, value.into())).into();
    set.extend([
        ("MASTER_ADDR", "localhost".into()),
        ("MASTER_PORT", "29500".into()),
        ("XDG_RUNTIME_DIR", runtime.into()),
    ]);
    set
}

#[test]
fn a_directory_where_nothing_can_be_made_is_named() {
    // Of the kernel's: not even root makes anything there.
    let ranks = [0, 1].map(|rank| {
        let set = torchrun(rank, Path::new("/proc"));
        Environment::parse(&|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
        })
        .unwrap()
    });
    let errors: Vec<_> = join_all(&ranks, after(300)).into_iter().map(Result::unwrap_err).collect();
    let BootstrapError::Directory { path, problem } = &errors[0] else { panic!("{}", errors[0]) };
    assert!(path.starts_with("/proc") && problem.starts_with("cannot be made"), "{}", errors[0]);
    assert!(
        errors[1].to_string().contains("not seen: rank 0; rank 0 was looked for in /proc/"),
        "{}",
        errors[1]
    );
}

/// How a process ends whose `full` is a file system of one inode; `None` if the system gives none.
fn ends_where_full(full: &Path, process: &Command) -> Option<Output> {
    let script =
        "mount -t tmpfs -o size=4k,nr_inodes=1 none \"$0\" || exit 77; echo mounted; exec \"$@\"";
    let mut inside = Command::new("unshare");
    inside
        .args(["--map-root-user", "--mount", "sh", "-c", script])
        .arg(full)
        .arg(process.get_program())
        .args(process.get_args());
    for (name, value) in process.get_envs() {
        if let Some(value) = value {
            inside.env(name, value);
        } else {
            inside.env_remove(name);
        }
    }
    let child = inside.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let end = child
        .and_then(Child::wait_with_output)
        .ok()
        .filter(|end| end.stdout.starts_with(b"mounted\n"));
    if end.is_none() {
        skipped::skip("bootstrap_abuse", &"this system gives no mount namespace to tests");
    }
    end
}

#[test]
fn a_full_directory_is_named() {
    let directory = private();
    let rank = command("free", directory.path(), &torchrun(0, directory.path()));
    let Some(end) = ends_where_full(directory.path(), &rank) else { return };
    assert!(end.status.success(), "{}", String::from_utf8_lossy(&end.stderr));
    let said = String::from_utf8_lossy(&end.stdout);
    assert!(said.contains("cannot be made: No space left on device"), "{said}");
}

#[test]
fn ranks_share_memory_where_dev_shm_is_full() {
    let directory = private();
    let launcher = command("launches", directory.path(), &[]);
    let Some(end) = ends_where_full(Path::new("/dev/shm"), &launcher) else { return };
    let said = String::from_utf8_lossy(&end.stdout);
    assert!(
        end.status.success() && said.matches("1 passed").count() == 3,
        "{said}{}",
        String::from_utf8_lossy(&end.stderr)
    );
}
