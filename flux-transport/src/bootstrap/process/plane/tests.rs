//! A peer that breaks the protocol: it is cut off and named, and what it sent is closed.

use crate::lateness::{AMPLE, assert_soon, scaled};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;
use crate::bootstrap::process::frame::{HEADER_BYTES, MAX_FRAME};
use crate::bootstrap::socket::{self, Received, receive};

fn ample() -> Instant {
    Instant::now() + AMPLE
}

/// Rank 0 of two, and rank 1's bare socket.
fn plane_and_peer() -> (ProcessControl, OwnedFd) {
    let (ours, theirs) = socket::pair().unwrap();
    let mesh = Mesh::new(Rank::new(0), WorldSize::new(2).unwrap(), vec![ours]);
    (ProcessControl::start(mesh).unwrap(), theirs)
}

fn frame(kind: Kind, descriptors: u8, sequence: u64, body: &[u8]) -> Vec<u8> {
    [&Header { kind, descriptors, sequence }.encode(body.len())[..], body].concat()
}

/// Sends without the library's limit on descriptors.
fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    rustix::net::sendmsg(
        socket,
        &[std::io::IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
    .unwrap();
}

/// What happens to a peer that sends these messages, each with so many descriptors.
fn broken_by(messages: &[(Vec<u8>, usize)]) -> String {
    let (plane, peer) = plane_and_peer();
    let (sender, heard) = mpsc::channel();
    let sender = Mutex::new(sender);
    let watcher: Arc<Watcher> =
        Arc::new(move |notice| sender.lock().unwrap().send(notice).unwrap());
    plane.watch(Arc::downgrade(&watcher));
    let (read, write) = rustix::pipe::pipe().unwrap();
    for (bytes, descriptors) in messages {
        send(&peer, bytes, &vec![write.as_fd(); *descriptors]);
    }
    drop(write);
    assert_eq!(heard.recv_timeout(AMPLE), Ok(Notice::Lost(Rank::new(1))));
    // It hears that it is left out, and sees that it is cut off.
    socket::wait(&mut [socket::readable(&peer)], Some(ample())).unwrap();
    let mut said = [0; HEADER_BYTES];
    assert!(matches!(receive(peer.as_fd(), &mut said), Ok(Received::Message(_))));
    assert_eq!(&said[..], frame(Kind::LeftOut, 0, 0, b""));
    assert!(matches!(receive(peer.as_fd(), &mut said), Ok(Received::End)));
    let error = loop {
        // Frames before the bad one are good.
        match plane.exchange(b"", ample()) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    let ControlError::Protocol { rank, detail } = error else { panic!("{error}") };
    assert_eq!(rank, Rank::new(1), "{detail}");
    drop(plane);
    // Its descriptors are closed, all of them: the pipe has no writer any more.
    assert_eq!(rustix::io::read(&read, &mut [0; 1]), Ok(0));
    detail
}

#[test]
fn a_peer_that_breaks_the_protocol_is_cut_off_and_named() {
    let mut unknown = frame(Kind::Exchange, 0, 0, b"");
    unknown[4] = 99;
    let mut longer = frame(Kind::Exchange, 0, 0, b"body");
    longer[8] = 5;
    let cases = [
        (b"garbage that is longer than a header".to_vec(), 0, "magic"),
        (vec![0; HEADER_BYTES - 1], 0, "shorter than its header"),
        (unknown, 0, "unknown kind 99"),
        (longer, 0, "says 5 bytes with a body of 4"),
        (vec![0; MAX_FRAME + 1], 0, "too long"),
        (frame(Kind::Exchange, 0, 0, b"x"), 1, "says 0 descriptors with 1"),
        (frame(Kind::Exchange, 1, 0, b"x"), 1, "exchange) that says 1 descriptors with 1"),
        (frame(Kind::Descriptors, 2, 0, b""), 1, "says 2 descriptors with 1"),
        (frame(Kind::Descriptors, 2, 0, b""), 3, "says 2 descriptors with 3"),
        (frame(Kind::Descriptors, 100, 0, b""), 100, "more descriptors than"),
        (frame(Kind::Goodbye, 1, 0, b""), 1, "goodbye) that says 1 descriptors with 1"),
        (frame(Kind::Abort, 0, 0, b""), 0, "abort without a communicator or a reason"),
        (frame(Kind::Abort, 0, 0, &[1; 4]), 0, "abort without a communicator or a reason"),
        (
            frame(Kind::Abort, 0, 0, &[1, 0, 0, 0, 0, 0, 0, 0]),
            0,
            "abort without a communicator or a reason",
        ),
        (frame(Kind::Abort, 0, 0, &[1; 9]), 0, "abort without a communicator or a reason"),
        (frame(Kind::Depart, 0, 0, &[1; 4]), 0, "departure without a communicator or a last call"),
        (frame(Kind::Told, 0, 0, &[1; 16]), 0, "a word of its transport in too many or too few"),
        (frame(Kind::Told, 0, 0, &[1; 21]), 0, "a word of its transport in too many or too few"),
        (frame(Kind::Depart, 0, 0, &[1; 9]), 0, "departure without a communicator or a last call"),
    ];
    for (message, descriptors, said) in cases {
        let detail = broken_by(&[(message, descriptors)]);
        assert!(detail.contains(said), "{said}: {detail}");
    }
}

#[test]
fn a_peer_that_runs_ahead_is_cut_off() {
    let ahead = [0, 1, 2].map(|step| (frame(Kind::Exchange, 0, step, b""), 0));
    let detail = broken_by(&ahead);
    // The first two are taken; the third came while nobody had taken any.
    assert!(detail.contains("runs ahead"), "{detail}");
}

#[test]
fn a_frame_of_another_step_is_no_frame_of_this_one() {
    let (plane, peer) = plane_and_peer();
    send(&peer, &frame(Kind::Exchange, 0, 7, b"x"), &[]);
    let error = plane.exchange(b"y", ample()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1: it is at step 7 (exchange), rank 0 is at step 0 (exchange)"
    );
}

#[test]
fn a_step_behind_another_threads_ends_by_its_own_deadline_and_names_the_late_rank() {
    let (plane, peer) = plane_and_peer();
    std::thread::scope(|scope| {
        let long = scope.spawn(|| plane.barrier(ample()));
        // It has sent its frame.
        socket::wait(&mut [socket::readable(&peer)], Some(ample())).unwrap();
        let short =
            plane.exchange(b"", Instant::now() + scaled(Duration::from_millis(50))).unwrap_err();
        assert!(!long.is_finished());
        send(&peer, &frame(Kind::Exchange, 0, 0, b""), &[]);
        long.join().unwrap().unwrap();
        assert!(
            matches!(&short, ControlError::Timeout { step: "exchange", missing }
                if *missing == [Rank::new(1)]),
            "{short}"
        );
    });
}

#[test]
fn a_peer_that_reads_nothing_costs_no_more_than_the_deadline() {
    let (plane, peer) = plane_and_peer();
    // It answers every step, so that this rank goes on until the connection is full.
    let (mut step, body) = (0, vec![0; MAX_BODY]);
    let error = loop {
        send(&peer, &frame(Kind::Exchange, 0, step, b""), &[]);
        step += 1;
        if let Err(error) =
            plane.exchange(&body, Instant::now() + scaled(Duration::from_millis(200)))
        {
            break error;
        }
    };
    assert!(
        matches!(&error, ControlError::Timeout { missing, .. } if *missing == [Rank::new(1)]),
        "{error}"
    );
    // Leaving does not wait for it either.
    let began = Instant::now();
    plane.goodbye();
    drop(plane);
    assert_soon(began.elapsed(), Duration::from_secs(1));
}

/// Rank 0 of two, whose monitor is held up for so long with what rank 1 has said first, as if this
/// process were stopped; and rank 1's bare socket.
fn held_up_for(time: Duration) -> (ProcessControl, OwnedFd, Arc<Watcher>) {
    let (plane, peer) = plane_and_peer();
    let (begun, is_begun) = mpsc::channel();
    let begun = Mutex::new(begun);
    let watcher: Arc<Watcher> = Arc::new(move |_| {
        begun.lock().unwrap().send(()).unwrap();
        std::thread::sleep(time);
    });
    plane.watch(Arc::downgrade(&watcher));
    send(&peer, &frame(Kind::Abort, 0, 0, &[1; 8]), &[]);
    is_begun.recv_timeout(AMPLE).unwrap();
    (plane, peer, watcher)
}

#[test]
fn what_came_in_time_counts_though_it_is_read_after_the_deadline() {
    let soon = || Instant::now() + scaled(Duration::from_millis(50));
    let held_up = || held_up_for(scaled(Duration::from_millis(70)));

    let (plane, peer, _watcher) = held_up();
    send(&peer, &frame(Kind::Exchange, 0, 0, b"x"), &[]);
    assert_eq!(plane.exchange(b"y", soon()).unwrap(), [b"y", b"x"]);

    let (plane, peer, _watcher) = held_up();
    // Of the first question.
    send(&peer, &frame(Kind::Reply, 0, 0, &1_u32.to_le_bytes()), &[]);
    assert_eq!(plane.ask(0, soon())[1], Answer::Reply(Vec::new()));

    let (plane, peer, _watcher) = held_up();
    send(&peer, &frame(Kind::Goodbye, 0, 0, b""), &[]);
    drop(peer);
    let error = plane.exchange(b"y", soon()).unwrap_err();
    assert!(
        matches!(error, ControlError::PeerLeft { rank } if rank == Rank::new(1)),
        "it could not be sent to, and has left: {error}"
    );
}

#[test]
fn a_last_look_ends_though_what_came_is_not_read() {
    let (plane, peer, _watcher) = held_up_for(scaled(Duration::from_secs(1)));
    send(&peer, &frame(Kind::Exchange, 0, 0, b"x"), &[]);
    let began = Instant::now();
    let error = plane.exchange(b"y", began + scaled(Duration::from_millis(50))).unwrap_err();
    assert!(
        matches!(&error, ControlError::Timeout { missing, .. } if *missing == [Rank::new(1)]),
        "{error}"
    );
    assert!(began.elapsed() >= scaled(Duration::from_millis(150)), "{:?}", began.elapsed());
    assert_soon(began.elapsed(), Duration::from_millis(600));
}
