//! One 32-bit word that ranks, workers or devices share.
//!
//! Invariant: the protocol touches shared words through these four operations only, so their
//! orderings are its whole memory model. Only this file knows loom.

/// An atomic 32-bit word.
pub trait Word {
    /// Reads the word. Everything written before the [`store_release`](Self::store_release) or
    /// [`increment`](Self::increment) that it reads is then visible.
    fn load_acquire(&self) -> u32;

    /// Writes the word after all earlier writes.
    fn store_release(&self, value: u32);

    /// Adds 1, modulo 2^32, and returns the old value; acquire and release.
    fn increment(&self) -> u32;

    /// Writes `value` if the word is 0; whether it did. Acquire and release.
    fn claim(&self, value: u32) -> bool;
}

macro_rules! implement {
    ($($path:ident)::+) => {
        impl Word for $($path)::+::AtomicU32 {
            fn load_acquire(&self) -> u32 {
                self.load($($path)::+::Ordering::Acquire)
            }
            fn store_release(&self, value: u32) {
                self.store(value, $($path)::+::Ordering::Release);
            }
            fn increment(&self) -> u32 {
                self.fetch_add(1, $($path)::+::Ordering::AcqRel)
            }
            fn claim(&self, value: u32) -> bool {
                use $($path)::+::Ordering::{AcqRel, Acquire};
                self.compare_exchange(0, value, AcqRel, Acquire).is_ok()
            }
        }
    };
}

implement!(std::sync::atomic);
#[cfg(loom)]
implement!(loom::sync::atomic);
