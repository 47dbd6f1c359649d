//! How the ranks meet, and what each of them hears when they cannot.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;

mod lateness;
use lateness::assert_soon;
use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use bootstrap_common::{
    after, ample, assert_empty, each, environment, join_all, place, private, raw_client, with_mode,
};
use flux_core::Rank;
use flux_transport::internal::control::join;
use flux_transport::{BootstrapError, Environment};

fn ranks(of: &[u32]) -> Vec<Rank> {
    of.iter().copied().map(Rank::new).collect()
}

/// Every rank's error, after a check that the directory is as it was.
fn errors(
    directory: &Path,
    environments: &[Environment],
    deadline: Instant,
) -> Vec<BootstrapError> {
    let errors = join_all(environments, deadline).into_iter().map(Result::unwrap_err).collect();
    assert_empty(directory);
    errors
}

#[test]
fn ranks_meet_in_whatever_order_they_come() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]] {
        let directory = private();
        let planes = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|rank| {
                    let environment = environment(directory.path(), rank, 4);
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_millis(30) * order[rank as usize]);
                        join(&environment, ample()).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert_empty(directory.path());
        each(&planes, |plane| plane.barrier(ample()).unwrap());
    }
}

#[test]
fn missing_ranks_are_named_to_everybody_who_came() {
    let directory = private();
    let came: Vec<_> = [0, 1, 3].map(|rank| environment(directory.path(), rank, 6)).into();
    let began = Instant::now();
    for error in errors(directory.path(), &came, after(300)) {
        let BootstrapError::Timeout { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, ranks(&[2, 4, 5]), "{error}");
        assert!(error.to_string().ends_with("not seen: ranks 2, 4 and 5"), "{error}");
    }
    assert_soon(began.elapsed(), Duration::from_secs(2));
}

#[test]
fn a_rank_that_gives_up_ends_the_wait_of_all() {
    let directory = private();
    let impatient = environment(directory.path(), 2, 5);
    let patient: Vec<_> = [0, 1].map(|rank| environment(directory.path(), rank, 5)).into();
    std::thread::scope(|scope| {
        let impatient = scope.spawn(move || join(&impatient, after(200)).unwrap_err());
        let errors = errors(directory.path(), &patient, ample());
        for error in errors.into_iter().chain([impatient.join().unwrap()]) {
            assert!(
                matches!(&error, BootstrapError::Timeout { missing, .. }
                    if *missing == ranks(&[3, 4])),
                "{error}"
            );
        }
    });
}

#[test]
fn without_rank_zero_the_others_name_it() {
    let directory = private();
    let came: Vec<_> = [1, 2].map(|rank| environment(directory.path(), rank, 3)).into();
    for error in errors(directory.path(), &came, after(150)) {
        assert!(
            matches!(&error, BootstrapError::Timeout { missing, .. } if *missing == ranks(&[0])),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .ends_with(&format!("; rank 0 was looked for in {}", directory.path().display())),
            "{error}"
        );
    }
}

#[test]
fn a_rank_started_twice_is_named_to_all_ranks() {
    for twice in [0, 2] {
        let directory = private();
        let came: Vec<_> =
            [0, 1, 2, twice].map(|rank| environment(directory.path(), rank, 4)).into();
        // Without this rank the group cannot form before the duplicate comes.
        let late = environment(directory.path(), 3, 4);
        let pid = std::process::id();
        std::thread::scope(|scope| {
            let late = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                join(&late, ample()).unwrap_err()
            });
            for error in
                errors(directory.path(), &came, ample()).into_iter().chain([late.join().unwrap()])
            {
                let BootstrapError::DuplicateRank { rank, first, second } = error else {
                    panic!("{error}")
                };
                assert_eq!((rank, first, second), (Rank::new(twice), pid, pid));
            }
        });
    }
}

#[test]
fn a_rank_of_another_world_size_is_named_to_all_ranks() {
    let directory = private();
    let sizes = [4, 4, 8, 4];
    let came: Vec<_> =
        (0..4).map(|rank| environment(directory.path(), rank, sizes[rank as usize])).collect();
    for error in errors(directory.path(), &came, ample()) {
        assert_eq!(error.to_string(), "rank 2 was started with a world size of 8, rank 0 with 4");
        assert!(matches!(error, BootstrapError::WorldMismatch { rank, world: 8, expected: 4 }
                if rank == Rank::new(2)));
    }
}

#[test]
fn a_rank_of_another_version_is_named_to_all_ranks() {
    let directory = private();
    let came: Vec<_> = [0, 1].map(|rank| environment(directory.path(), rank, 3)).into();
    std::thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            raw_client::as_rank(
                directory.path(),
                &raw_client::hello(raw_client::PROTOCOL, 2, 3, "9.8.7"),
            )
        });
        for error in errors(directory.path(), &came, ample()) {
            let text = error.to_string();
            assert!(
                matches!(error, BootstrapError::VersionMismatch { rank, .. }
                    if rank == Rank::new(2)),
                "{text}"
            );
            assert!(text.contains("9.8.7") && text.contains(env!("CARGO_PKG_VERSION")), "{text}");
        }
        assert_eq!(stranger.join().unwrap(), 4, "the stranger hears of the versions too");
    });
}

#[test]
fn a_rank_of_another_protocol_is_named_to_all_ranks() {
    let directory = private();
    let came: Vec<_> = [0, 1].map(|rank| environment(directory.path(), rank, 3)).into();
    std::thread::scope(|scope| {
        scope.spawn(|| raw_client::as_rank(directory.path(), &raw_client::hello(77, 2, 3, "")));
        for error in errors(directory.path(), &came, ample()) {
            assert!(
                matches!(error, BootstrapError::VersionMismatch { rank, .. }
                    if rank == Rank::new(2)),
                "{error}"
            );
            assert!(error.to_string().contains("protocol 77"), "{error}");
        }
    });
}

#[test]
fn a_rank_that_died_while_the_others_wait_may_come_again() {
    let directory = private();
    let path = directory.path();
    let of = |ranks: [u32; 2]| ranks.map(|rank| environment(path, rank, 4));
    let planes: Vec<_> = std::thread::scope(|scope| {
        let waiting = scope.spawn(move || join_all(&of([0, 2]), ample()));
        // Known to rank 0 (it hears who is missing), then gone.
        assert_eq!(raw_client::as_rank(path, &raw_client::hello_of(path, 1, 4)), 0);
        let rest = join_all(&of([1, 3]), ample());
        waiting.join().unwrap().into_iter().chain(rest).map(Result::unwrap).collect()
    });
    each(&planes, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn a_client_that_says_nothing_is_closed_long_before_the_deadline() {
    let directory = private();
    let path = directory.path();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| join(&environment(path, 0, 2), ample()).unwrap());
        let silent = raw_client::connect(path);
        let began = Instant::now();
        assert_eq!(
            rustix::net::recv(&silent, &mut [0; 8], rustix::net::RecvFlags::empty()),
            Ok((0, 0))
        );
        assert_soon(began.elapsed(), Duration::from_secs(5));
        join(&environment(path, 1, 2), ample()).unwrap();
        waiting.join().unwrap();
    });
}

#[test]
fn a_stale_socket_is_taken_over() {
    let directory = private();
    // The listener of std does not remove its name.
    drop(UnixListener::bind(directory.path().join("rank0.sock")).unwrap());
    let environments: Vec<_> = (0..2).map(|rank| environment(directory.path(), rank, 2)).collect();
    let planes: Vec<_> = join_all(&environments, ample()).into_iter().map(Result::unwrap).collect();
    assert_empty(directory.path());
    each(&planes, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn a_file_in_the_sockets_place_is_refused_and_kept() {
    let directory = private();
    let file = directory.path().join("rank0.sock");
    std::fs::write(&file, "mine").unwrap();
    let error = join(&environment(directory.path(), 0, 2), ample()).unwrap_err();
    assert!(matches!(error, BootstrapError::Io { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "mine");
}

#[test]
fn a_directory_that_others_may_enter_is_refused_by_every_rank() {
    let within = private();
    for mode in [0o755, 0o750, 0o701, 0o777] {
        let directory = with_mode(within.path(), mode);
        for rank in 0..2 {
            let error = join(&environment(&directory, rank, 2), ample()).unwrap_err();
            let BootstrapError::Directory { path, problem } = error else { panic!("{error}") };
            assert_eq!(path, directory);
            assert!(problem.contains(&format!("{mode:04o}")), "{problem}");
        }
    }
}

#[test]
fn a_directory_that_is_none_is_refused_by_every_rank() {
    let within = private();
    let link = within.path().join("link");
    std::os::unix::fs::symlink(within.path(), &link).unwrap();
    let file = within.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [&within.path().join("nothing"), &link, &file] {
        for rank in 0..2 {
            let error = join(&environment(path, rank, 2), ample()).unwrap_err();
            assert!(
                matches!(error, BootstrapError::Directory { .. }),
                "{}: {error}",
                path.display()
            );
        }
    }
}

#[test]
fn a_path_too_long_for_a_socket_is_refused_with_its_length() {
    let within = private();
    let long = within.path().join("d".repeat(100));
    std::fs::create_dir(&long).unwrap();
    for rank in 0..2 {
        let error = join(&environment(&long, rank, 2), ample()).unwrap_err();
        assert!(error.to_string().contains("shorter"), "{error}");
        let BootstrapError::PathTooLong { length, limit, .. } = error else { panic!("{error}") };
        assert_eq!((length, limit), (long.as_os_str().len() + "/rank0.sock".len(), 107));
    }
}

#[test]
fn torchruns_ranks_make_their_directory_and_remove_it() {
    let runtime = private();
    let torchrun = |rank: u32| {
        let set = [
            ("RANK", OsString::from(rank.to_string())),
            ("LOCAL_RANK", rank.to_string().into()),
            ("WORLD_SIZE", "3".into()),
            ("LOCAL_WORLD_SIZE", "3".into()),
            ("MASTER_ADDR", "localhost".into()),
            ("MASTER_PORT", "29500".into()),
            ("TORCHELASTIC_RUN_ID", "a run".into()),
            ("XDG_RUNTIME_DIR", runtime.path().as_os_str().to_owned()),
        ];
        Environment::parse(&|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
        })
        .unwrap()
    };
    let environments: Vec<_> = (0..3).map(torchrun).collect();
    assert!(place(&environments[0]).directory.starts_with(runtime.path()));
    for _ in 0..2 {
        let planes: Vec<_> =
            join_all(&environments, ample()).into_iter().map(Result::unwrap).collect();
        assert_empty(runtime.path());
        each(&planes, |plane| plane.barrier(ample()).unwrap());
    }
    for error in join_all(&environments[..2], after(100)) {
        assert!(
            matches!(error, Err(BootstrapError::Timeout { missing, .. }) if missing == ranks(&[2]))
        );
    }
    assert_empty(runtime.path());
}

#[test]
fn a_world_of_one_meets_nobody_and_needs_no_directory() {
    let plane = join(&environment(Path::new("/does/not/exist"), 0, 1), after(0)).unwrap();
    assert_eq!(plane.exchange(b"me", after(0)).unwrap(), [b"me"]);
}
