//! Connections to rank 0 by hand: a second copy of the message layout, to detect its change.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::{ample, environment, place};

/// A connection, if rank 0 listens.
pub(crate) fn connect_once(directory: &Path) -> Option<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let address = SocketAddrUnix::new(directory.join("rank0.sock")).unwrap();
    rustix::net::connect(&socket, &address).is_ok().then_some(socket)
}

/// A connection, once rank 0 listens.
pub(crate) fn connect(directory: &Path) -> OwnedFd {
    let deadline = ample();
    loop {
        if let Some(socket) = connect_once(directory) {
            return socket;
        }
        assert!(Instant::now() < deadline, "rank 0 does not listen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends one message; whether rank 0 still took it.
pub(crate) fn say(socket: &OwnedFd, bytes: &[u8]) -> bool {
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL).is_ok()
}

/// The library's version of the messages.
pub(crate) const PROTOCOL: u32 = 6;

/// A hello of a launch that rank 0 does not ask for, because something else is wrong with it.
pub(crate) fn hello(protocol: u32, rank: u32, world: u32, version: &str) -> Vec<u8> {
    fields(protocol, rank, world, 0, version)
}

/// A rank's hello as the library says it.
pub(crate) fn hello_of(directory: &Path, rank: u32, world: u32) -> Vec<u8> {
    fields(
        PROTOCOL,
        rank,
        world,
        place(&environment(directory, rank, world)).nonce,
        env!("CARGO_PKG_VERSION"),
    )
}

fn fields(protocol: u32, rank: u32, world: u32, nonce: u128, version: &str) -> Vec<u8> {
    let mut bytes = b"fluxhelo".to_vec();
    for number in [protocol, rank, world, std::process::id(), 0, 0] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(nonce.to_le_bytes());
    bytes.extend(version.as_bytes());
    bytes.resize(80, 0);
    bytes
}

/// Says hello and returns the kind of the answer; then closes.
pub(crate) fn as_rank(directory: &Path, hello: &[u8]) -> u32 {
    let socket = connect(directory);
    assert!(say(&socket, hello));
    let mut reply = [0; 200];
    let (length, _) = rustix::net::recv(&socket, &mut reply, RecvFlags::empty()).unwrap();
    assert!(length >= 12 && reply.starts_with(b"fluxrply"), "{:?}", &reply[..length]);
    u32::from_le_bytes(reply[8..12].try_into().unwrap())
}
