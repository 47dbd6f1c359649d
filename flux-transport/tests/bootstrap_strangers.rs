//! Clients that are no ranks: the group forms, and nothing of them stays.
//!
//! Alone in its process, as it counts the process's descriptors.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;

mod lateness;
use lateness::assert_soon;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bootstrap_common::network::{Site, group_on, told};
use bootstrap_common::{
    after, ample, assert_empty, each, environment, group, join_all, private, raw_client,
};
use flux_transport::internal::control::join;

struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A group forms while hundreds of strangers come; its last rank comes when all of them are there.
fn form_among_strangers() {
    let directory = private();
    let path = directory.path();
    let world = 4;
    let done = AtomicBool::new(false);
    let dropped = AtomicUsize::new(0);
    let planes = std::thread::scope(|scope| {
        let early: Vec<_> = (0..world - 1).map(|rank| environment(path, rank, world)).collect();
        let early = scope.spawn(move || join_all(&early, ample()));
        let mut silent = Vec::new();
        for number in 0..400_u32 {
            match number % 6 {
                // Comes and goes.
                0 => drop(raw_client::connect(path)),
                // Garbage of any length, also longer than a hello.
                1 => {
                    raw_client::say(&raw_client::connect(path), &vec![0xa5; number as usize]);
                }
                // The magic and not much else.
                2 => {
                    raw_client::say(&raw_client::connect(path), b"fluxhelo");
                }
                // A hello with a descriptor, which nobody asked for.
                3 => {
                    let socket = raw_client::connect(path);
                    let hello = raw_client::hello_of(path, 1, world);
                    let mut space =
                        [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
                    let fds = [socket.as_fd()];
                    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
                    let slices = [std::io::IoSlice::new(&hello)];
                    rustix::net::sendmsg(
                        &socket,
                        &slices,
                        &mut control,
                        rustix::net::SendFlags::NOSIGNAL,
                    )
                    .unwrap();
                }
                // A rank that this world does not have, of another launch.
                4 => {
                    raw_client::say(
                        &raw_client::connect(path),
                        &raw_client::hello(
                            raw_client::PROTOCOL,
                            number,
                            world,
                            env!("CARGO_PKG_VERSION"),
                        ),
                    );
                }
                // Says nothing and stays: more than rank 0 keeps.
                _ => silent.push(raw_client::connect(path)),
            }
        }
        // Streams are not spoken here at all.
        assert!(UnixStream::connect(path.join("rank0.sock")).is_err());
        // One byte now and then: every byte is a message, the first that is no hello ends it.
        let (done, dropped) = (&done, &dropped);
        // Also when a rank fails: the scope waits for the thread below.
        let _end = Done(done);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let socket = raw_client::connect_once(path);
                while socket.as_ref().is_some_and(|socket| raw_client::say(socket, b"f")) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                dropped.fetch_add(1, Ordering::Relaxed);
            }
        });
        while dropped.load(Ordering::Relaxed) < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let last = join(&environment(path, world - 1, world), ample()).unwrap();
        early.join().unwrap().into_iter().map(Result::unwrap).chain([last]).collect::<Vec<_>>()
    });
    assert_empty(path);
    each(&planes, |plane| plane.barrier(ample()).unwrap());
}

#[test]
fn groups_form_among_hundreds_of_strangers_and_leave_no_descriptor() {
    form_among_strangers();
    drop(group(4));
    let before = open_descriptors();
    let began = Instant::now();
    form_among_strangers();
    assert_soon(began.elapsed(), Duration::from_secs(10));
    for cycle in 0..100 {
        let planes = group(4);
        each(&planes, |plane| {
            let file =
                rustix::fs::memfd_create("flux-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            let got = plane.exchange_fds(&[file.as_fd(), file.as_fd()], ample()).unwrap();
            assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 6);
            // Half of the groups leave in good order.
            if cycle % 2 == 0 {
                plane.goodbye();
            }
        });
    }
    // Failed meetings too.
    for _ in 0..10 {
        let directory = private();
        let environments = [(0, 3), (1, 3), (2, 4)]
            .map(|(rank, world)| environment(directory.path(), rank, world));
        assert!(join_all(&environments, ample()).into_iter().all(|result| result.is_err()));
    }
    // Across hosts, met and not.
    for _ in 0..30 {
        let planes = group_on(&[0, 1, 0, 1]);
        each(&planes, |plane| plane.barrier(ample()).unwrap());
        let site = Site::new();
        let environments = [0, 1].map(|rank| site.rank(&told(rank, &[0, 1, 2])));
        assert!(join_all(&environments, after(20)).into_iter().all(|result| result.is_err()));
    }
    assert_eq!(open_descriptors(), before);
}
