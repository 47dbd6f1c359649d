//! The parameters of the kernel that hands out gathered rows.

use super::mirrored;

mirrored! {
    /// Rows of all shards, and where they lie: the own ones in `x`, the others in the gather
    /// buffer.
    #[derive(Clone, Copy)]
    pub(crate) struct GatheredRowsParams {
        pub(crate) x: u64,
        /// Bytes between its rows.
        pub(crate) x_row_bytes: u64,
        /// The gather buffer of even epochs.
        pub(crate) buffer: u64,
        /// Bytes from there to that of odd epochs.
        pub(crate) half_stride: u64,
        /// The word with the number of the next call.
        pub(crate) epoch: u64,
        pub(crate) out: u64,
        /// Bytes between its rows.
        pub(crate) out_row_bytes: u64,
        /// Bytes of a row, a multiple of 16.
        pub(crate) row_bytes: u64,
        /// Rows of the first shards.
        pub(crate) m_shard: u32,
        /// How many these are; the others have one row less.
        pub(crate) full_shards: u32,
        /// The own shard.
        pub(crate) rank: u32,
        /// Whether the buffer has all rows without gaps, and not a place of `m_shard` rows for each
        /// peer.
        pub(crate) flattened: u32,
    }
}
