//! Real processes: the launcher, and ranks that die.
//!
//! Each process is this test's program again, with its role in `FLUX_TEST_ROLE`.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;
mod processes;

mod lateness;
use lateness::{AMPLE, assert_soon};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bootstrap_common::{ample, assert_empty, private};
use flux_core::{Rank, WorldSize};
use flux_transport::BootstrapError;
use flux_transport::internal::control::Notice;
use flux_transport::internal::control::join;
use flux_transport::launch::{LaunchError, Launcher, exit_code};
use flux_transport::{ControlError, Launch, World, WorldError};
use processes::{gone_within, runs};
use rustix::process::{Pid, Resource, Rlimit, Signal};

const ROLE: &str = "FLUX_TEST_ROLE";
/// Where a process notes what the test asks for, a file each.
const NOTES: &str = "FLUX_TEST_NOTES";

/// The entry of the processes that the tests start.
#[test]
#[ignore = "run by the tests that start it, in processes of their own"]
fn as_the_role_says() {
    let role = std::env::var_os(ROLE).expect("a role");
    match role.to_str().unwrap() {
        "exchange" => exchange(),
        "is apart" => is_apart(),
        "sees a death" => sees_a_death(),
        "waits" => waits(),
        "launches" => launches(&rank_launcher("waits", 3, &notes())),
        "launches the deaf" => launches(&shell(
            2,
            "trap '' TERM; echo > $FLUX_TEST_NOTES/$FLUX_RANK; while true; do sleep 0.01; done",
        )),
        "launches a while" => {
            launches(&shell(
                1,
                "echo > $FLUX_TEST_NOTES/$FLUX_RANK; while [ ! -e $FLUX_TEST_NOTES/go ]; do sleep \
                 0.01; done; exit 5",
            ));
        }
        "launches at once" => launches(&shell(1, "exit 0")),
        "launches untold" => launches_untold(),
        "meets nobody so soon" => {
            note(
                "error",
                &World::from_env_with(Duration::from_millis(50)).unwrap_err().to_string(),
            );
        }
        "meets nobody" => note("error", &format!("{:?}", World::from_env().unwrap_err())),
        role => panic!("no such role: {role}"),
    }
}

fn notes() -> PathBuf {
    std::env::var_os(NOTES).unwrap().into()
}

fn note(name: &str, text: &str) {
    let path = notes();
    // Under its name only when it is whole.
    let part = path.join(format!("{name}.part"));
    std::fs::write(&part, text).unwrap();
    std::fs::rename(part, path.join(name)).unwrap();
}

fn noted(notes: &Path, name: &str) -> String {
    let deadline = ample();
    loop {
        if let Ok(text) = std::fs::read_to_string(notes.join(name)) {
            return text;
        }
        assert!(Instant::now() < deadline, "no note {name}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn exchange() {
    let world = World::from_env().unwrap();
    let control = world.control();
    let own = world.rank().get();
    assert_eq!((world.launch(), world.local_rank()), (Launch::Processes, own));
    let got = control.exchange(&own.to_le_bytes(), ample()).unwrap();
    let expected: Vec<_> = world.size().ranks().map(|rank| rank.get().to_le_bytes()).collect();
    assert_eq!(got, expected);
    // A file without a name, written by one process and read and written by the others.
    let mut file =
        File::from(rustix::fs::memfd_create("flux-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    write!(file, "of {own}").unwrap();
    for (rank, mut fds) in
        control.exchange_fds(&[file.as_fd()], ample()).unwrap().into_iter().enumerate()
    {
        let Some(fd) = fds.pop() else {
            assert_eq!(rank, own as usize);
            continue;
        };
        let mut theirs = File::from(fd);
        let mut text = String::new();
        // By one of them: all who hold the file share its offset.
        if own == (rank as u32 + 1) % world.size().get() {
            theirs.rewind().unwrap();
            theirs.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("of {rank}"));
            write!(theirs, ", seen by {own}").unwrap();
        }
    }
    control.barrier(ample()).unwrap();
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, format!("of {own}, seen by {}", (own + 1) % world.size().get()));
    control.barrier(ample()).unwrap();
}

/// A rank of five on two hosts.
fn is_apart() {
    let world = World::from_env().unwrap();
    let own = world.rank();
    assert_eq!((world.launch(), world.local_rank()), (Launch::Processes, own.get()));
    let hosts: Vec<u32> = world.size().ranks().map(|rank| world.hosts().of(rank)).collect();
    assert_eq!(hosts, [0, 0, 0, 1, 1]);
    let control = world.control();
    let text = std::env::var("NCCL_HOSTID").unwrap();
    let said = control.exchange(text.as_bytes(), ample()).unwrap();
    for rank in world.size().ranks() {
        assert_eq!(
            said[rank.index()] == text.as_bytes(),
            world.hosts().together(own, rank),
            "{said:?}"
        );
    }
    let (file, _) = rustix::pipe::pipe().unwrap();
    let given = control.exchange_fds(&[file.as_fd()], ample()).unwrap();
    assert!(world.size().ranks().all(|rank| given[rank.index()].len()
        == usize::from(rank != own && world.hosts().together(own, rank))));
    control.barrier(ample()).unwrap();
    let variables = ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NET", "NCCL_SOCKET_IFNAME"]
        .map(|name| std::env::var(name).unwrap());
    note(&format!("apart-{own}"), &variables.join(" "));
}

fn sees_a_death() {
    let world = World::from_env().unwrap();
    let (sender, heard) = std::sync::mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let watcher: std::sync::Arc<flux_transport::internal::control::Watcher> =
        std::sync::Arc::new(move |notice| sender.lock().unwrap().send(notice).unwrap_or_default());
    world.control().watch(std::sync::Arc::downgrade(&watcher));
    world.control().barrier(ample()).unwrap();
    note(&format!("ready-{}", world.rank()), "");
    if world.rank() == Rank::new(1) {
        std::thread::sleep(Duration::from_secs(1000));
    }
    let error = world.control().barrier(ample()).unwrap_err();
    assert!(matches!(error, ControlError::PeerLost { rank } if rank == Rank::new(1)), "{error}");
    assert_eq!(heard.recv_timeout(AMPLE), Ok(Notice::Lost(Rank::new(1))));
}

/// A rank with a child of its own, for ever.
fn waits() {
    let world = World::from_env().unwrap();
    // A signal that asks for a core is to leave none.
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
        .unwrap();
    // It hears none of the signals: the end of its rank has to be its end.
    let mut child = Command::new("sh")
        .args(["-c", "trap '' INT TERM QUIT HUP; exec sleep 60"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    note(&format!("pids-{}", world.rank()), &format!("{} {}", std::process::id(), child.id()));
    child.wait().unwrap();
}

#[expect(clippy::exit, reason = "the launch's status is this process's")]
fn launches(launcher: &Launcher) {
    let status = launcher.run().unwrap();
    std::process::exit(exit_code(status).into());
}

fn rank_launcher(role: &str, ranks: u32, notes: &Path) -> Launcher {
    Launcher::new(WorldSize::new(ranks).unwrap(), std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "as_the_role_says", "--nocapture"])
        .env(ROLE, role)
        .env(NOTES, notes)
}

/// A process of this program with a role; with `rank` of a world, as a launcher would start it.
fn start(role: &str, notes: &Path, rank: Option<(u32, u32, &Path)>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--ignored", "--exact", "as_the_role_says", "--nocapture"])
        .env(ROLE, role)
        .env(NOTES, notes)
        .env("XDG_RUNTIME_DIR", notes);
    if let Some((rank, world, directory)) = rank {
        command.env("FLUX_RANK", rank.to_string()).env("FLUX_LOCAL_RANK", rank.to_string());
        command.env("FLUX_WORLD_SIZE", world.to_string()).env("FLUX_RENDEZVOUS", directory);
    }
    command.stdout(Stdio::null()).spawn().unwrap()
}

fn shell(ranks: u32, script: &str) -> Launcher {
    Launcher::new(WorldSize::new(ranks).unwrap(), "sh").args(["-c", script])
}

#[test]
fn launched_ranks_meet_exchange_and_pass_descriptors_both_ways() {
    for ranks in [2, 5] {
        let notes = private();
        let status = rank_launcher("exchange", ranks, notes.path()).run().unwrap();
        assert!(status.success(), "{ranks} ranks: {status}");
    }
}

#[test]
fn ranks_that_are_kept_apart_meet_as_on_several_hosts() {
    let (notes, meeting) = (private(), private());
    let launcher =
        rank_launcher("is apart", 5, notes.path()).env("XDG_RUNTIME_DIR", meeting.path()).apart(2);
    let status = launcher.run().unwrap();
    assert!(status.success(), "{status}");
    for rank in 0..5 {
        assert_eq!(noted(notes.path(), &format!("apart-{rank}")), "1 1 Socket lo");
    }
    assert_empty(meeting.path());
}

#[test]
fn more_hosts_than_ranks_are_refused() {
    for hosts in [0, 3] {
        let error = shell(2, "exit 0").apart(hosts).run().unwrap_err();
        assert!(
            matches!(error, LaunchError::Hosts { .. })
                && error.to_string().contains("give 1 to 2 hosts"),
            "{error}"
        );
    }
}

#[test]
fn a_killed_rank_is_seen_by_the_others_within_a_second() {
    let (notes, directory) = (private(), private());
    let mut children: Vec<_> = (0..4)
        .map(|rank| start("sees a death", notes.path(), Some((rank, 4, directory.path()))))
        .collect();
    for rank in 0..4 {
        noted(notes.path(), &format!("ready-{rank}"));
    }
    let killed = Instant::now();
    children[1].kill().unwrap();
    for (rank, child) in children.iter_mut().enumerate() {
        let status = child.wait().unwrap();
        assert_soon(killed.elapsed(), Duration::from_secs(1));
        assert_eq!(status.success(), rank != 1, "rank {rank}: {status}");
    }
    assert_empty(directory.path());
}

#[test]
fn processes_with_the_same_rank_both_hear_of_the_other() {
    let (notes, directory) = (private(), private());
    let names = ["a", "b"].map(|name| {
        let own = notes.path().join(name);
        std::fs::create_dir(&own).unwrap();
        own
    });
    let mut children = [&names[0], &names[1]]
        .map(|notes| start("meets nobody", notes, Some((1, 3, directory.path()))));
    // Rank 0 is this process.
    let of = |rank| bootstrap_common::environment(directory.path(), rank, 3);
    let error = std::thread::scope(|scope| {
        // Rank 2 comes last: otherwise the group could form with one of the two.
        scope.spawn(|| {
            noted(&names[0], "error");
            assert!(matches!(join(&of(2), ample()), Err(BootstrapError::DuplicateRank { .. })));
        });
        join(&of(0), ample()).unwrap_err()
    });
    let BootstrapError::DuplicateRank { rank, first, second } = error else { panic!("{error}") };
    assert_eq!(rank, Rank::new(1));
    let (mut told, mut pids) = ([first, second], children.each_ref().map(Child::id));
    told.sort_unstable();
    pids.sort_unstable();
    assert_eq!(told, pids);
    for (child, name) in children.iter_mut().zip(&names) {
        assert!(child.wait().unwrap().success());
        let both = format!("process {first} and process {second}");
        assert!(noted(name, "error").contains(&both));
    }
}

#[test]
fn ranks_are_waited_for_as_long_as_is_said() {
    let (notes, directory) = (private(), private());
    let mut child = start("meets nobody so soon", notes.path(), Some((0, 2, directory.path())));
    // Sooner than the minute that is taken where nothing is said.
    let error = noted(notes.path(), "error");
    assert!(
        error.starts_with("the deadline passed while ") && error.ends_with("not seen: rank 1"),
        "{error}"
    );
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_process_without_a_launcher_has_none_and_is_told_of_the_other_ways() {
    // The tests themselves run without one.
    let error = World::from_env().unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, WorldError::NoLauncher)
            && text.contains("World::local")
            && text.contains("World::builder"),
        "{text}"
    );
}

#[test]
fn the_first_failure_is_the_launchs_and_ends_the_others() {
    let began = Instant::now();
    let status = shell(4, "if [ $FLUX_RANK = 2 ]; then exit 7; fi; exec sleep 1000").run().unwrap();
    assert_eq!(exit_code(status), 7);
    let status =
        shell(4, "if [ $FLUX_RANK = 3 ]; then kill -9 $$; fi; exec sleep 1000").run().unwrap();
    assert_eq!(exit_code(status), 128 + 9);
    assert_soon(began.elapsed(), Duration::from_secs(4));
}

#[test]
fn what_a_rank_has_started_ends_with_it_though_all_went_well() {
    let notes = private();
    let status = shell(2, "sleep 60 & echo $! > $FLUX_TEST_NOTES/$FLUX_RANK")
        .env(NOTES, notes.path())
        .run()
        .unwrap();
    assert!(status.success(), "{status}");
    let theirs =
        [0, 1].map(|rank| noted(notes.path(), &rank.to_string()).trim_end().parse().unwrap());
    assert!(gone_within(&theirs, Duration::from_secs(1)), "{theirs:?}");
}

#[test]
fn ranks_that_do_not_listen_are_killed_after_the_grace_time() {
    let began = Instant::now();
    let grace = Duration::from_millis(300);
    let script = "if [ $FLUX_RANK = 1 ]; then sleep 0.2; exit 3; fi; trap '' TERM; while true; do \
                  sleep 0.01; done";
    let status = shell(2, script).grace(grace).run().unwrap();
    assert_eq!(exit_code(status), 3);
    assert!(began.elapsed() > grace, "{:?}", began.elapsed());
    assert_soon(began.elapsed(), Duration::from_secs(5));
}

#[test]
fn ranks_have_their_variables_no_input_and_a_private_directory() {
    let notes = private();
    let script = "read -r line && exit 9; echo $FLUX_RANK $FLUX_LOCAL_RANK $FLUX_WORLD_SIZE $(stat \
                  -c %a $FLUX_RENDEZVOUS) ${FLUX_LAUNCHER-none} $1 > $FLUX_TEST_NOTES/$FLUX_RANK; \
                  echo $FLUX_RENDEZVOUS > $FLUX_TEST_NOTES/directory-$FLUX_RANK";
    // A launcher's name that came from outside says nothing of the variables of this one.
    let launcher = shell(2, script)
        .args(["sh", "argument"])
        .env(NOTES, notes.path())
        .env("FLUX_LAUNCHER", "torchrun");
    let status = launcher.run().unwrap();
    assert!(status.success(), "{status}");
    for rank in 0..2 {
        assert_eq!(
            noted(notes.path(), &rank.to_string()),
            format!("{rank} {rank} 2 700 none argument\n")
        );
        let directory = noted(notes.path(), &format!("directory-{rank}"));
        assert_eq!(directory, noted(notes.path(), "directory-0"));
        assert!(!Path::new(directory.trim_end()).exists());
    }
}

#[test]
fn a_program_that_does_not_start_is_named() {
    let error = Launcher::new(WorldSize::new(2).unwrap(), "/no/such/program").run().unwrap_err();
    assert!(matches!(&error, LaunchError::Start { rank, .. } if *rank == Rank::new(0)), "{error}");
    assert!(error.to_string().contains("/no/such/program"), "{error}");
}

/// The launcher in its own process, with waiting ranks; returns it, the ranks and their children.
fn launch_waiting(notes: &Path) -> (Child, Vec<i32>, Vec<i32>) {
    let launcher = start("launches", notes, None);
    let pids: Vec<Vec<i32>> = (0..3)
        .map(|rank| {
            noted(notes, &format!("pids-{rank}"))
                .split(' ')
                .map(|pid| pid.parse().unwrap())
                .collect()
        })
        .collect();
    assert!(pids.iter().flatten().all(|&pid| runs(pid)));
    (launcher, pids.iter().map(|pids| pids[0]).collect(), pids.iter().map(|pids| pids[1]).collect())
}

#[test]
fn a_signal_to_the_launcher_ends_ranks_and_what_they_started() {
    for (signal, code) in [
        (Signal::TERM, 128 + 15),
        (Signal::INT, 128 + 2),
        (Signal::HUP, 128 + 1),
        (Signal::QUIT, 128 + 3),
    ] {
        let notes = private();
        let (mut launcher, ranks, theirs) = launch_waiting(notes.path());
        rustix::process::kill_process(Pid::from_child(&launcher), signal).unwrap();
        assert_eq!(launcher.wait().unwrap().code(), Some(code));
        // Reaped by the launcher itself; what they started, by whoever adopts it.
        assert!(!ranks.iter().any(|&pid| runs(pid)));
        assert!(gone_within(&theirs, Duration::from_secs(1)));
        let left: Vec<_> = std::fs::read_dir(notes.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert!(left.iter().all(|name| name.to_str().unwrap().starts_with("pids-")), "{left:?}");
    }
}

#[test]
fn a_second_signal_to_the_launcher_kills_at_once() {
    let notes = private();
    let mut launcher = start("launches the deaf", notes.path(), None);
    noted(notes.path(), "0");
    noted(notes.path(), "1");
    let began = Instant::now();
    let pid = Pid::from_child(&launcher);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(launcher.try_wait().unwrap().is_none(), "the ranks do not listen, and have time");
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 9));
    assert_soon(began.elapsed(), Duration::from_secs(3));
}

#[test]
fn a_launcher_that_ignores_the_end_of_its_terminal_still_does() {
    let notes = private();
    let mut launcher = Command::new("nohup");
    launcher.arg(std::env::current_exe().unwrap()).args([
        "--ignored",
        "--exact",
        "as_the_role_says",
        "--nocapture",
    ]);
    launcher
        .env(ROLE, "launches a while")
        .env(NOTES, notes.path())
        .env("XDG_RUNTIME_DIR", notes.path());
    let mut launcher =
        launcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    noted(notes.path(), "0");
    rustix::process::kill_process(Pid::from_child(&launcher), Signal::HUP).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    std::fs::write(notes.path().join("go"), "").unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(5), "the ranks' own end is the launch's");
}

/// A process that was started with SIGCHLD ignored.
fn launches_untold() {
    let untold = Command::new("true").status().unwrap_err();
    assert_eq!(
        untold.raw_os_error(),
        Some(rustix::io::Errno::CHILD.raw_os_error()),
        "SIGCHLD is not ignored"
    );
    let error = Launcher::new(WorldSize::new(1).unwrap(), "/no/such/program").run().unwrap_err();
    assert!(matches!(error, LaunchError::Start { .. }), "{error}");
    // SIGCHLD is bit 16 of what a process ignores.
    launches(&shell(
        2,
        r"[ $FLUX_RANK = 0 ] && exit 0; case $(sed -n 's/^SigIgn:.*\(.\)....$/\1/p' /proc/$$/status) in [02468ace]) exit 5;; esac; exit 6",
    ));
}

#[test]
fn a_launcher_that_ignores_its_children_hears_how_its_ranks_end_and_they_do_not_ignore_theirs() {
    let notes = private();
    let mut launcher = Command::new("env");
    launcher.arg("--ignore-signal=CHLD").arg(std::env::current_exe().unwrap()).args([
        "--ignored",
        "--exact",
        "as_the_role_says",
        "--nocapture",
    ]);
    launcher
        .env(ROLE, "launches untold")
        .env(NOTES, notes.path())
        .env("XDG_RUNTIME_DIR", notes.path());
    let status = launcher.stdin(Stdio::null()).stdout(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(5), "rank 0 has ended well, and rank 1's end is the launch's");
}

#[test]
fn a_killed_launcher_takes_its_ranks_with_it_and_the_next_one_removes_its_directory() {
    let notes = private();
    let (mut killed, ranks, theirs) = launch_waiting(notes.path());
    killed.kill().unwrap();
    killed.wait().unwrap();
    let gone = gone_within(&ranks, Duration::from_secs(1));
    // The kernel tells only the ranks; this test cleans up after them.
    for pid in theirs {
        let _ = rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    assert!(gone, "{ranks:?}");
    let left = || {
        let paths = std::fs::read_dir(notes.path()).unwrap().map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("flux-launch-"))
            .collect::<Vec<_>>()
    };
    let age = |path: &Path| {
        let old = std::time::SystemTime::now() - Duration::from_mins(2);
        File::open(path).unwrap().set_modified(old).unwrap();
    };
    let launch =
        || assert!(start("launches at once", notes.path(), None).wait().unwrap().success());
    let dead = left();
    assert_eq!(dead.len(), 1, "nothing to remove");
    launch();
    assert_eq!(left(), dead, "a young directory's launcher may be about to take its lock");
    age(&dead[0]);
    // Those of a launcher that runs and of one that was killed before it made its file.
    for rank in 0..3 {
        std::fs::remove_file(notes.path().join(format!("pids-{rank}"))).unwrap();
    }
    let (mut launcher, ..) = launch_waiting(notes.path());
    let live = left();
    for path in &live {
        age(path);
    }
    let unlocked = notes.path().join("flux-launch-0123456789abcdef");
    std::fs::create_dir(&unlocked).unwrap();
    age(&unlocked);
    launch();
    assert_eq!(left(), live);
    assert!(live.len() == 1 && live != dead, "{live:?}");
    rustix::process::kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    launcher.wait().unwrap();
    assert!(left().is_empty());
}
