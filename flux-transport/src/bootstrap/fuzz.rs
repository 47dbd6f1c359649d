//! What a process reads of others before it knows them, and what must hold of it for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;

use flux_core::{Rank, WorldSize};

use super::auth::{Answer, Challenge};
use super::environment::Environment;
use super::frame::{self, MAX_FRAME};
use super::hello::{Hello, Reply};
use super::link::Link;
use super::roster::Roster;
use super::secret::Secret;
use super::socket::Received;

/// A frame between ranks that have met: there is one reading of it, which encodes to the same bytes.
pub fn frame(bytes: &[u8]) {
    if let Ok((header, body)) = frame::decode(bytes) {
        assert!([&header.encode(body.len())[..], body].concat() == bytes, "{header:?}");
    }
}

/// A rank's hello and its leader's answers: what is made of them for people stays short.
pub fn hello(bytes: &[u8]) {
    if let Some((hello, rest)) = Hello::decode(bytes) {
        assert!(rest.len() < bytes.len() && hello.version.to_string().len() <= 32);
    }
    if let Some(reply) = Reply::decode(bytes) {
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        if let Reply::Refused(refusal) = reply {
            let world = WorldSize::new(4).expect("4 is a world size");
            assert!(refusal.into_error(Rank::new(1), world).to_string().len() < 400);
        }
    }
}

/// A handshake: nobody passes who does not know the secret.
pub fn handshake(bytes: &[u8]) {
    if let Some(challenge) = Challenge::decode(bytes) {
        assert_eq!(challenge.bytes(), bytes);
    }
    let secret = Secret::new(*b"unknown to whoever made the bytes").expect("long enough");
    let challenge = Challenge::new(7).expect("the system gives random bytes");
    assert!(Answer::decode(bytes).is_none_or(|answer| answer.check(&secret, &challenge).is_none()));
}

/// Where ranks are: there is one reading of it.
pub fn roster(bytes: &[u8]) {
    for world in [1, 2, 16] {
        let world = WorldSize::new(world).expect("is a world size");
        if let Some(roster) = Roster::decode(bytes, world) {
            assert_eq!(roster.ranks.len(), world.index());
            assert_eq!(Roster::decode(&roster.encode(), world), Some(roster));
        }
    }
}

/// A stream of messages, in the pieces that it says itself: the same messages come as if it came at once.
pub fn stream(bytes: &[u8]) {
    let Some((&piece, bytes)) = bytes.split_first() else { return };
    let (mut peer, socket) = UnixStream::pair().expect("a pair of sockets");
    socket.set_nonblocking(true).expect("a socket can be set so");
    let link = Link::tcp(socket.into());
    let (mut came, mut buffer) = (Vec::new(), vec![0; MAX_FRAME]);
    // False where no more can come.
    let mut take = |came: &mut Vec<Vec<u8>>| loop {
        match link.receive(&mut buffer).expect("a stream that is whole") {
            Received::Message(message) => came.push(buffer[..message.length].to_vec()),
            Received::Nothing => break true,
            Received::Oversized | Received::End => break false,
        }
    };
    // Who does not read on lets nobody write on.
    let all = bytes.chunks(usize::from(piece) + 1).all(|part| peer.write_all(part).is_ok() && take(&mut came));
    drop(peer);
    assert!(!all || !take(&mut came), "the end comes");
    let (mut expected, mut rest) = (Vec::new(), bytes);
    while let Some((length, tail)) = rest.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || length > MAX_FRAME || length > tail.len() {
            break;
        }
        expected.push(tail[..length].to_vec());
        rest = &tail[length..];
    }
    assert!(came == expected, "{} messages came, {} were sent", came.len(), expected.len());
}

/// A launcher's variables, `NAME=VALUE` a line: they seat a rank in its world, or are refused.
pub fn environment(bytes: &[u8]) {
    let set: Vec<(String, OsString)> = bytes
        .split(|&byte| byte == b'\n')
        .filter_map(|line| {
            let at = line.iter().position(|&byte| byte == b'=')?;
            let name = String::from_utf8(line[..at].to_vec()).ok()?;
            // Files are no business of this.
            (name != super::FLUX_SECRET_FILE).then(|| (name, OsString::from_vec(line[at + 1..].to_vec())))
        })
        .collect();
    let lookup = |name: &str| set.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    match Environment::parse(&lookup) {
        Ok(environment) => {
            assert!(environment.rank.get() < environment.world.get() && environment.local_rank < environment.world.get());
            assert_eq!(Environment::parse(&lookup).ok(), Some(environment));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
