//! Peers that do not read, and peers that are cut off: what the others hear.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use flux_core::WorldSize;

use super::*;
use crate::bootstrap::control::{ControlPlane, Watcher};
use crate::bootstrap::process::frame::{self, HEADER_BYTES, Header};
use crate::bootstrap::process::plane::ProcessControl;
use crate::bootstrap::socket::Received;
use crate::lateness::{AMPLE, scaled};

fn ample() -> Instant {
    Instant::now() + AMPLE
}

/// Rank 0, and the bare sockets of the others.
fn plane_and_peers(world: u32) -> (ProcessControl, Vec<OwnedFd>) {
    let (ours, theirs) = (1..world).map(|_| socket::pair().unwrap()).unzip();
    (
        ProcessControl::start(Mesh::new(Rank::new(0), WorldSize::new(world).unwrap(), ours))
            .unwrap(),
        theirs,
    )
}

fn send(peer: &OwnedFd, kind: Kind) {
    send_with(peer, kind, &[]);
}

fn send_with(peer: &OwnedFd, kind: Kind, body: &[u8]) {
    let bytes = Header { kind, descriptors: 0, sequence: 0 }.encode(body.len());
    socket::send(peer.as_fd(), &[&bytes, body], &[], ample()).unwrap();
}

/// Sends until no more is taken.
fn fill(plane: &ProcessControl, rank: u32) {
    let block = [0; 4096];
    while plane.endpoint.send(Rank::new(rank), Kind::Reply, &block, &[], Instant::now()).is_ok() {}
    while plane.endpoint.send(Rank::new(rank), Kind::Reply, &[], &[], Instant::now()).is_ok() {}
}

/// The kinds of what has come, and the last body, until there is one of this kind.
fn heard(peer: &OwnedFd, last: Kind) -> (Vec<Kind>, Vec<u8>) {
    let (mut kinds, mut buffer) = (Vec::new(), [0; HEADER_BYTES + 8]);
    loop {
        assert_eq!(socket::wait(&mut [socket::readable(peer)], Some(ample())), Ok(1));
        let Ok(Received::Message(message)) = socket::receive(peer.as_fd(), &mut buffer) else {
            panic!("it ended after {kinds:?}")
        };
        let (header, body) = frame::decode(&buffer[..message.length]).unwrap();
        kinds.push(header.kind);
        if header.kind == last {
            return (kinds, body.to_vec());
        }
    }
}

#[test]
fn a_row_that_cannot_be_handed_over_is_no_group_for_anybody() {
    let (plane, peers) = plane_and_peers(3);
    fill(&plane, 1);
    for peer in &peers {
        send(peer, Kind::Join);
    }
    let refused = plane.endpoint.regroup(&[], ample()).unwrap_err();
    assert!(
        matches!(&refused, ControlError::Timeout { missing, .. } if *missing == [Rank::new(1)]),
        "{refused}"
    );
    let (kinds, errno) = heard(&peers[1], Kind::Unable);
    assert_eq!(
        (kinds, errno),
        (vec![Kind::Join, Kind::Unable], Errno::TIMEDOUT.raw_os_error().to_le_bytes().to_vec())
    );
}

#[test]
fn no_group_is_made_without_a_live_rank_that_cannot_be_told() {
    let (plane, peers) = plane_and_peers(2);
    fill(&plane, 1);
    let refused = plane
        .endpoint
        .regroup(&[Rank::new(1)], Instant::now() + scaled(Duration::from_millis(100)))
        .unwrap_err();
    assert!(
        matches!(&refused, ControlError::Timeout { missing, .. } if *missing == [Rank::new(1)]),
        "{refused}"
    );
    drop(peers);
    assert_eq!(
        plane.endpoint.regroup(&[Rank::new(1)], ample()).unwrap().mesh.world.get(),
        1,
        "it is gone"
    );
}

#[test]
fn a_peer_that_is_cut_off_is_told_that_it_is_left_out() {
    let (_plane, peers) = plane_and_peers(2);
    socket::send(peers[0].as_fd(), &[b"nonsense"], &[], ample()).unwrap();
    assert_eq!(heard(&peers[0], Kind::LeftOut).0, [Kind::LeftOut]);
}

#[test]
fn a_verdict_for_an_earlier_attempt_is_none_and_its_sockets_close() {
    let (plane, peers) = plane_and_peers(2);
    let (row, other) = socket::pair().unwrap();
    let bytes = Header { kind: Kind::Welcome, descriptors: 1, sequence: 0 }.encode(4);
    socket::send(peers[0].as_fd(), &[&bytes, &3_u32.to_le_bytes()], &[row.as_fd()], ample())
        .unwrap();
    drop(row);
    assert_eq!(socket::wait(&mut [socket::readable(&other)], Some(ample())), Ok(1));
    assert!(matches!(socket::receive(other.as_fd(), &mut [0; 1]), Ok(Received::End)));
    assert!(matches!(
        plane.endpoint.regroup(&[], Instant::now() + scaled(Duration::from_millis(50))),
        Err(ControlError::Timeout { .. })
    ));
}

/// A rank at its limit of descriptors, as where old and new sockets are open at once.
#[test]
fn a_rank_that_cannot_take_its_sockets_says_so_and_keeps_its_leader() {
    let (ours, leader) = socket::pair().unwrap();
    let plane =
        ProcessControl::start(Mesh::new(Rank::new(1), WorldSize::new(2).unwrap(), vec![ours]))
            .unwrap();
    let welcome = || {
        [
            &Header { kind: Kind::Welcome, descriptors: 1, sequence: 0 }.encode(4)[..],
            &3_u32.to_le_bytes(),
        ]
        .concat()
    };
    let refused = std::thread::scope(|scope| {
        let waits = scope.spawn(|| plane.endpoint.regroup(&[], ample()).map(|_| ()));
        heard(&leader, Kind::Join);
        assert!(
            plane.endpoint.take(Rank::new(0), &welcome(), Vec::new(), true).is_none(),
            "it is not the leader's fault"
        );
        waits.join().unwrap().unwrap_err()
    });
    assert!(
        matches!(&refused, ControlError::Io { source, .. }
            if source.raw_os_error() == Some(Errno::MFILE.raw_os_error())),
        "{refused}"
    );
    assert_eq!(heard(&leader, Kind::Stopped).0, [Kind::Stopped], "and nothing of being left out");
    assert!(
        plane.endpoint.take(Rank::new(0), &welcome(), Vec::new(), false).is_some(),
        "one that gives fewer than it says is at fault"
    );
}

#[test]
fn a_rank_that_waits_elsewhere_finds_that_it_was_left_out() {
    let (ours, theirs) = socket::pair().unwrap();
    let plane = |rank, socket| {
        ProcessControl::start(Mesh::new(Rank::new(rank), WorldSize::new(2).unwrap(), vec![socket]))
            .unwrap()
    };
    let (zero, one) = (plane(0, ours), plane(1, theirs));
    assert_eq!(one.endpoint.left_out_by(), None);
    assert_eq!(zero.endpoint.regroup(&[Rank::new(1)], ample()).unwrap().mesh.world.get(), 1);
    assert_eq!(
        (zero.endpoint.left_out_by(), one.endpoint.left_out_by()),
        (None, Some(Rank::new(0)))
    );
}

#[test]
fn a_rank_that_came_in_time_is_in_the_group_though_that_is_read_after_the_deadline() {
    let (plane, peers) = plane_and_peers(2);
    // As where this process was stopped: the monitor is held up until the leader's deadline is
    // over.
    let holds_up: Arc<Watcher> =
        Arc::new(|_| std::thread::sleep(scaled(Duration::from_millis(190))));
    plane.watch(Arc::downgrade(&holds_up));
    let made = std::thread::scope(|scope| {
        let leads = scope.spawn(|| {
            plane.endpoint.regroup(&[], Instant::now() + scaled(Duration::from_millis(200)))
        });
        heard(&peers[0], Kind::Join);
        send_with(&peers[0], Kind::Abort, &[1; 8]);
        send(&peers[0], Kind::Join);
        leads.join().unwrap()
    });
    assert_eq!(made.unwrap().mesh.world.get(), 2);
}
