//! A rank's signals, and its workers that wait for them.
//!
//! Invariant: a worker waits only for what is not raised.

use super::worker::Worker;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Pad {
    raised: Vec<bool>,
    waiting: BTreeMap<u32, Vec<usize>>,
}

impl Pad {
    /// Of a rank whose program uses so many signals.
    pub(super) fn new(signals: u32) -> Self {
        Self { raised: vec![false; signals as usize], waiting: BTreeMap::new() }
    }

    pub(super) fn is_raised(&self, signal: u32) -> bool {
        self.raised[signal as usize]
    }

    /// The worker with this number waits.
    pub(super) fn wait(&mut self, signal: u32, worker: usize) {
        self.waiting.entry(signal).or_default().push(worker);
    }

    /// Raises the signal, and gives the workers that have waited for it.
    pub(super) fn raise(&mut self, signal: u32) -> Vec<usize> {
        self.raised[signal as usize] = true;
        self.waiting.remove(&signal).unwrap_or_default()
    }

    /// Of the workers that still wait, the one that comes first in the program.
    pub(super) fn first_waiting<'a>(&self, workers: &'a [Worker]) -> Option<&'a Worker> {
        self.waiting.values().flatten().map(|&worker| &workers[worker]).min_by_key(|worker| worker.item())
    }
}
