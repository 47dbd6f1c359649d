//! The parameters of the kernels that measure links.

use super::mirrored;

mirrored! {
    /// A copy in pieces through a ring of shared memory, by one thread of every CTA. Either range
    /// may be a peer's.
    #[derive(Clone, Copy, Debug)]
    pub struct BulkCopy {
        /// Destination; a multiple of 16.
        pub dst: u64,
        /// Source; a multiple of 16.
        pub src: u64,
        /// Bytes; a multiple of 16.
        pub bytes: u64,
        /// Bytes of a piece; a multiple of 16.
        pub piece: u32,
        /// Pieces in shared memory: at least 2, `piece * ring` at most
        /// [`Links::MAX_RING_BYTES`](crate::harness::Links::MAX_RING_BYTES).
        pub ring: u32,
    }
}

mirrored! {
    /// One side of an exchange of signals between two devices.
    #[derive(Clone, Copy, Debug)]
    pub struct PingPong {
        /// Zeroed word of this device.
        pub mine: u64 = "u32* mine",
        /// Zeroed word of the other device.
        pub theirs: u64 = "u32* theirs",
        /// How often each side answers.
        pub rounds: u32,
        /// 1 on the side that begins, 0 on the other.
        pub first: u32,
        /// Longest time in the kernel, in nanoseconds.
        pub deadline_ns: u64,
        /// A u64 of this device that receives the nanoseconds of all rounds but the first, 0 after
        /// the deadline.
        pub elapsed: u64 = "u64* elapsed",
    }
}
