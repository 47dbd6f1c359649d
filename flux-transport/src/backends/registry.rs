//! What ranks of one process find each other's memory by.
//!
//! Invariant: keys are not 0 and are never reused. An entry keeps nothing alive.

use crate::sync::locked;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

pub(crate) struct Registry<T> {
    next: AtomicU64,
    entries: Mutex<BTreeMap<u64, Weak<T>>>,
}

impl<T> Registry<T> {
    pub(crate) const fn new() -> Self {
        Self { next: AtomicU64::new(1), entries: Mutex::new(BTreeMap::new()) }
    }

    pub(crate) fn next_key(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn insert(&self, key: u64, entry: &Arc<T>) {
        locked(&self.entries).insert(key, Arc::downgrade(entry));
    }

    pub(crate) fn find(&self, key: u64) -> Option<Arc<T>> {
        locked(&self.entries).get(&key).and_then(Weak::upgrade)
    }

    pub(crate) fn remove(&self, key: u64) {
        locked(&self.entries).remove(&key);
    }
}
