//! The one reader of a rank's connections.
//!
//! Invariant: the monitor's thread reads every byte as it comes; callers take whole frames from the
//! inbox. So a sender never waits for a busy peer, and a peer's end is seen when it happens. A peer
//! has at most [`AHEAD`] frames in the inbox.

use super::endpoint::{Arrived, Endpoint, PeerEnd, Sockets};
use super::frame::{self, Kind, MAX_FRAME};
use super::inquiry::AT_ONCE;
use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::{GaveUp, Notice};
use crate::bootstrap::socket::{self, Message, Received};
use flux_core::Rank;
use flux_core::signal::Epoch;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// A peer that took part in a step may have sent the next one's frame, and no more.
const AHEAD: usize = 2;

impl Endpoint {
    /// Records a peer's end and tells watchers, outside the lock: they may use the plane.
    fn end(&self, rank: Rank, end: PeerEnd) {
        let lost = end != PeerEnd::Left;
        if let PeerEnd::Broke(detail) = &end {
            tracing::warn!(%rank, detail, "a peer broke the protocol");
        }
        let mut inbox = self.inbox();
        inbox.peers[rank.index()].end = Some(end);
        self.changed.notify_all();
        // Under the same lock as the end: a new watcher sees either the end or this call, never
        // both.
        let watchers = inbox.watching();
        drop(inbox);
        for watcher in watchers.into_iter().filter(|_| lost) {
            watcher(Notice::Lost(rank));
        }
    }

    /// Tells who watches, outside the lock.
    fn tell(&self, notice: Notice) {
        let watchers = self.inbox().watching();
        for watcher in watchers {
            watcher(notice);
        }
    }

    pub(crate) fn monitor(&self) {
        let mut open: Vec<(Rank, &Connection)> = self.peers().collect();
        let mut buffer = vec![0; MAX_FRAME];
        loop {
            let mut watched: Vec<_> =
                open.iter().map(|&(_, link)| socket::readable(link)).collect();
            watched.push(socket::readable(&self.stop));
            if let Err(errno) = socket::wait(&mut watched, None) {
                open.drain(..).for_each(|(rank, _)| {
                    self.end(
                        rank,
                        PeerEnd::Broke(format!("its connection cannot be watched: {errno}")),
                    );
                });
                return;
            }
            let mut ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready.pop() == Some(true) {
                return;
            }
            // Set before reading and cleared after: nothing unread and not busy means all was
            // handled.
            self.inbox().busy = true;
            let mut ready = ready.into_iter();
            open.retain(|&(rank, link)| {
                ready.next() != Some(true)
                    || match self.read(rank, link, &mut buffer) {
                        None => true,
                        Some(end) => {
                            // The peer that is cut off must not take it for a death and go on
                            // alone.
                            if matches!(end, PeerEnd::Broke(_)) {
                                self.say(rank, Kind::LeftOut, &[], Instant::now() + AT_ONCE);
                                link.cut();
                            }
                            self.end(rank, end);
                            false
                        }
                    }
            });
            self.inbox().busy = false;
            self.changed.notify_all();
        }
    }

    fn read(&self, rank: Rank, link: &Connection, buffer: &mut [u8]) -> Option<PeerEnd> {
        loop {
            match link.receive(buffer) {
                Ok(Received::Message(Message { length, descriptors, cut })) => {
                    if let Some(end) = self.take(rank, &buffer[..length], descriptors, cut) {
                        return Some(end);
                    }
                }
                Ok(Received::Nothing) => return None,
                Ok(Received::End) => return Some(PeerEnd::Lost),
                Ok(Received::Oversized) => {
                    return Some(PeerEnd::Broke(
                        "a message that is too long or has more descriptors than a frame may"
                            .to_owned(),
                    ));
                }
                Err(errno) => {
                    return Some(PeerEnd::Broke(format!("its connection cannot be read: {errno}")));
                }
            }
        }
    }

    /// Takes one frame. `cut`: this process could not take all descriptors, which the step, or the
    /// wait for a new group, reports; it is not the peer's fault.
    pub(crate) fn take(
        &self,
        rank: Rank,
        bytes: &[u8],
        descriptors: Vec<OwnedFd>,
        cut: bool,
    ) -> Option<PeerEnd> {
        let (header, body) = match frame::decode(bytes) {
            Ok(frame) => frame,
            Err(detail) => return Some(PeerEnd::Broke(detail)),
        };
        let (said, came) = (usize::from(header.descriptors), descriptors.len());
        let brings = matches!(header.kind, Kind::Descriptors | Kind::Welcome);
        let cut = cut && brings;
        if (said != came && !cut) || (came > 0 && !brings) {
            return Some(PeerEnd::Broke(format!(
                "a frame ({}) that says {said} descriptors with {came}",
                header.kind.name()
            )));
        }
        match header.kind {
            Kind::Goodbye => return Some(PeerEnd::Left),
            Kind::Abort => match body.as_chunks() {
                (&[communicator, reason], []) if reason != [0; 4] => {
                    let [communicator, reason] = [communicator, reason].map(u32::from_le_bytes);
                    // In this order: whose step ends finds the fault.
                    self.tell(Notice::Aborted { by: rank, communicator, reason });
                    self.abort_steps(communicator, rank, reason);
                }
                _ => {
                    return Some(PeerEnd::Broke(
                        "an abort without a communicator or a reason".to_owned(),
                    ));
                }
            },
            Kind::Depart => match body.as_chunks() {
                (&[communicator, last], []) => {
                    let [communicator, last] = [communicator, last].map(u32::from_le_bytes);
                    self.tell(Notice::Departed { by: rank, communicator, last: Epoch::new(last) });
                }
                _ => {
                    return Some(PeerEnd::Broke(
                        "a departure without a communicator or a last call".to_owned(),
                    ));
                }
            },
            Kind::Told => match body.as_chunks() {
                (&[communicator, a, b, c, d], []) => {
                    let [communicator, words @ ..] =
                        [communicator, a, b, c, d].map(u32::from_le_bytes);
                    self.tell(Notice::Told { by: rank, communicator, words });
                }
                _ => {
                    return Some(PeerEnd::Broke(
                        "a word of its transport in too many or too few bytes".to_owned(),
                    ));
                }
            },
            Kind::GaveUp => match GaveUp::decode(body) {
                Some(what) => self.tell(Notice::GaveUp { by: rank, what }),
                None => {
                    return Some(PeerEnd::Broke(
                        "a frame that says in too many or too few bytes what was given up"
                            .to_owned(),
                    ));
                }
            },
            Kind::Ask => self.answer(rank, body),
            Kind::Reply => self.note_answer(rank, body),
            Kind::Join | Kind::Stopped | Kind::LeftOut | Kind::Welcome | Kind::Unable => {
                self.note_regroup(rank, header.kind, body, Sockets { came: descriptors, cut });
            }
            Kind::Exchange | Kind::Descriptors => {
                let mut inbox = self.inbox();
                let frames = &mut inbox.peers[rank.index()].frames;
                if frames.len() == AHEAD {
                    return Some(PeerEnd::Broke(format!(
                        "it runs ahead: {AHEAD} steps that this rank has not taken, and one more"
                    )));
                }
                frames.push_back(Arrived {
                    kind: header.kind,
                    sequence: header.sequence,
                    body: body.to_vec(),
                    descriptors,
                    cut,
                });
                self.changed.notify_all();
            }
        }
        None
    }
}
