//! What a process reads of others before it knows them, and what must hold of it for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;

use flux_core::{Rank, WorldSize};

use super::connection::Connection;
use super::environment::Environment;
use super::mesh::whereabouts;
use super::process::frame::{self, MAX_FRAME};
use super::rendezvous::auth::{Challenge, Response};
use super::rendezvous::hello::{Hello, Reply};
use super::rendezvous::roster::Roster;
use super::secret::Secret;
use super::socket::Received;

/// A frame between ranks that have met: there is one reading of it, which encodes to the same
/// bytes.
pub fn frame(bytes: &[u8]) -> bool {
    let Ok((header, body)) = frame::decode(bytes) else { return false };
    assert!([&header.encode(body.len())[..], body].concat() == bytes, "{header:?}");
    true
}

/// A rank's hello and its leader's answers: what is made of them for people stays short.
pub fn hello(bytes: &[u8]) -> bool {
    let (hello, reply) = (Hello::decode(bytes), Reply::decode(bytes));
    if let Some((hello, rest)) = hello {
        assert!(rest.len() < bytes.len() && hello.version.to_string().len() <= 32);
    }
    if let Some(reply) = reply {
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        if let Reply::Refused(refusal) = reply {
            let world = WorldSize::new(4).expect("4 is a world size");
            assert!(refusal.into_error(Rank::new(1), world).to_string().len() < 400);
        }
    }
    hello.is_some() || reply.is_some()
}

/// A handshake: nobody passes who does not know the secret.
pub fn handshake(bytes: &[u8]) -> bool {
    let (challenge, answer) = (Challenge::decode(bytes), Response::decode(bytes));
    if let Some(challenge) = &challenge {
        assert_eq!(challenge.bytes(), bytes);
    }
    let secret = Secret::new(*b"unknown to whoever made the bytes").expect("long enough");
    let own = Challenge::new(7).expect("the system gives random bytes");
    assert!(answer.as_ref().is_none_or(|answer| answer.check(&secret, &own).is_none()));
    challenge.is_some() || answer.is_some()
}

/// Where ranks are: there is one reading of it.
pub fn roster(bytes: &[u8]) -> bool {
    let mut taken = false;
    for world in [1, 2, 16] {
        let world = WorldSize::new(world).expect("is a world size");
        if let Some(roster) = Roster::decode(bytes, world) {
            assert_eq!(roster.payloads.len(), world.index());
            // Where each is, as its mesh reads it.
            let _ = whereabouts::all(&roster.payloads);
            assert_eq!(Roster::decode(&roster.encode(), world), Some(roster));
            taken = true;
        }
    }
    taken
}

/// A stream of messages, in the pieces that it says itself: the same messages come as if it came at
/// once. Taken where it is messages to its end.
pub fn stream(bytes: &[u8]) -> bool {
    let Some((&piece, bytes)) = bytes.split_first() else { return false };
    let (mut peer, socket) = UnixStream::pair().expect("a pair of sockets");
    socket.set_nonblocking(true).expect("a socket can be set so");
    let link = Connection::tcp(socket.into());
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
    let all = bytes
        .chunks(usize::from(piece) + 1)
        .all(|part| peer.write_all(part).is_ok() && take(&mut came));
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
    rest.is_empty()
}

/// A launcher's variables, `NAME=VALUE` a line: they place a rank in its world, or are refused.
pub fn environment(bytes: &[u8]) -> bool {
    let set: Vec<(String, OsString)> = bytes
        .split(|&byte| byte == b'\n')
        .filter_map(|line| {
            let at = line.iter().position(|&byte| byte == b'=')?;
            let name = String::from_utf8(line[..at].to_vec()).ok()?;
            // Files are no business of this.
            (name != super::FLUX_SECRET_FILE)
                .then(|| (name, OsString::from_vec(line[at + 1..].to_vec())))
        })
        .collect();
    let lookup =
        |name: &str| set.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    match Environment::parse(&lookup) {
        Ok(environment) => {
            assert!(
                environment.rank.get() < environment.world.get()
                    && environment.local_rank < environment.world.get()
            );
            assert_eq!(Environment::parse(&lookup).ok(), Some(environment));
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    use crate::bootstrap::process::frame::{Header, Kind};
    use crate::bootstrap::rendezvous::hello::{PROTOCOL, Refusal, Version};

    let counted = |count: u8| (0..count).collect::<Vec<u8>>();
    let framed = |kind, descriptors, sequence, body: &[u8]| {
        [&Header { kind, descriptors, sequence }.encode(body.len())[..], body].concat()
    };
    let version = Version::new("0.1.0");
    let hello = Hello { protocol: PROTOCOL, rank: 2, world: 4, pid: 77, nonce: 5, version }
        .encode()
        .to_vec();
    let replied = |reply: Reply| reply.encode().to_vec();
    let refused = |refusal| replied(Reply::Refused(refusal));
    // All but its random bytes, which are to be the same in every run.
    let greeting = Challenge::new(7).expect("the system gives random bytes").bytes()[..24].to_vec();
    let ranks =
        |count: u8| Roster { payloads: (0..count).map(|rank| vec![rank; 66]).collect() }.encode();
    let sent = |messages: [&[u8]; 2]| {
        let message =
            |message: &[u8]| [&(message.len() as u32).to_le_bytes()[..], message].concat();
        // In pieces of three bytes.
        [&[2][..], &messages.map(message).concat()].concat()
    };
    let secret = "FLUX_SECRET=0123456789abcdef";
    let lines = |lines: &[&str]| lines.join("\n").into_bytes();
    vec![
        ("frame", "abort", framed(Kind::Abort, 0, 0, &[1, 0, 0, 0, 7, 0, 0, 0])),
        ("frame", "departure", framed(Kind::Depart, 0, 0, &[1, 0, 0, 0, 7, 0, 0, 0])),
        ("frame", "told", framed(Kind::Told, 0, 0, &[1; 20])),
        ("frame", "descriptors", framed(Kind::Descriptors, 2, 4, b"")),
        ("frame", "exchange", framed(Kind::Exchange, 0, 3, b"body")),
        ("hello", "hello", hello.clone()),
        ("hello", "waiting", replied(Reply::Waiting { missing: 6 })),
        ("hello", "welcome", replied(Reply::Welcome { sockets: 3 })),
        ("hello", "duplicate", refused(Refusal::DuplicateRank { rank: 1, first: 2, second: 3 })),
        ("hello", "world", refused(Refusal::World { rank: 1, world: 2, expected: 3 })),
        (
            "hello",
            "version",
            refused(Refusal::Version { rank: 1, protocols: [2, 3], version, expected: version }),
        ),
        ("hello", "missing", refused(Refusal::Missing { ranks: 6, denied: 1 })),
        ("hello", "other-launch", refused(Refusal::OtherLaunch)),
        ("hello", "leader", refused(Refusal::Leader { rank: 1, errno: 24 })),
        ("handshake", "challenge", [greeting, counted(32)].concat()),
        ("handshake", "answer", [counted(64), hello].concat()),
        ("roster", "two-ranks", ranks(2)),
        ("roster", "sixteen-ranks", ranks(16)),
        ("stream", "two-messages", sent([b"hello", b"x"])),
        (
            "environment",
            "own",
            lines(&[
                "FLUX_RANK=1",
                "FLUX_WORLD_SIZE=4",
                "FLUX_LOCAL_RANK=1",
                "FLUX_RENDEZVOUS=/run/x",
            ]),
        ),
        (
            "environment",
            "own-across-hosts",
            lines(&[
                "FLUX_RANK=1",
                "FLUX_WORLD_SIZE=4",
                "FLUX_LOCAL_RANK=1",
                "FLUX_RENDEZVOUS=tcp://[fe80::1]:29600",
                secret,
                "FLUX_HOST_ID=a",
            ]),
        ),
        (
            "environment",
            "torchrun",
            lines(&[
                "RANK=1",
                "WORLD_SIZE=8",
                "LOCAL_RANK=1",
                "LOCAL_WORLD_SIZE=4",
                "MASTER_ADDR=node1",
                "MASTER_PORT=29500",
                "TORCHELASTIC_RUN_ID=r",
                secret,
            ]),
        ),
        (
            "environment",
            "slurm",
            lines(&[
                "SLURM_PROCID=1",
                "SLURM_NTASKS=4",
                "SLURM_LOCALID=1",
                "SLURM_JOB_ID=7",
                "SLURM_STEP_ID=0",
                "SLURM_STEP_NUM_NODES=2",
                "SLURM_STEP_NODELIST=gpu[03-04,7]",
                secret,
            ]),
        ),
        (
            "environment",
            "openmpi",
            lines(&[
                "OMPI_COMM_WORLD_RANK=1",
                "OMPI_COMM_WORLD_SIZE=2",
                "OMPI_COMM_WORLD_LOCAL_RANK=1",
                "OMPI_COMM_WORLD_LOCAL_SIZE=2",
                "PMIX_NAMESPACE=p",
                "FLUX_LAUNCHER=openmpi",
            ]),
        ),
        (
            "environment",
            "mpich",
            lines(&["PMI_RANK=1", "PMI_SIZE=2", "MPI_LOCALRANKID=1", "MPI_LOCALNRANKS=2"]),
        ),
    ]
}
