//! How a worker waits: shortly at first, then giving its core away, until the deadline.
//!
//! Invariant: the clock of a wait starts at its first pause, so a word that is there at once costs
//! no reading of the clock.

use crossbeam::utils::Backoff;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Between looks at a word that is long in coming: ranks outnumber the cores of a machine without
/// GPUs, so a waiter that spun on would keep from running what it waits for.
const NAP: Duration = Duration::from_micros(50);

/// A pause for the waits of [`Protocol`](flux_core::signal::Protocol), which breaks once `deadline`
/// has passed in one wait.
pub(super) fn until(deadline: Duration) -> impl FnMut(u64) -> ControlFlow<()> {
    let (mut started, backoff) = (Instant::now(), Backoff::new());
    move |looks| {
        if looks == 1 {
            started = Instant::now();
            backoff.reset();
        } else if started.elapsed() >= deadline {
            return ControlFlow::Break(());
        }
        if backoff.is_completed() {
            std::thread::sleep(NAP);
        } else {
            backoff.snooze();
        }
        ControlFlow::Continue(())
    }
}
