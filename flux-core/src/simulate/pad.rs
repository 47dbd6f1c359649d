//! A rank's signals and the workers that wait for them.
//!
//! Invariant: a worker waits only for a signal that is not raised.

use super::worker::Worker;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Pad {
    raised: Vec<bool>,
    waiting: BTreeMap<u32, Vec<usize>>,
}

impl Pad {
    /// The pad of a program with this many signals.
    pub(super) fn new(signals: u32) -> Self {
        Self { raised: vec![false; signals as usize], waiting: BTreeMap::new() }
    }

    pub(super) fn is_raised(&self, signal: u32) -> bool {
        self.raised[signal as usize]
    }

    /// Notes that a worker waits.
    pub(super) fn wait(&mut self, signal: u32, worker: usize) {
        self.waiting.entry(signal).or_default().push(worker);
    }

    /// Raises the signal, and returns the workers that waited for it.
    pub(super) fn raise(&mut self, signal: u32) -> Vec<usize> {
        self.raised[signal as usize] = true;
        self.waiting.remove(&signal).unwrap_or_default()
    }

    /// The waiting worker whose item is first in the program.
    pub(super) fn first_waiting<'a>(&self, workers: &'a [Worker]) -> Option<&'a Worker> {
        self.waiting
            .values()
            .flatten()
            .map(|&worker| &workers[worker])
            .min_by_key(|worker| worker.item())
    }
}
