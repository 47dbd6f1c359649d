//! The one reader of a rank's connections.
//!
//! Invariant: every byte from a peer is read by the monitor's thread, as soon as it comes; callers
//! only take whole frames out of the inbox. So nobody races for a frame, a sender never waits for a
//! peer that is busy elsewhere, and a peer's end is seen when it happens, not when somebody next
//! listens. A peer has at most [`AHEAD`] frames in the inbox.

use super::frame::{self, Kind, MAX_FRAME};
use super::inquiry::AT_ONCE;
use super::shared::{Arrived, End, Shared, Sockets};
use crate::bootstrap::control::{GaveUp, Notice};
use crate::bootstrap::link::Link;
use crate::bootstrap::socket::{self, Message, Received};
use flux_core::Rank;
use flux_core::signal::Epoch;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// A peer that took part in a step can have sent its frame of the next one, and no more: it then
/// waits for ours.
const AHEAD: usize = 2;

impl Shared {
    /// Records a peer's end, of which each has one, and tells who wants to know. Watchers are
    /// called outside the lock: they may take their time, and may use the plane.
    fn end(&self, rank: Rank, end: End) {
        let lost = end != End::Left;
        if let End::Broke(detail) = &end {
            tracing::warn!(%rank, detail, "a peer broke the protocol");
        }
        let mut inbox = self.inbox();
        inbox.peers[rank.index()].end = Some(end);
        self.changed.notify_all();
        // Under the same lock as the end: who starts to watch sees either the end or this call,
        // never both.
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

    /// Reads until told to stop.
    pub(crate) fn monitor(&self) {
        let mut open: Vec<(Rank, &Link)> = self.peers().collect();
        let mut buffer = vec![0; MAX_FRAME];
        loop {
            let mut watched: Vec<_> = open.iter().map(|&(_, link)| socket::readable(link)).collect();
            watched.push(socket::readable(&self.stop));
            if let Err(errno) = socket::wait(&mut watched, None) {
                open.drain(..).for_each(|(rank, _)| self.end(rank, End::Broke(format!("its connection cannot be watched: {errno}"))));
                return;
            }
            let mut ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready.pop() == Some(true) {
                return;
            }
            // Set before anything is read and cleared after: who finds nothing to read, and this
            // not set, knows that all was handled.
            self.inbox().busy = true;
            let mut ready = ready.into_iter();
            open.retain(|&(rank, link)| {
                ready.next() != Some(true)
                    || match self.read(rank, link, &mut buffer) {
                        None => true,
                        Some(end) => {
                            // A peer that talks nonsense is cut off, and sees this rank's end in
                            // turn. It is not to take that for a death and go on alone.
                            if matches!(end, End::Broke(_)) {
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

    /// Reads what there is from one peer; its end, if it came to one.
    fn read(&self, rank: Rank, link: &Link, buffer: &mut [u8]) -> Option<End> {
        loop {
            match link.receive(buffer) {
                Ok(Received::Message(Message { length, descriptors, cut })) => {
                    if let Some(end) = self.take(rank, &buffer[..length], descriptors, cut) {
                        return Some(end);
                    }
                }
                Ok(Received::Nothing) => return None,
                Ok(Received::End) => return Some(End::Lost),
                Ok(Received::Oversized) => {
                    return Some(End::Broke("a message that is too long or has more descriptors than a frame may".to_owned()));
                }
                Err(errno) => return Some(End::Broke(format!("its connection cannot be read: {errno}"))),
            }
        }
    }

    /// A frame, of whose descriptors this process could not take all if they are `cut`: that is not
    /// the peer's fault, and for whoever takes the step, or waits for a new group, to say.
    pub(crate) fn take(&self, rank: Rank, bytes: &[u8], descriptors: Vec<OwnedFd>, cut: bool) -> Option<End> {
        let (header, body) = match frame::decode(bytes) {
            Ok(frame) => frame,
            Err(detail) => return Some(End::Broke(detail)),
        };
        let (said, came) = (usize::from(header.descriptors), descriptors.len());
        let brings = matches!(header.kind, Kind::Descriptors | Kind::Welcome);
        let cut = cut && brings;
        if (said != came && !cut) || (came > 0 && !brings) {
            return Some(End::Broke(format!("a frame ({}) that says {said} descriptors with {came}", header.kind.name())));
        }
        match header.kind {
            Kind::Goodbye => return Some(End::Left),
            Kind::Abort => match body.as_chunks() {
                (&[communicator, reason], []) if reason != [0; 4] => {
                    let [communicator, reason] = [communicator, reason].map(u32::from_le_bytes);
                    self.tell(Notice::Aborted { by: rank, communicator, reason });
                }
                _ => return Some(End::Broke("an abort without a communicator or a reason".to_owned())),
            },
            Kind::Depart => match body.as_chunks() {
                (&[communicator, last], []) => {
                    let [communicator, last] = [communicator, last].map(u32::from_le_bytes);
                    self.tell(Notice::Departed { by: rank, communicator, last: Epoch::new(last) });
                }
                _ => return Some(End::Broke("a departure without a communicator or a last call".to_owned())),
            },
            Kind::GaveUp => match GaveUp::decode(body) {
                Some(what) => self.tell(Notice::GaveUp { by: rank, what }),
                None => return Some(End::Broke("a frame that says in too many or too few bytes what was given up".to_owned())),
            },
            Kind::Ask => self.answer(rank, body),
            Kind::Reply => self.note_answer(rank, body),
            Kind::Join | Kind::Stopped | Kind::LeftOut | Kind::Welcome | Kind::Unable => {
                self.note_regroup(rank, header.kind, body, Sockets { came: descriptors, cut });
            }
            Kind::Exchange | Kind::Descriptors | Kind::Barrier => {
                let mut inbox = self.inbox();
                let frames = &mut inbox.peers[rank.index()].frames;
                if frames.len() == AHEAD {
                    return Some(End::Broke(format!("it runs ahead: {AHEAD} steps that this rank has not taken, and one more")));
                }
                frames.push_back(Arrived { kind: header.kind, sequence: header.sequence, body: body.to_vec(), descriptors, cut });
                self.changed.notify_all();
            }
        }
        None
    }
}
