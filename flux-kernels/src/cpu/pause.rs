//! How a worker waits: shortly at first, then giving its core away, until the deadline.
//!
//! Invariant: the clock of a wait starts at its first pause, so a word that is there at once costs no reading of the clock.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Looks at a word before the core is given away, and before the worker sleeps between looks: ranks outnumber the cores of a machine
/// without GPUs, so a waiter that spun on would keep from running what it waits for.
const SPINS: u64 = 64;
const YIELDS: u64 = 256;
const NAP: Duration = Duration::from_micros(50);

/// A pause for the waits of [`Protocol`](flux_core::signal::Protocol), which breaks once `deadline` has passed in one wait.
pub(super) fn until(deadline: Duration) -> impl FnMut(u64) -> ControlFlow<()> {
    let mut started = Instant::now();
    move |looks| {
        if looks == 1 {
            started = Instant::now();
        } else if started.elapsed() >= deadline {
            return ControlFlow::Break(());
        }
        match looks {
            0..SPINS => std::hint::spin_loop(),
            SPINS..YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
        ControlFlow::Continue(())
    }
}
