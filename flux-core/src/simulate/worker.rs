//! A worker and where it is in its items.
//!
//! Invariant: worker `i` of `n` takes items `i`, `i + n`, ..., each when the one before is
//! finished.

use super::phases::Phase;
use crate::program::Await;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Worker {
    item: usize,
    phases: std::vec::IntoIter<Phase>,
    /// What it waits for, and since when.
    waits: Option<(Await, Duration)>,
}

impl Worker {
    /// At the beginning of its first item.
    pub(super) fn new(item: usize, phases: Vec<Phase>) -> Self {
        Self { item, phases: phases.into_iter(), waits: None }
    }

    /// The item that it is at.
    pub(super) const fn item(&self) -> usize {
        self.item
    }

    /// What it does next for it.
    pub(super) fn next_phase(&mut self) -> Option<Phase> {
        self.phases.next()
    }

    pub(super) const fn wait(&mut self, what: Await, now: Duration) {
        self.waits = Some((what, now));
    }

    pub(super) fn waits_for(&self) -> Option<Await> {
        self.waits.map(|(what, _)| what)
    }

    /// Ends its wait, if it had one, and says how long it was.
    pub(super) fn waited(&mut self, now: Duration) -> Duration {
        self.waits.take().map_or(Duration::ZERO, |(_, since)| now.saturating_sub(since))
    }
}
