//! State that threads share.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks a mutex, also after a panic under the lock.
pub(crate) fn locked<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded is whole after every statement, or only dropped after a panic.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change, at most so long, also after a panic under the lock.
pub(crate) fn wait_timeout<'g, T>(
    changed: &Condvar,
    state: MutexGuard<'g, T>,
    timeout: Duration,
) -> MutexGuard<'g, T> {
    changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0
}
