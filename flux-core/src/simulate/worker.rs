//! A worker and its progress.
//!
//! Invariant: worker `i` of `n` takes items `i`, `i + n`, ... one after another.

use super::phases::Phase;
use crate::program::Await;

#[derive(Debug)]
pub(super) struct Worker {
    item: usize,
    phases: std::vec::IntoIter<Phase>,
    /// The awaited signal.
    waits: Option<Await>,
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

    pub(super) const fn wait(&mut self, what: Await) {
        self.waits = Some(what);
    }

    pub(super) const fn awaited(&self) -> Option<Await> {
        self.waits
    }

    /// Ends a wait.
    pub(super) const fn resume(&mut self) {
        self.waits = None;
    }
}
