//! The time stamps of a traced call: nanoseconds of one GPU's `%globaltimer`, which ticks every
//! 32 ns or so, or of the process's monotonic clock. Only differences on one GPU, or in one
//! process, mean anything.

use super::mirrored;
use bytemuck::{Pod, Zeroable};

mirrored! {
    /// Ends of one item's phases, in nanoseconds. The phases of one role follow one another, those
    /// of two roles overlap; a worker of the CPU executor has all roles in turn. Consumers of the
    /// portable kernel leave zeros for its largest tiles, of 256x128 and 128x256, where partial
    /// sums leave in fp32.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
    pub struct ItemStamps {
        /// Producer: it began the item, before any wait.
        pub opened: u64,
        /// Producer: the peers' rows that the item awaits had arrived, and the loads beside the
        /// wait were issued.
        pub rows_there: u64,
        /// Producer: the last load of operands was issued.
        pub loaded: u64,
        /// Producer: the peers' partial tiles had arrived; 0 for an item that adds none. Consumer:
        /// the scattered rows that the item adds had arrived.
        pub partials_there: u64,
        /// Consumer: the accumulators were final.
        pub multiplied: u64,
        /// Consumer: the peers' partial tiles were added; for an item that adds none, as
        /// `multiplied`.
        pub summed: u64,
        /// Consumer: the rounded result was in the staging buffer, for which it may have waited.
        /// Of scattered rows: it was stored, and raised as signal where peers await it.
        pub written: u64,
        /// Storer: the staging buffer was read. For an item that is sent to a peer, the write was
        /// complete and its chunk's signal, if due, raised.
        pub sent: u64,
    }
}

mirrored! {
    /// One worker's life, in nanoseconds. A thread of the host has no multiprocessor, and pushes
    /// nothing.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
    pub struct WorkerStamps {
        /// It began.
        pub entered: u64,
        /// All of its roles had ended; of the portable kernel, its consumers.
        pub left: u64,
        /// The multiprocessor that it ran on.
        pub multiprocessor: u32,
        /// Not used.
        pub reserved: u32,
        /// Mover: its first piece was stored. This and the next are 0 where the kernel pushes
        /// nothing.
        pub push_begun: u64,
        /// Mover: its pieces of the first chunk were at the readers.
        pub first_delivered: u64,
        /// Mover: its pieces of the last chunk, if not the first, were at the readers.
        pub last_delivered: u64,
        /// Signal poller: the first awaited rows of peers had arrived; 0 where it awaited none.
        pub first_rows: u64,
    }
}

/// What a call recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stamps {
    /// By item, in program order.
    pub items: Vec<ItemStamps>,
    /// By worker; worker `i` of `n` took the items `i`, `i + n`, ... in order.
    pub workers: Vec<WorkerStamps>,
}
