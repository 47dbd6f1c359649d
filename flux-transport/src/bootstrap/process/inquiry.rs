//! Questions between processes: what a rank is doing.
//!
//! Invariant: the monitor answers, whatever other threads do. An answer counts for the question
//! with its number only.
//!
//! A rank decides that an answer has not come only after a last look at unread messages
//! ([`Endpoint::wait`]): a process that was stopped finds its deadline over.

use super::endpoint::{Endpoint, Inbox, PeerEnd};
use super::frame::Kind;
use crate::bootstrap::control::Answer;
use flux_core::Rank;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// For an answer, which the monitor does not wait to send: who asks reads at once, or has gone on.
pub(crate) const AT_ONCE: Duration = Duration::from_millis(5);

impl Endpoint {
    /// The monitor's answer to a question: the number of the question, then what an answerer says.
    pub(crate) fn answer(&self, asker: Rank, question: &[u8]) {
        let Some((number, communicator)) = question.split_first_chunk::<4>() else { return };
        let Ok(communicator) = communicator.try_into().map(u32::from_le_bytes) else { return };
        let answerers: Vec<_> =
            self.inbox().questions.answerers.iter().filter_map(Weak::upgrade).collect();
        if let Some(words) = answerers.iter().find_map(|answerer| answerer(communicator)) {
            self.say(asker, Kind::Reply, &[&number[..], &words].concat(), Instant::now() + AT_ONCE);
        }
    }

    /// Keeps an answer to a question that stands.
    pub(crate) fn note_answer(&self, rank: Rank, answer: &[u8]) {
        let Some((number, words)) = answer.split_first_chunk::<4>() else { return };
        let mut inbox = self.inbox();
        if let Some(question) = inbox
            .questions
            .question(u32::from_le_bytes(*number))
            .filter(|question| !question.answered_by(rank))
        {
            question.answers.push((rank, words.to_vec()));
            self.changed.notify_all();
        }
    }

    /// Asks every peer, and waits for the answers of those that can be.
    pub(crate) fn ask(&self, communicator: u32, deadline: Instant) -> Vec<Answer> {
        let answerers: Vec<_> =
            self.inbox().questions.answerers.iter().filter_map(Weak::upgrade).collect();
        let own = answerers
            .iter()
            .find_map(|answerer| answerer(communicator))
            .map_or(Answer::Silent, Answer::Reply);
        let number = self.inbox().questions.open();
        self.part(Kind::Ask, &[number.to_le_bytes(), communicator.to_le_bytes()].concat());
        let (mut inbox, mut looked) = (self.inbox(), false);
        loop {
            let Inbox { peers, questions, .. } = &mut *inbox;
            let outstanding = questions.question(number).is_some_and(|question| {
                self.peers().any(|(rank, _)| {
                    peers[rank.index()].end.is_none() && !question.answered_by(rank)
                })
            });
            if !outstanding {
                break;
            }
            let Some(changed) = self.wait(inbox, deadline, &mut looked) else {
                inbox = self.inbox();
                break;
            };
            inbox = changed;
        }
        let mut answers = inbox.questions.close(number);
        let ends = &inbox.peers;
        let answer = |rank: Rank| match answers.iter().position(|(answered, _)| *answered == rank) {
            _ if rank == self.rank => own.clone(),
            Some(at) => Answer::Reply(answers.swap_remove(at).1),
            None => match ends[rank.index()].end {
                None => Answer::Silent,
                Some(PeerEnd::Left) => Answer::Left,
                Some(PeerEnd::Lost | PeerEnd::Broke(_)) => Answer::Lost,
            },
        };
        (0..).map(Rank::new).take(self.links.len()).map(answer).collect()
    }
}
