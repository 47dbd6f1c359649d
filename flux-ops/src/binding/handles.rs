//! Values that other languages name by numbers.
//!
//! Invariant: a number names one value for as long as the process lives. A forked child neither
//! uses nor drops what its parent has made, so it sends no goodbye in its parent's name.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

/// A value of the process that made it.
#[derive(Debug)]
pub struct OfProcess<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> OfProcess<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self { process: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// The value.
    ///
    /// # Errors
    /// In a forked child: the number of the process that made it.
    pub fn get(&self) -> Result<&T, u32> {
        if self.is_here() { Ok(&self.value) } else { Err(self.process) }
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

type Values<T> = HashMap<u64, Arc<OfProcess<T>>>;

/// The values of one kind, by number.
#[derive(Debug)]
pub struct Handles<T>(RwLock<Option<Values<T>>>);

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Handles<T> {
    /// None.
    pub const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// A number that no value of the process has had.
    pub fn number() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Keeps a value under a number that is new.
    pub fn keep(&self, number: u64, value: T) {
        self.write().get_or_insert_default().insert(number, Arc::new(OfProcess::new(value)));
    }

    /// The value with this number, while it is kept.
    pub fn get(&self, number: u64) -> Option<Arc<OfProcess<T>>> {
        let values = self.0.read().unwrap_or_else(PoisonError::into_inner);
        values.as_ref()?.get(&number).map(Arc::clone)
    }

    /// Takes the value out. Whoever uses it meanwhile keeps it alive.
    pub fn remove(&self, number: u64) -> Option<Arc<OfProcess<T>>> {
        self.write().as_mut()?.remove(&number)
    }

    /// Takes all values out.
    pub fn remove_all(&self) -> Vec<Arc<OfProcess<T>>> {
        self.write().take().into_iter().flat_map(HashMap::into_values).collect()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<Values<T>>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
