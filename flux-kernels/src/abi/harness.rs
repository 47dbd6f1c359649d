//! The parameters of the kernels that make and check operands.

use super::mirrored;

/// How elements are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fill {
    /// Evenly over [-1, 1), 2^24 values before rounding.
    Uniform = 0,
    /// -1, 0 and 1 with probabilities 1/6, 2/3 and 1/6: sums are exact integers.
    SmallInts = 1,
}

impl Fill {
    /// Both, by their numbers.
    pub(crate) const ALL: [Self; 2] = [Self::Uniform, Self::SmallInts];
}

/// One above the largest of the random numbers that elements are made of.
pub const RAW_END: u32 = 1 << 24;

mirrored! {
    /// A window of a matrix that is filled.
    #[derive(Clone, Copy)]
    pub(crate) struct FillParams {
        /// First element.
        pub(crate) dst: u64,
        /// Elements between rows.
        pub(crate) row_stride: u64,
        pub(crate) seed: u64,
        /// The window's place in the global matrix.
        pub(crate) row0: u32,
        pub(crate) col0: u32,
        pub(crate) rows: u32,
        pub(crate) cols: u32,
        pub(crate) fill: u32,
        /// A `DType`.
        pub(crate) dtype: u32,
        /// Whether columns lie in the place of rows, `row_stride` from one to the next.
        pub(crate) transposed: u32,
    }
}

mirrored! {
    /// fp32 lines of all shards, which become those of each number side by side.
    #[derive(Clone, Copy)]
    pub(crate) struct InterleaveParams {
        /// `[shards, lines, cols]`.
        pub(crate) from: u64,
        /// `[lines, shards, cols]`.
        pub(crate) to: u64,
        pub(crate) shards: u32,
        pub(crate) lines: u32,
        pub(crate) cols: u32,
    }
}

mirrored! {
    /// Checks y\[i, j\] of a window against
    /// act(sum over c of x\[row0 + i, c\] * w\[col0 + j, c\] + bias\[col0 + j\] +
    /// residual\[row0 + i, col0 + j\]). Of gated weights the activated sum of a gate's row of `w`
    /// is multiplied by that of its up, each with its bias.
    #[derive(Clone, Copy)]
    pub(crate) struct VerifyParams {
        pub(crate) y: u64,
        /// Elements between rows.
        pub(crate) row_stride: u64,
        pub(crate) x_seed: u64,
        pub(crate) w_seed: u64,
        pub(crate) report: u64,
        /// Of a matrix of one row.
        pub(crate) bias_seed: u64,
        /// Of a matrix of all rows and columns.
        pub(crate) residual_seed: u64,
        pub(crate) row0: u32,
        pub(crate) col0: u32,
        pub(crate) rows: u32,
        pub(crate) cols: u32,
        pub(crate) k: u32,
        /// The inner product is summed in segments of this length, one for each rank.
        pub(crate) segment: u32,
        /// Segments with so many elements, the first ones.
        pub(crate) long_segments: u32,
        /// Elements that the others have less.
        pub(crate) segment_group: u32,
        /// Of `Scales`.
        pub(crate) scales: u32,
        /// Relative to the sum of magnitudes, the error of 8-bit operands beside that of fp32 sums.
        pub(crate) accumulation: f32 = "float accumulation",
        /// The rank whose partial sums are not rounded; no rank with flattened rows.
        pub(crate) own: u32,
        /// Rows of the largest shard, where each row has an owner in place of `own`; else 0.
        pub(crate) m_shard: u32,
        /// Shards with so many rows, the first ones.
        pub(crate) full_shards: u32,
        pub(crate) fill: u32,
        /// A `DType`: of `x` and `w`.
        pub(crate) operand: u32,
        /// A `DType`: of the others.
        pub(crate) output: u32,
        /// Whether there is a bias.
        pub(crate) bias: u32,
        /// Whether there is a residual.
        pub(crate) residual: u32,
        pub(crate) activation: u32,
        /// Whether rows of `w` are gates and ups.
        pub(crate) gated: u32,
        /// Rows of `w` from a gate to the next.
        pub(crate) gate_step: u32,
        /// Rows of `w` from a gate to its up.
        pub(crate) up_offset: u32,
        /// Segments of a node. A rank sends partial sums to the relay on the owner's rail, and each
        /// other node's relay sends the node's sum.
        pub(crate) per_node: u32,
        /// Whether partial sums are sent in fp32, and not rounded.
        pub(crate) f32_partials: u32,
        /// Additions that round to 16 bits, in any order: those of a library's ReduceScatter.
        pub(crate) rounded_additions: u32,
    }
}

mirrored! {
    /// What a verification found.
    #[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
    pub(crate) struct RawReport {
        pub(crate) violations: u64,
        /// Smallest row << 32 | column of a violation.
        pub(crate) first: u64,
        /// Bits of a float, not negative; so is the next.
        pub(crate) max_error: u32,
        pub(crate) max_reference: u32,
    }
}
