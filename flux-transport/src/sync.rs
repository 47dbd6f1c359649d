//! State that threads share.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
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

/// What threads that bring notices call, until it is closed: then none of them is in it.
#[derive(Debug)]
pub(crate) struct Listening<T>(RwLock<Option<Arc<T>>>);

impl<T> Listening<T> {
    pub(crate) fn new(listener: &Arc<T>) -> Arc<Self> {
        Arc::new(Self(RwLock::new(Some(Arc::clone(listener)))))
    }

    /// Calls it; `None` once it is closed.
    pub(crate) fn call<R>(&self, call: impl FnOnce(&T) -> R) -> Option<R> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(call)
    }

    /// Waits for calls in progress, which do not block; later ones find it closed.
    pub(crate) fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
