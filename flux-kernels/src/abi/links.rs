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

mirrored! {
    /// One side of an exchange of data between two devices, a vector of 16 bytes a thread.
    #[derive(Clone, Copy, Debug)]
    pub struct Exchange {
        /// Where the other device's data come: `buffers` of `bytes`, every bit set.
        pub mine: u64,
        /// The other device's `mine`.
        pub theirs: u64,
        /// Zeroed words of this device, one in 128 bytes for each CTA; 0 where data are their own
        /// flags.
        pub my_flags: u64 = "u32* my_flags",
        /// The other device's `my_flags`.
        pub their_flags: u64 = "u32* their_flags",
        /// Bytes of a round; a multiple of [`Links::CTA_BYTES`](crate::harness::Links::CTA_BYTES).
        pub bytes: u32,
        /// Buffers that rounds take in turn; even.
        pub buffers: u32,
        /// How often each side sends.
        pub rounds: u32,
        /// 0 on one side, 1 on the other.
        pub side: u32,
        /// Longest time in the kernel, in nanoseconds.
        pub deadline_ns: u64,
        /// A u64 of this device that receives the nanoseconds of all rounds but the first.
        pub elapsed: u64 = "u64* elapsed",
        /// A zeroed u64 of this device: 1 after a wrong word or the deadline.
        pub failed: u64 = "u64* failed",
    }
}
