//! Processes of another user at the rendezvous of one host are never taken for ranks.
//!
//! The directory's mode keeps other users out, so each test opens it first.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

mod bootstrap_common;
mod lateness;
#[path = "../../flux-kernels/tests/skipped/mod.rs"]
mod skipped;

use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bootstrap_common::{ample, assert_empty, environment, join_all, private, raw_client};
use flux_transport::BootstrapError;
use flux_transport::internal::control::join;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;

/// `nobody` on most systems; the user needs no entry anywhere.
const OTHER: u32 = 65_534;

/// Acts as another user, on a thread of its own; `None` where this system does not allow it.
fn as_other<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
    let other = Uid::from_raw(OTHER);
    let body = || set_thread_res_uid(other, other, other).is_ok().then(act);
    let done = std::thread::scope(|scope| scope.spawn(body).join().unwrap());
    if done.is_none() {
        skipped::skip("bootstrap_users", &"only root may take another user");
    }
    done
}

/// Lets everybody in, or the owner alone.
fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// What comes of a connection within seconds: nothing, its end (no bytes), or a message.
fn heard(socket: &OwnedFd) -> Option<Vec<u8>> {
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    if rustix::event::poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience)).unwrap() == 0
    {
        return None;
    }
    let mut bytes = [0; 256];
    let length =
        rustix::net::recv(socket, &mut bytes, RecvFlags::empty()).map_or(0, |(length, _)| length);
    Some(bytes[..length].to_vec())
}

#[test]
fn a_caller_of_another_user_is_no_rank() {
    let directory = private();
    let path = directory.path();
    let ranks = [0, 1].map(|rank| environment(path, rank, 2));
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| join(&ranks[0], ample()));
        // Once it listens the directory has been looked at.
        drop(raw_client::connect(path));
        set_mode(path, 0o711);
        set_mode(&path.join("rank0.sock"), 0o777);
        let knocks = || {
            let socket = raw_client::connect(path);
            // All that a rank would say: only the user is wrong.
            raw_client::say(&socket, &raw_client::hello_of(path, 1, 2));
            heard(&socket)
        };
        let answer = as_other(knocks);
        set_mode(path, 0o700);
        if let Some(answer) = answer {
            assert_eq!(answer, Some(Vec::new()), "an end without a word");
        }
        // Its place was kept for the rank itself.
        let own = join(&ranks[1], ample()).unwrap();
        let leader = leader.join().unwrap().unwrap();
        std::thread::scope(|both| {
            both.spawn(|| own.barrier(ample()).unwrap());
            leader.barrier(ample()).unwrap();
        });
    });
    assert_empty(path);
}

#[test]
fn a_listener_of_another_user_is_no_leader() {
    let directory = private();
    let path = directory.path();
    let name = SocketAddrUnix::new(path.join("rank0.sock")).unwrap();
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    rustix::net::bind(&socket, &name).unwrap();
    // A listener's user is who began to listen.
    if as_other(|| rustix::net::listen(socket.as_fd(), 8).unwrap()).is_none() {
        return;
    }
    let error = join_all(&[environment(path, 1, 2)], ample()).remove(0).unwrap_err();
    let BootstrapError::Protocol(said) = &error else { panic!("{error}") };
    assert_eq!(said, "the process that listens in rank 0's place runs as another user");
    // Nothing was said to it: not what would let it pass for a rank.
    let caller = rustix::net::accept(&socket).unwrap();
    assert_eq!(heard(&caller), Some(Vec::new()));
}
