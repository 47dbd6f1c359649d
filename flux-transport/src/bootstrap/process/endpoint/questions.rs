//! Questions of this rank, and who answers those of its peers.

use crate::bootstrap::control::Answerer;
use flux_core::Rank;
use std::sync::Weak;

/// Who answers here, and this rank's open questions.
#[derive(Default)]
pub(crate) struct Questions {
    pub(crate) answerers: Vec<Weak<Answerer>>,
    number: u32,
    open: Vec<Question>,
}

/// A question that a thread of this rank waits for, and its answers so far.
pub(crate) struct Question {
    number: u32,
    pub(crate) answers: Vec<(Rank, Vec<u8>)>,
}

impl Question {
    pub(crate) fn answered_by(&self, rank: Rank) -> bool {
        self.answers.iter().any(|(answered, _)| *answered == rank)
    }
}

impl Questions {
    pub(crate) fn answer_with(&mut self, answerer: Weak<Answerer>) {
        self.answerers.retain(|answerer| answerer.strong_count() > 0);
        self.answerers.push(answerer);
    }

    /// Opens a question, and returns its number.
    pub(crate) fn open(&mut self) -> u32 {
        self.number = self.number.wrapping_add(1);
        self.open.push(Question { number: self.number, answers: Vec::new() });
        self.number
    }

    pub(crate) fn question(&mut self, number: u32) -> Option<&mut Question> {
        self.open.iter_mut().find(|question| question.number == number)
    }

    pub(crate) fn close(&mut self, number: u32) -> Vec<(Rank, Vec<u8>)> {
        let at = self.open.iter().position(|question| question.number == number);
        at.map(|at| self.open.swap_remove(at).answers).unwrap_or_default()
    }
}
