//! State that threads share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic under the lock.
pub(crate) fn locked<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded is whole after every statement, or only dropped after a panic.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
