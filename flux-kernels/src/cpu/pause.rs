//! Pauses of a waiting worker: short at first, then sleeps, until the deadline.
//!
//! Invariant: the clock of a wait starts at its first pause, so a signal that has arrived costs no
//! reading of it.

use crossbeam_utils::Backoff;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Sleep between polls of a late signal. Ranks outnumber the cores of a machine without GPUs, so a
/// spinning waiter would keep others from raising the signal.
const NAP: Duration = Duration::from_micros(50);

/// A pause for the waits of [`Protocol`](flux_core::signal::Protocol). It breaks when one wait has
/// lasted `deadline`.
pub(super) fn until(deadline: Duration) -> impl FnMut(u64) -> ControlFlow<()> {
    let (mut started, backoff) = (None, Backoff::new());
    move |looks| {
        if looks == 1 {
            started = None;
            backoff.reset();
        }
        if started.get_or_insert_with(Instant::now).elapsed() >= deadline {
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
