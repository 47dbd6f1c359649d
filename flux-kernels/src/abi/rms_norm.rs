//! The parameters of the kernels that work on finished rows.

use super::mirrored;

mirrored! {
    /// Rows and their normalised copies, of one length.
    #[derive(Clone, Copy)]
    pub(crate) struct RmsNormParams {
        pub(crate) y: u64,
        /// Bytes between its rows.
        pub(crate) y_row_bytes: u64,
        /// One element for each column.
        pub(crate) gain: u64,
        pub(crate) out: u64,
        /// Bytes between its rows.
        pub(crate) out_row_bytes: u64,
        /// Whole vectors.
        pub(crate) cols: u32,
        /// Added to the mean of squares.
        pub(crate) eps: f32 = "float eps",
    }
}

mirrored! {
    /// Rows of 16-bit elements, and where they go as E4M3 and scales.
    #[derive(Clone, Copy)]
    pub(crate) struct QuantizeParams {
        pub(crate) x: u64,
        /// Bytes between its rows.
        pub(crate) x_row_bytes: u64,
        /// One element for each column, of a norm; 0 for none.
        pub(crate) gain: u64,
        /// One number for all rows, which is read; with a group the first scale, which is written.
        pub(crate) scale: u64,
        /// Bytes from a row's scales to the next row's.
        pub(crate) scale_row_bytes: u64,
        /// Bytes from a group's scale to the next group's.
        pub(crate) scale_group_bytes: u64,
        pub(crate) out: u64,
        /// Bytes between its rows.
        pub(crate) out_row_bytes: u64,
        /// Whole vectors.
        pub(crate) cols: u32,
        /// Elements that share a scale of their own: a row, or 128; 0 for the given one.
        pub(crate) group: u32,
        /// Added to the mean of squares.
        pub(crate) eps: f32 = "float eps",
        /// Scales that are written of a row; zeros follow those of its groups.
        pub(crate) scales_of_row: u32,
    }
}

mirrored! {
    /// The epilogue of an unfused layer, whose rows of `y` are also normalised where there is a
    /// gain.
    #[derive(Clone, Copy)]
    pub(crate) struct UnfusedEpilogueParams {
        /// `cols` are those of `y`.
        pub(crate) norm: RmsNormParams,
        /// Rounded rows, which may be `y` where they have as many columns.
        pub(crate) sums: u64,
        /// Bytes between its rows.
        pub(crate) sums_row_bytes: u64,
        /// One element for each column of the sums; 0 for none.
        pub(crate) bias: u64,
        /// Lies like `y`; 0 for none.
        pub(crate) residual: u64,
        /// An `Activation`.
        pub(crate) activation: u32,
        /// Columns from a gate to the next; 0 without gates.
        pub(crate) gate_step: u32,
        /// Columns from a gate to its up.
        pub(crate) up_offset: u32,
        /// A `DType`.
        pub(crate) dtype: u32,
    }
}
