//! A barrier among ranks any of which may fail.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Longer than any test has its ranks wait for each other.
const LONGEST: Duration = Duration::from_mins(1);

/// As [`std::sync::Barrier`], which a rank that has panicked would leave the others in for ever.
#[derive(Debug)]
pub struct Meeting {
    ranks: usize,
    /// In all meetings so far.
    came: Mutex<usize>,
    all_came: Condvar,
}

impl Meeting {
    pub fn new(ranks: usize) -> Self {
        Self { ranks, came: Mutex::new(0), all_came: Condvar::new() }
    }

    /// Returns when all ranks have come.
    ///
    /// # Panics
    /// If one does not come.
    pub fn wait(&self) {
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let all = (*came / self.ranks + 1) * self.ranks;
        *came += 1;
        self.all_came.notify_all();
        let (came, _) = self.all_came.wait_timeout_while(came, LONGEST, |came| *came < all).unwrap_or_else(PoisonError::into_inner);
        assert!(*came >= all, "a rank has not come: see why it failed");
    }
}
