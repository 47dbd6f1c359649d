//! The parameters of the RMSNorm kernels.

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
    /// The same behind the addition of a residual to the rows, which lies like them.
    #[derive(Clone, Copy)]
    pub(crate) struct AddRmsNormParams {
        pub(crate) norm: RmsNormParams,
        pub(crate) residual: u64,
        /// A `DType`.
        pub(crate) dtype: u32,
    }
}
