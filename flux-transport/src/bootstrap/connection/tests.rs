//! The same messages come out, however the bytes of a stream are cut; and a stream that is cut in a
//! message ends there.

use std::net::{Ipv4Addr, SocketAddr};

use proptest::prelude::*;

use super::*;
use crate::lateness::{AMPLE, scaled};

fn soon() -> Instant {
    Instant::now() + scaled(Duration::from_millis(50))
}

fn ample() -> Instant {
    Instant::now() + AMPLE
}

/// A link and the bare socket at its other end.
fn link_and_peer() -> (Connection, OwnedFd) {
    let listener = tcp::listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let peer = tcp::connect(tcp::local(listener.as_fd()).unwrap(), ample()).unwrap();
    socket::wait(&mut [socket::readable(&listener)], Some(ample())).unwrap();
    (Connection::tcp(tcp::accept(listener.as_fd()).unwrap().0), peer)
}

fn say(peer: &OwnedFd, bytes: &[u8]) {
    assert_eq!(rustix::net::send(peer, bytes, SendFlags::NOSIGNAL), Ok(bytes.len()));
}

fn next(link: &Connection, limit: usize, deadline: Instant) -> Option<Vec<u8>> {
    let mut buffer = vec![0; limit];
    match link.await_message(&mut buffer, deadline).unwrap() {
        Received::Message(message) => Some(buffer[..message.length].to_vec()),
        Received::Nothing | Received::End | Received::Oversized => None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn messages_survive_any_cut_of_the_stream(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 1..6),
        cuts in prop::collection::vec(1..200_usize, 1..20),
    ) {
        let (link, peer) = link_and_peer();
        let stream: Vec<u8> = messages.iter().flat_map(|body| [&(body.len() as u32).to_le_bytes()[..], body].concat()).collect();
        let (mut rest, mut cuts, mut came) = (&stream[..], cuts.iter().cycle(), Vec::new());
        let mut buffer = [0; 300];
        while !rest.is_empty() {
            let (piece, tail) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
            say(&peer, piece);
            rest = tail;
            while let Received::Message(message) = link.receive(&mut buffer).unwrap() {
                came.push(buffer[..message.length].to_vec());
            }
        }
        drop(peer);
        while let Some(message) = next(&link, 300, ample()) {
            came.push(message);
        }
        prop_assert_eq!(came, messages);
    }
}

#[test]
fn both_ends_speak_the_same() {
    let (link, peer) = link_and_peer();
    let peer = Connection::tcp(peer);
    let long = vec![7; 100_000];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            link.send(&[b"he", b"", b"llo"], &[], ample()).unwrap();
            link.send(&[&long], &[], ample()).unwrap();
        });
        assert_eq!(next(&peer, 200_000, ample()).unwrap(), b"hello");
        assert_eq!(next(&peer, 200_000, ample()).unwrap(), long);
    });
    drop(link);
    assert!(matches!(peer.await_message(&mut [0; 8], ample()), Ok(Received::End)));
}

#[test]
fn a_length_beyond_the_limit_takes_no_memory_and_stays_refused() {
    for length in [0, 9, u32::MAX] {
        let (link, peer) = link_and_peer();
        say(&peer, &length.to_le_bytes());
        say(&peer, b"12345678");
        for _ in 0..2 {
            assert!(
                matches!(link.await_message(&mut [0; 8], ample()), Ok(Received::Oversized)),
                "{length}"
            );
        }
    }
}

#[test]
fn a_message_that_was_cut_at_the_deadline_ends_the_connection() {
    let (link, peer) = link_and_peer();
    let block = vec![0; 1 << 20];
    let error = loop {
        if let Err(error) = link.send(&[&block], &[], soon()) {
            break error;
        }
    };
    assert_eq!(error, Errno::TIMEDOUT);
    assert_eq!(link.send(&[b"more"], &[], soon()), Err(Errno::PIPE));
    let mut buffer = vec![0; 1 << 20];
    let (deadline, mut came) = (ample(), 0);
    loop {
        socket::wait(&mut [socket::readable(&peer)], Some(deadline)).unwrap();
        match rustix::net::recv(&peer, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => break,
            Ok((count, _)) => came += count,
            Err(errno) => panic!("{errno}"),
        }
    }
    assert_ne!(came % (block.len() + LENGTH_BYTES), 0, "the last message was cut");
}

/// The next test, in a process of its own.
const APART: &str = "FLUX_TEST_APART";

#[test]
fn a_message_that_was_cut_by_an_error_ends_the_connection_too() {
    if std::env::var_os(APART).is_none() {
        let name = std::thread::current().name().unwrap().to_owned();
        let mut apart = std::process::Command::new(std::env::current_exe().unwrap());
        let end = apart.args(["--exact", &name]).env(APART, "1").output().unwrap();
        assert!(
            end.status.success() && String::from_utf8_lossy(&end.stdout).contains("1 passed"),
            "{}",
            String::from_utf8_lossy(&end.stdout)
        );
        return;
    }
    let (link, peer) = link_and_peer();
    // What is sent first is taken, and the room for the rest cannot be waited for: a poll of more
    // descriptors than a process may have is refused.
    let limit = rustix::process::Rlimit {
        current: Some(0),
        ..rustix::process::getrlimit(rustix::process::Resource::Nofile)
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    let block = vec![0; 64 << 20];
    assert_eq!(link.send(&[&block], &[], ample()), Err(Errno::INVAL));
    assert_eq!(link.send(&[b"more"], &[], soon()), Err(Errno::PIPE));
    drop(peer);
}

#[test]
fn a_message_is_not_cut_by_another_thread() {
    let (link, peer) = link_and_peer();
    let peer = Connection::tcp(peer);
    std::thread::scope(|scope| {
        for letter in 0..4_u8 {
            let link = &link;
            scope.spawn(move || {
                for _ in 0..50 {
                    link.send(&[&vec![letter; 40_000]], &[], ample()).unwrap();
                }
            });
        }
        for _ in 0..200 {
            let message = next(&peer, 40_000, ample()).unwrap();
            assert!(message.len() == 40_000 && message.iter().all(|&byte| byte == message[0]));
        }
    });
}

#[test]
fn descriptors_do_not_travel_between_hosts() {
    let (link, peer) = link_and_peer();
    assert_eq!(link.send(&[b"x"], &[peer.as_fd()], ample()), Err(Errno::OPNOTSUPP));
}
