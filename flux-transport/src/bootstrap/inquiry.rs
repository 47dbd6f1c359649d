//! Questions between ranks that are processes: what the others do, and whether all that they have
//! said was heard.
//!
//! Invariant: the monitor answers, so a rank answers whatever its other threads do. An answer
//! counts for the question whose number it bears, so a late one is never taken for that of a later
//! question, and questions of several communicators stand side by side: none waits for another.
//!
//! Whoever waits for what peers say decides that it has not come only after a last look at what
//! lies unread ([`Shared::wait`]): a process that was stopped finds its deadline over, and may
//! decide before its monitor has read what came in time.

use std::sync::{MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use flux_core::Rank;

use super::frame::{Header, Kind};
use super::monitor::{End, Inbox, Shared};
use super::plane::ProcessControl;
use super::socket;
use crate::bootstrap::control::{Answer, Answerer};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;

/// For an answer, which the monitor does not wait to send: who asks reads at once, or has gone on.
pub(super) const AT_ONCE: Duration = Duration::from_millis(5);
/// How long notices that are being handled are waited for.
const SETTLE: Duration = Duration::from_millis(100);
/// Most peers that are looked at for what they have sent.
const MAX_POLLED: usize = flux_core::rank::MAX_WORLD;

/// Who answers here, and this rank's own questions that stand.
#[derive(Default)]
pub(super) struct Inquiry {
    answerers: Vec<Weak<Answerer>>,
    /// Of the last question.
    number: u32,
    standing: Vec<Question>,
}

/// A question that somebody here waits for, and what has been answered.
struct Question {
    number: u32,
    answers: Vec<(Rank, Vec<u8>)>,
}

impl Question {
    fn answered_by(&self, rank: Rank) -> bool {
        self.answers.iter().any(|(answered, _)| *answered == rank)
    }
}

impl Inquiry {
    pub(super) fn answer_with(&mut self, answerer: Weak<Answerer>) {
        self.answerers.retain(|answerer| answerer.strong_count() > 0);
        self.answerers.push(answerer);
    }

    /// Opens a question, and returns its number.
    fn open(&mut self) -> u32 {
        self.number = self.number.wrapping_add(1);
        self.standing.push(Question { number: self.number, answers: Vec::new() });
        self.number
    }

    fn question(&mut self, number: u32) -> Option<&mut Question> {
        self.standing.iter_mut().find(|question| question.number == number)
    }

    /// Closes a question: its answers.
    fn close(&mut self, number: u32) -> Vec<(Rank, Vec<u8>)> {
        let at = self.standing.iter().position(|question| question.number == number);
        at.map(|at| self.standing.swap_remove(at).answers).unwrap_or_default()
    }
}

impl Shared {
    /// Sends one message; a peer that does not take it until the deadline does without.
    pub(super) fn say(&self, rank: Rank, kind: Kind, body: &[u8], deadline: Instant) {
        if let Err(error) = self.send(rank, kind, body, &[], deadline) {
            tracing::debug!(%rank, %error, "did not hear the {}", kind.name());
        }
    }

    /// Sends one message that is needed.
    pub(super) fn send(&self, rank: Rank, kind: Kind, body: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<(), Errno> {
        let descriptors = u8::try_from(fds.len()).unwrap_or(u8::MAX);
        let bytes = Header { kind, descriptors, sequence: 0 }.encode(body.len());
        let link = self.links.get(rank.index()).and_then(Option::as_ref).ok_or(Errno::PIPE)?;
        link.send(&[&bytes, body], fds, deadline)
    }

    /// The monitor's answer to a question: the number of the question, then what an answerer says.
    pub(super) fn answer(&self, asker: Rank, question: &[u8]) {
        let Some((number, communicator)) = question.split_first_chunk::<4>() else { return };
        let Ok(communicator) = communicator.try_into().map(u32::from_le_bytes) else { return };
        let answerers: Vec<_> = self.inbox().inquiry.answerers.iter().filter_map(Weak::upgrade).collect();
        if let Some(words) = answerers.iter().find_map(|answerer| answerer(communicator)) {
            self.say(asker, Kind::Said, &[&number[..], &words].concat(), Instant::now() + AT_ONCE);
        }
    }

    /// Keeps an answer to a question that stands.
    pub(super) fn note_answer(&self, rank: Rank, answer: &[u8]) {
        let Some((number, words)) = answer.split_first_chunk::<4>() else { return };
        let mut inbox = self.inbox();
        if let Some(question) = inbox.inquiry.question(u32::from_le_bytes(*number)).filter(|question| !question.answered_by(rank)) {
            question.answers.push((rank, words.to_vec()));
            self.changed.notify_all();
        }
    }

    /// Waits for a change, until the deadline. After that it returns once more, when what had come
    /// by then is handled, or after [`SETTLE`]; then `None`.
    pub(super) fn wait<'s>(&'s self, inbox: MutexGuard<'s, Inbox>, deadline: Instant, looked: &mut bool) -> Option<MutexGuard<'s, Inbox>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Some(self.changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0);
        }
        drop(inbox);
        if std::mem::replace(looked, true) {
            return None;
        }
        self.settle();
        Some(self.inbox())
    }

    /// Returns when the monitor has handled everything that had come, or after [`SETTLE`].
    pub(super) fn settle(&self) {
        self.settled(Instant::now() + SETTLE);
    }

    /// Whether the monitor has handled everything that had come, as soon as it has, by the
    /// deadline.
    pub(super) fn settled(&self, deadline: Instant) -> bool {
        let mut inbox = self.inbox();
        loop {
            // In this order: what is read no longer shows, but the monitor was busy before it read.
            let waiting = self.anything_to_read(|rank| inbox.peers[rank.index()].end.is_none());
            let left = deadline.saturating_duration_since(Instant::now());
            let settled = !waiting && !inbox.busy;
            if settled || left.is_zero() {
                return settled;
            }
            let look = left.min(Duration::from_millis(1));
            inbox = self.changed.wait_timeout(inbox, look).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether a peer's message lies unread, as far as can be told. Allocates nothing.
    fn anything_to_read(&self, open: impl Fn(Rank) -> bool) -> bool {
        let mut polled: [PollFd<'_>; MAX_POLLED] = std::array::from_fn(|_| PollFd::new(&self.stop, PollFlags::empty()));
        let mut count = 0;
        for (_, link) in self.peers().filter(|&(rank, _)| open(rank)).take(MAX_POLLED) {
            polled[count] = socket::readable(link);
            count += 1;
        }
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled[..count], Some(&none)) != Ok(0)
    }
}

impl ProcessControl {
    /// Asks every peer, and waits for the answers of those that can be.
    pub(super) fn question(&self, communicator: u32, deadline: Instant) -> Vec<Answer> {
        let answerers: Vec<_> = self.shared.inbox().inquiry.answerers.iter().filter_map(Weak::upgrade).collect();
        let own = answerers.iter().find_map(|answerer| answerer(communicator)).map_or(Answer::Silent, Answer::Said);
        let number = self.shared.inbox().inquiry.open();
        self.part(Kind::Ask, &[number.to_le_bytes(), communicator.to_le_bytes()].concat());
        let (mut inbox, mut looked) = (self.shared.inbox(), false);
        loop {
            let Inbox { peers, inquiry, .. } = &mut *inbox;
            let outstanding = inquiry.question(number).is_some_and(|question| {
                self.shared.peers().any(|(rank, _)| peers[rank.index()].end.is_none() && !question.answered_by(rank))
            });
            if !outstanding {
                break;
            }
            let Some(changed) = self.shared.wait(inbox, deadline, &mut looked) else {
                inbox = self.shared.inbox();
                break;
            };
            inbox = changed;
        }
        let mut answers = inbox.inquiry.close(number);
        let ends = &inbox.peers;
        let answer = |rank: Rank| match answers.iter().position(|(answered, _)| *answered == rank) {
            _ if rank == self.shared.rank => own.clone(),
            Some(at) => Answer::Said(answers.swap_remove(at).1),
            None => match ends[rank.index()].end {
                None => Answer::Silent,
                Some(End::Left) => Answer::Left,
                Some(End::Lost | End::Broke(_)) => Answer::Lost,
            },
        };
        self.world.ranks().map(answer).collect()
    }
}
