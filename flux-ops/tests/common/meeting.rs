//! A barrier among ranks any of which may fail.

use super::lateness;
use super::launched::{Launched, launched};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Longer than any test has its ranks wait for each other, where no machine is late.
const LONGEST: Duration = Duration::from_mins(1);

/// As [`std::sync::Barrier`], which a rank that has panicked would leave the others in for ever.
#[derive(Debug)]
pub struct Meeting {
    ranks: usize,
    /// In all meetings so far.
    came: Mutex<usize>,
    all_came: Condvar,
    /// Where ranks are processes: their launch, and the number of this among its meetings.
    processes: Option<(&'static Launched, u32)>,
}

impl Meeting {
    /// Of the first `ranks` ranks; where they are processes, every one of the launch makes it.
    pub fn new(ranks: usize) -> Self {
        let processes = launched().map(|launch| (launch, launch.number()));
        Self { ranks, came: Mutex::new(0), all_came: Condvar::new(), processes }
    }

    /// Returns when all ranks have come.
    ///
    /// # Panics
    /// If one does not come.
    pub fn wait(&self) {
        let mut came = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        let all = (*came / self.ranks + 1) * self.ranks;
        *came += 1;
        if let Some((launch, number)) = self.processes {
            return launch
                .gather(&format!("meeting-{number}-{came}"), u32::try_from(self.ranks).unwrap());
        }
        self.all_came.notify_all();
        let (came, _) = self
            .all_came
            .wait_timeout_while(came, lateness::scaled(LONGEST), |came| *came < all)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(*came >= all, "a rank has not come: see why it failed");
    }
}
