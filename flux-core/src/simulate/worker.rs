//! A worker and its progress.
//!
//! Invariant: worker `i` of `n` takes items `i`, `i + n`, ... one after another.

use super::phases::Phase;
use crate::program::Await;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Worker {
    item: usize,
    phases: std::vec::IntoIter<Phase>,
    /// The awaited signal, and the moment at which the wait began.
    waits: Option<(Await, Duration)>,
}

impl Worker {
    /// A worker at the first phase of an item.
    pub(super) fn new(item: usize, phases: Vec<Phase>) -> Self {
        Self { item, phases: phases.into_iter(), waits: None }
    }

    /// The index of its item.
    pub(super) const fn item(&self) -> usize {
        self.item
    }

    /// The next phase of its item.
    pub(super) fn next_phase(&mut self) -> Option<Phase> {
        self.phases.next()
    }

    pub(super) const fn wait(&mut self, what: Await, now: Duration) {
        self.waits = Some((what, now));
    }

    pub(super) fn awaited(&self) -> Option<Await> {
        self.waits.map(|(what, _)| what)
    }

    /// Ends a wait, and returns its length.
    pub(super) fn waited(&mut self, now: Duration) -> Duration {
        self.waits.take().map_or(Duration::ZERO, |(_, since)| now.saturating_sub(since))
    }
}
