//! Ranks on several hosts: how they meet over TCP, their errors, and their control plane.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;
#[path = "../../flux-kernels/tests/skipped/mod.rs"]
mod skipped;

mod lateness;
use lateness::{AMPLE, assert_soon, scaled};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use bootstrap_common::network::{SECRET, Site, Told, group_on, told};
use bootstrap_common::{after, ample, assert_empty, each, join_all};
use flux_core::{Rank, WorldSize};
use flux_transport::internal::control::join;
use flux_transport::internal::control::{Notice, Watcher};
use flux_transport::{BootstrapError, Environment, Secret};
use flux_transport::{ControlError, Launch, World, WorldError};

/// Every rank's error, after a check that nothing is left.
fn errors(site: &Site, environments: &[Environment], deadline: Instant) -> Vec<BootstrapError> {
    let errors = join_all(environments, deadline).into_iter().map(Result::unwrap_err).collect();
    assert_empty(site.directory.path());
    errors
}

#[test]
fn ranks_meet_whoever_shares_their_host() {
    for hosts in [
        &[0, 1][..],
        &[0, 0],
        &[0, 0, 1, 1],
        &[0, 1, 0, 1],
        &[0, 1, 2, 3, 4],
        &[5, 5, 5, 2, 2, 5, 0, 2],
        &[0, 1, 1, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 2, 2],
    ] {
        let planes = group_on(hosts);
        let (world, ranks) = (hosts.len() as u32, || (0..hosts.len() as u32).map(Rank::new));
        let payload =
            |rank: u32| vec![u8::try_from(rank).unwrap(); [0, 1, 64 * 1024][rank as usize % 3]];
        let expected: Vec<_> = (0..world).map(payload).collect();
        for _ in 0..3 {
            for got in each(&planes, |plane| {
                plane.exchange(&payload(plane.rank().get()), ample()).unwrap()
            }) {
                assert!(got == expected, "{hosts:?}");
            }
        }
        each(&planes, |plane| plane.barrier(ample()).unwrap());
        for plane in &planes {
            assert_eq!((plane.kind(), plane.world().get()), (Launch::Processes, world));
            for (a, b) in ranks().flat_map(|a| ranks().map(move |b| (a, b))) {
                assert_eq!(
                    plane.hosts().together(a, b),
                    hosts[a.index()] == hosts[b.index()],
                    "{hosts:?}"
                );
            }
        }
    }
}

#[test]
fn ranks_meet_over_ipv6_too() {
    let Some(site) = Site::at(std::net::Ipv6Addr::LOCALHOST.into()) else {
        return skipped::skip("bootstrap_hosts", &"this machine has no IPv6");
    };
    let planes: Vec<_> =
        join_all(&site.ranks(&[0, 1, 2, 1]), ample()).into_iter().map(Result::unwrap).collect();
    assert_empty(site.directory.path());
    each(&planes, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn descriptors_stay_on_their_host() {
    let together = group_on(&[3, 3, 3]);
    let (file, _) = rustix::pipe::pipe().unwrap();
    for got in each(&together, |plane| plane.exchange_fds(&[file.as_fd()], ample()).unwrap()) {
        assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 2);
    }
    let apart = group_on(&[0, 0, 1]);
    let given = each(&apart, |plane| plane.exchange_fds(&[file.as_fd()], ample()).unwrap());
    let counts: Vec<Vec<usize>> =
        given.iter().map(|by_rank| by_rank.iter().map(Vec::len).collect()).collect();
    assert_eq!(counts, [[0, 1, 0], [1, 0, 0], [0, 0, 0]]);
    each(&apart, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn a_death_a_leave_and_an_abort_are_seen_across_hosts() {
    let watch = |plane: &Arc<dyn flux_transport::internal::control::ControlPlane>| {
        let (sender, heard) = mpsc::channel();
        let sender = Mutex::new(sender);
        let watcher: Arc<Watcher> =
            Arc::new(move |notice| sender.lock().unwrap().send(notice).unwrap_or_default());
        plane.watch(Arc::downgrade(&watcher));
        (watcher, heard)
    };
    let mut planes = group_on(&[0, 1, 0, 1]);
    let watched: Vec<_> = planes.iter().map(watch).collect();
    planes[2].abort(3, 77);
    for (rank, (_, heard)) in watched.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        assert_eq!(
            heard.recv_timeout(AMPLE),
            Ok(Notice::Aborted { by: Rank::new(2), communicator: 3, reason: 77 }),
            "rank {rank}"
        );
    }
    each(&planes, |plane| plane.barrier(ample()).unwrap());
    // Without a goodbye, as a process that dies.
    drop(planes.pop());
    for (rank, (_, heard)) in watched[..3].iter().enumerate() {
        assert_eq!(heard.recv_timeout(AMPLE), Ok(Notice::Lost(Rank::new(3))), "rank {rank}");
    }
    let error = planes[0].barrier(ample()).unwrap_err();
    assert!(matches!(error, ControlError::PeerLost { rank } if rank == Rank::new(3)), "{error}");
    planes[0].goodbye();
    let error = planes[1].exchange(b"", ample()).unwrap_err();
    assert!(
        matches!(error, ControlError::PeerLeft { .. } | ControlError::PeerLost { .. }),
        "{error}"
    );
}

#[test]
fn missing_ranks_are_named_to_everybody_who_came() {
    let (site, hosts) = (Site::new(), [0, 0, 1, 1, 2]);
    let came: Vec<_> = [0, 1, 3].map(|rank| site.rank(&told(rank, &hosts))).into();
    let began = Instant::now();
    for error in errors(&site, &came, after(500)) {
        assert!(error.to_string().ends_with("not seen: ranks 2 and 4"), "{error}");
    }
    assert_soon(began.elapsed(), Duration::from_secs(3));
    // Without rank 0, it is the one that is missing.
    for error in errors(&site, &came[1..], after(300)) {
        let text = error.to_string();
        let looked_for = format!("rank 0 was looked for at {} port ", site.address.ip());
        assert!(
            text.contains(&format!("not seen: rank 0; {looked_for}"))
                && text.ends_with("Connection refused (os error 111))"),
            "{text}"
        );
    }
}

#[test]
fn a_rank_with_another_secret_hears_so_and_the_others_that_it_is_missing() {
    let (site, hosts) = (Site::new(), [0, 1, 2]);
    let other = site.rank(&Told { secret: "a secret of somebody else", ..told(2, &hosts) });
    let came = [0, 1].map(|rank| site.rank(&told(rank, &hosts)));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let began = Instant::now();
            let error = join(&other, ample()).unwrap_err();
            assert!(
                matches!(error, BootstrapError::SecretDiffers { .. })
                    && error.to_string().contains("FLUX_SECRET"),
                "{error}"
            );
            assert_soon(began.elapsed(), Duration::from_secs(6));
        });
        // Rank 0's deadline ends it for all: only rank 0 knows of failed proofs.
        let one = scope.spawn(|| join(&came[1], ample()).unwrap_err());
        for error in [join(&came[0], after(3000)).unwrap_err(), one.join().unwrap()] {
            let text = error.to_string();
            assert!(
                text.contains("not seen: rank 2 (") && text.contains("did not know the secret"),
                "{text}"
            );
        }
        other.join().unwrap();
    });
    assert_empty(site.directory.path());
}

#[test]
fn a_rank_started_twice_or_for_another_world_is_named_to_all_ranks() {
    // The second of a rank is on its host, or on another.
    for (twice, host) in [(0, 0), (0, 7), (2, 1), (2, 7)] {
        let (site, hosts) = (Site::new(), [0, 0, 1, 1]);
        let mut came: Vec<_> = [0, 1, 2].map(|rank| site.rank(&told(rank, &hosts))).into();
        came.push(site.rank(&Told { host, ..told(twice, &hosts) }));
        let late = site.rank(&told(3, &hosts));
        std::thread::scope(|scope| {
            // Without this rank the group cannot form before the duplicate comes.
            let late = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                join(&late, ample()).unwrap_err()
            });
            for error in errors(&site, &came, ample()).into_iter().chain([late.join().unwrap()]) {
                assert!(
                    matches!(error, BootstrapError::DuplicateRank { rank, .. }
                        if rank == Rank::new(twice)),
                    "{error}"
                );
            }
        });
    }
    let (site, hosts) = (Site::new(), [0, 0, 1]);
    let mut came: Vec<_> = [0, 1].map(|rank| site.rank(&told(rank, &hosts))).into();
    came.push(site.rank(&Told { world: 8, ..told(2, &hosts) }));
    for error in errors(&site, &came, ample()) {
        assert_eq!(error.to_string(), "rank 2 was started with a world size of 8, rank 0 with 3");
    }
}

#[test]
fn a_rank_of_another_launch_hears_so_and_the_launch_forms_without_it() {
    let site = Site::new();
    // The same address spelled otherwise: a launch of its own.
    let mut set = site.variables(&told(1, &[0, 1]));
    set[3].1 = format!("tcp://{}:0{}", site.address.ip(), site.address.port()).into();
    let other = Environment::parse(&|name| {
        set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
    })
    .unwrap();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| join(&site.rank(&told(0, &[0, 1])), ample()).unwrap());
        let error = join(&other, after(300)).unwrap_err();
        assert!(
            matches!(error, BootstrapError::OtherLaunch { rank } if rank == Rank::new(1)),
            "{error}"
        );
        let one = join(&site.rank(&told(1, &[0, 1])), ample()).unwrap();
        each(&[zero.join().unwrap(), one], |plane| plane.barrier(ample()).unwrap());
    });
}

#[test]
fn who_held_rank_zeros_place_before_is_forgotten() {
    // Two side by side, as each waits for seconds.
    for secret in [true, false] {
        std::thread::scope(|scope| {
            for anew in [false, true] {
                scope.spawn(move || forgets_who_was_there(secret, anew));
            }
        });
    }
}

/// After a rank 0 of an earlier launch, with another secret or with the same address spelled
/// otherwise. With `anew`, rank 0 comes then.
fn forgets_who_was_there(secret: bool, anew: bool) {
    let (site, hosts) = (Site::new(), [0, 1, 2]);
    let mut set = site.variables(&told(0, &hosts));
    if secret {
        set[4].1 = "a secret of somebody else".into();
    } else {
        set[3].1 = format!("tcp://{}:0{}", site.address.ip(), site.address.port()).into();
    }
    let earlier = Environment::parse(&|name| {
        set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
    })
    .unwrap();
    std::thread::scope(|scope| {
        let one = scope
            .spawn(|| join(&site.rank(&told(1, &hosts)), after(1900)).unwrap_err().to_string());
        // It ends while the rank goes on. Not scaled: after two seconds of it the rank would say
        // that it has another secret.
        let ended =
            join(&earlier, Instant::now() + Duration::from_secs(1)).unwrap_err().to_string();
        assert_eq!(ended.contains("did not know the secret"), secret, "{ended}");
        if anew {
            // Rank 0 is there and rank 2 is missing; a rank that comes to both must not report the
            // first.
            let zero = join(&site.rank(&told(0, &hosts)), ample()).unwrap_err().to_string();
            assert!(zero.ends_with("not seen: rank 2"), "{zero}");
        }
        let one = one.join().unwrap();
        assert!(
            if anew {
                one.ends_with("not seen: rank 2")
            } else {
                one.contains("not seen: rank 0; rank 0 was looked for at")
            },
            "{one}"
        );
    });
}

#[test]
fn no_rank_takes_what_stands_for_all_addresses() {
    let (site, world) = (Site::new(), WorldSize::new(2).unwrap());
    let began = Instant::now();
    for rank in [0, 1] {
        for host in ["0.0.0.0", "[::]"] {
            let address = format!("{host}:{}", site.address.port());
            let builder = World::builder(Rank::new(rank), world).deadline(AMPLE);
            let error = builder.across_hosts(&address, Secret::new(SECRET).unwrap()).unwrap_err();
            let WorldError::Bootstrap(BootstrapError::Address { problem, .. }) = error else {
                panic!("{error}")
            };
            assert!(problem.contains("stands for all addresses"), "{problem}");
        }
    }
    assert_soon(began.elapsed(), Duration::from_secs(1));
}

#[test]
fn rank_zero_says_what_is_wrong_with_its_address() {
    let site = Site::new();
    let taken = TcpListener::bind(site.address).unwrap();
    let at = |address: &str| {
        let mut set = site.variables(&told(0, &[0, 1]));
        set[3].1 = format!("tcp://{address}").into();
        let environment = Environment::parse(&|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
        })
        .unwrap();
        join(&environment, after(300)).unwrap_err()
    };
    for (address, said) in [
        (site.address.to_string(), "is taken by another program"),
        // Kept for documentation: no host has it.
        ("192.0.2.1:29600".to_owned(), "is no address of the host that rank 0 runs on"),
    ] {
        let began = Instant::now();
        let error = at(&address);
        assert_soon(began.elapsed(), Duration::from_secs(1) + scaled(Duration::from_millis(300)));
        assert!(
            matches!(error, BootstrapError::Address { .. }) && error.to_string().contains(said),
            "{address}: {error}"
        );
    }
    drop(taken);
}

#[test]
fn other_programs_at_the_address_are_passed_over() {
    let site = Site::new();
    let other = TcpListener::bind(site.address).unwrap();
    other.set_nonblocking(true).unwrap();
    std::thread::scope(|scope| {
        let early = scope.spawn(|| join(&site.rank(&told(1, &[0, 1])), ample()).unwrap());
        // It greets like other programs: a banner, a short message, nothing.
        let mut greeted: Vec<TcpStream> = Vec::new();
        let deadline = ample();
        while greeted.len() < 3 {
            if let Ok((mut stream, _)) = other.accept() {
                let banner: [&[u8]; 3] = [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x04\0\0\0flux", b""];
                let _ = std::io::Write::write_all(&mut stream, banner[greeted.len()]);
                greeted.push(stream);
            }
            assert!(Instant::now() < deadline, "the rank does not come again");
            std::thread::sleep(Duration::from_millis(2));
        }
        drop((greeted, other));
        let zero = join(&site.rank(&told(0, &[0, 1])), ample()).unwrap();
        let one = early.join().unwrap();
        each(&[zero, one], |plane| plane.barrier(ample()).unwrap());
    });
}

#[test]
fn a_builder_says_what_no_variable_does() {
    let world = WorldSize::new(3).unwrap();
    let (site, secret) = (Site::new(), Secret::new(SECRET).unwrap());
    let address = site.address.to_string();
    let on_host = |rank| World::builder(Rank::new(rank), world).on_host(site.directory.path());
    let across = |rank| {
        World::builder(Rank::new(rank), world).local_rank(7).across_hosts(&address, secret.clone())
    };
    for (meet, local) in
        [(&on_host as &(dyn Fn(u32) -> Result<World, WorldError> + Sync), None), (&across, Some(7))]
    {
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let world = meet(rank).unwrap();
                    assert_eq!(
                        (world.rank(), world.size().get(), world.hosts().count()),
                        (Rank::new(rank), 3, 1)
                    );
                    assert_eq!(world.local_rank(), local.unwrap_or(rank));
                    world.control().barrier(ample()).unwrap();
                });
            }
        });
    }
    let builder =
        |rank| World::builder(Rank::new(rank), world).deadline(scaled(Duration::from_millis(50)));
    assert!(matches!(builder(3).on_host("/"), Err(WorldError::Rank { .. })));
    let error = builder(0).across_hosts("node1", secret.clone()).unwrap_err();
    assert!(error.to_string().contains("HOST:PORT"), "{error}");
    let error = builder(1).across_hosts(&address, secret).unwrap_err();
    assert!(error.to_string().contains("not seen: rank 0; rank 0 was looked for at"), "{error}");
}
