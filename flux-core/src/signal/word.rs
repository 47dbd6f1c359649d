//! One 32-bit word that ranks, workers or devices share.
//!
//! Invariant: the protocol touches shared words through these four operations only, so their
//! orderings are the whole memory model that it needs. This is the one place that knows of loom.

/// An atomic 32-bit word.
pub trait Word {
    /// Reads the word. Everything its writer wrote before the
    /// [`store_release`](Self::store_release) or [`increment`](Self::increment) that is read is
    /// visible afterwards.
    fn load_acquire(&self) -> u32;

    /// Writes the word, after everything written before.
    fn store_release(&self, value: u32);

    /// Adds 1, modulo 2^32, and returns what was there; an acquire and a release in one.
    fn increment(&self) -> u32;

    /// Writes `value` if the word is 0, and says whether it did; an acquire and a release in one.
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
