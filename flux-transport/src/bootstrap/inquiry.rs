//! Questions between ranks that are processes: what the others do, and whether all that they have said was heard.
//!
//! Invariant: the monitor answers, so a rank answers whatever its other threads do. An answer counts for the question whose number it bears, so a late
//! one is never taken for that of a later question.

use std::sync::{PoisonError, Weak};
use std::time::{Duration, Instant};

use flux_core::Rank;

use super::frame::{Header, Kind};
use super::monitor::{End, Shared};
use super::plane::ProcessControl;
use super::socket;
use crate::control::{Answer, Answerer};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::BorrowedFd;

/// For an answer, which the monitor does not wait to send: who asks reads at once, or has gone on.
const AT_ONCE: Duration = Duration::from_millis(5);
/// How long notices that are being handled are waited for.
const SETTLE: Duration = Duration::from_millis(100);
/// Most peers that are looked at for what they have sent.
const MAX_POLLED: usize = flux_core::rank::MAX_WORLD;

/// Who answers here, and the answers to this rank's own question.
#[derive(Default)]
pub(super) struct Inquiry {
    answerers: Vec<Weak<Answerer>>,
    number: u32,
    answers: Vec<(Rank, Vec<u8>)>,
}

impl Inquiry {
    pub(super) fn answer_with(&mut self, answerer: Weak<Answerer>) {
        self.answerers.retain(|answerer| answerer.strong_count() > 0);
        self.answerers.push(answerer);
    }
}

impl Shared {
    /// Sends one message; a peer that does not take it until the deadline does without.
    pub(super) fn say(&self, rank: Rank, kind: Kind, body: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) {
        let descriptors = u8::try_from(fds.len()).unwrap_or(u8::MAX);
        let bytes = Header { kind, descriptors, sequence: 0 }.encode(body.len());
        let Some(link) = self.links.get(rank.index()).and_then(Option::as_ref) else { return };
        if let Err(error) = link.send(&[&bytes, body], fds, deadline) {
            tracing::debug!(%rank, %error, "did not hear the {}", kind.name());
        }
    }

    /// The monitor's answer to a question: the number of the question, then what an answerer says.
    pub(super) fn answer(&self, asker: Rank, question: &[u8]) {
        let Some((number, communicator)) = question.split_first_chunk::<4>() else { return };
        let Ok(communicator) = communicator.try_into().map(u32::from_le_bytes) else { return };
        let answerers: Vec<_> = self.inbox().inquiry.answerers.iter().filter_map(Weak::upgrade).collect();
        if let Some(words) = answerers.iter().find_map(|answerer| answerer(communicator)) {
            self.say(asker, Kind::Said, &[&number[..], &words].concat(), &[], Instant::now() + AT_ONCE);
        }
    }

    /// Keeps an answer to the question that stands.
    pub(super) fn note_answer(&self, rank: Rank, answer: &[u8]) {
        let Some((number, words)) = answer.split_first_chunk::<4>() else { return };
        let mut inbox = self.inbox();
        let answered = inbox.inquiry.answers.iter().any(|(answered, _)| *answered == rank);
        if u32::from_le_bytes(*number) == inbox.inquiry.number && !answered {
            inbox.inquiry.answers.push((rank, words.to_vec()));
            self.changed.notify_all();
        }
    }

    /// Returns when the monitor has handled everything that had come, or after [`SETTLE`].
    pub(super) fn settle(&self) {
        let deadline = Instant::now() + SETTLE;
        let mut inbox = self.inbox();
        loop {
            // In this order: what is read no longer shows, but the monitor was busy before it read.
            let waiting = self.anything_to_read(|rank| inbox.peers[rank.index()].end.is_none());
            let left = deadline.saturating_duration_since(Instant::now());
            if (!waiting && !inbox.busy) || left.is_zero() {
                return;
            }
            let look = left.min(Duration::from_millis(1));
            inbox = self.changed.wait_timeout(inbox, look).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether a peer's message lies unread. Allocates nothing.
    fn anything_to_read(&self, open: impl Fn(Rank) -> bool) -> bool {
        let mut polled: [PollFd<'_>; MAX_POLLED] = std::array::from_fn(|_| PollFd::new(&self.stop, PollFlags::empty()));
        let mut count = 0;
        for (_, link) in self.peers().filter(|&(rank, _)| open(rank)).take(MAX_POLLED) {
            polled[count] = socket::readable(link);
            count += 1;
        }
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled[..count], Some(&none)).is_ok_and(|ready| ready > 0)
    }
}

impl ProcessControl {
    /// Asks every peer, and waits for the answers of those that can be.
    pub(super) fn question(&self, communicator: u32, deadline: Instant) -> Vec<Answer> {
        let _one = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let mut inbox = self.shared.inbox();
        inbox.inquiry.number = inbox.inquiry.number.wrapping_add(1);
        inbox.inquiry.answers.clear();
        let number = inbox.inquiry.number;
        let own: Vec<_> = inbox.inquiry.answerers.iter().filter_map(Weak::upgrade).collect();
        drop(inbox);
        self.part(Kind::Ask, &[number.to_le_bytes(), communicator.to_le_bytes()].concat());
        let own = own.iter().find_map(|answerer| answerer(communicator)).map_or(Answer::Silent, Answer::Said);
        let mut inbox = self.shared.inbox();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let outstanding = self.shared.peers().any(|(rank, _)| {
                inbox.peers[rank.index()].end.is_none() && !inbox.inquiry.answers.iter().any(|(answered, _)| *answered == rank)
            });
            if !outstanding || left.is_zero() {
                break;
            }
            inbox = self.shared.changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let mut answers = std::mem::take(&mut inbox.inquiry.answers);
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
