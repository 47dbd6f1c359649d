//! Whether this rank's process was paused: stopped by a signal or a debugger, or not scheduled.
//!
//! Invariant: the watchdog looks every few milliseconds from the first call on. A longer time
//! between two looks is one in which no thread of the process has served its messages.

use crate::sync::locked;
use flux_core::signal::Epoch;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The shortest pause that counts: a look that finds an error of NCCL's may take as long.
const LEAST: Duration = Duration::from_secs(1);

/// The last pause of a process.
#[derive(Debug)]
pub(super) struct Pause {
    /// How long one is that peers' waits may fail by.
    least: Duration,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    looked: Instant,
    paused_in: Option<Epoch>,
}

impl Pause {
    /// Where peers' waits have this deadline. A pause of half of it leaves too little for the rest.
    pub(super) fn new(deadline: Duration) -> Self {
        let seen = Seen { looked: Instant::now(), paused_in: None };
        Self { least: (deadline / 2).max(LEAST), seen: Mutex::new(seen) }
    }

    /// Looks at `now`, when `made` is the last call that was made. The last call that had been made
    /// at the last pause, this one included; whoever looks first after a pause finds it.
    pub(super) fn look(&self, made: Epoch, now: Instant) -> Option<Epoch> {
        let Seen { looked, paused_in } = &mut *locked(&self.seen);
        if now.saturating_duration_since(*looked) >= self.least {
            *paused_in = Some(made);
        }
        *looked = now.max(*looked);
        *paused_in
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_did_not_look_for_half_the_deadline_was_paused_in_its_last_call() {
        let (pause, start) = (Pause::new(4 * LEAST), Instant::now());
        let look = |made, after: Duration| pause.look(Epoch::new(made), start + after);
        assert_eq!(look(7, Duration::from_millis(2)), None);
        assert_eq!(look(7, LEAST), None, "a quarter of the deadline");
        assert_eq!(look(8, 4 * LEAST), Some(Epoch::new(8)));
        assert_eq!(look(9, 4 * LEAST), Some(Epoch::new(8)));
        // Another thread has looked meanwhile.
        assert_eq!(look(9, 3 * LEAST), Some(Epoch::new(8)));
        assert_eq!(look(9, 5 * LEAST), Some(Epoch::new(8)));
    }
}
