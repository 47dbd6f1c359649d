//! State that threads share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic under the lock.
pub(crate) fn locked<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded is whole after every statement, or only dropped after a panic.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leaks one reference, so that `shared` is never freed while a device that was given up uses it.
pub(crate) fn keep<T: ?Sized>(shared: &Arc<T>) {
    let _ = Arc::into_raw(Arc::clone(shared));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_outlives_its_holders() {
        let shared = Arc::new(());
        let seen = Arc::downgrade(&shared);
        keep(&shared);
        drop(shared);
        assert!(seen.upgrade().is_some());
    }
}
