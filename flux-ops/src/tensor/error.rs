//! Why memory cannot be viewed as an operand.

use super::Layout;
use flux_core::{ElementType, Scales};

/// Why a view of memory cannot be an operand; each names the value and the limit.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// A view without columns.
    #[error("cols = 0: a view has at least one column")]
    Empty,
    /// Rows overlap each other.
    #[error("row stride {row_stride} is below the {cols} columns of a row: rows would overlap")]
    RowStrideShort {
        /// Elements between rows.
        row_stride: usize,
        /// Elements of a row.
        cols: usize,
    },
    /// A dense column, whose rows of one element do not start on 16-byte borders.
    #[error(
        "a view of [{rows}, 1] is a column, whose rows would have to lie 16 bytes apart: a bias is \
         one row, use ({rows},)"
    )]
    Column {
        /// Rows.
        rows: usize,
    },
    /// Rows do not start on 16-byte borders.
    #[error(
        "row stride {row_stride} is not a multiple of {multiple} elements (16 bytes): pad the \
         rows or copy to a dense tensor"
    )]
    RowStrideAlignment {
        /// Elements between rows.
        row_stride: usize,
        /// Elements of 16 bytes.
        multiple: usize,
    },
    /// The view is beyond what bulk tensor loads address.
    #[error("{rows} rows of stride {row_stride} are not below the limit of {limit} elements")]
    TooLarge {
        /// Rows.
        rows: usize,
        /// Elements between rows.
        row_stride: usize,
        /// Elements of 2^40 bytes.
        limit: usize,
    },
    /// There is less memory than the layout says.
    #[error("a view of {layout} needs {needed} elements, but the memory behind it has {available}")]
    TooShort {
        /// What was asked for.
        layout: Layout,
        /// Elements from its first to its last.
        needed: usize,
        /// Elements that are there.
        available: usize,
    },
    /// The pointer is null.
    #[error("the pointer is null: an operand needs memory")]
    Null,
    /// The first element is not on a border of 16 bytes, of scales of 4.
    #[error(
        "address {address:#x} is not a multiple of {alignment} bytes: start the view on a \
         {alignment}-byte border"
    )]
    Misaligned {
        /// The address.
        address: u64,
        /// Its divisor.
        alignment: u64,
    },
    /// Rows of 8-bit elements do not hold their scales.
    #[error(
        "rows of {cols} elements hold no {k} elements and the scales behind them: {scales} scales \
         need {needed} bytes a row, and k a multiple of 4"
    )]
    NoScales {
        /// Elements of a row.
        cols: usize,
        /// Elements that are no scales.
        k: usize,
        /// Elements of a row that are needed.
        needed: usize,
        /// The form of the scales.
        scales: Scales,
    },
    /// There are no such addresses.
    #[error(
        "address {address:#x}: the {bytes} bytes of a view from there on end beyond the last \
         address"
    )]
    BeyondAddresses {
        /// The address.
        address: u64,
        /// Bytes from the view's first element to its last.
        bytes: u64,
    },
    /// The memory holds another element type than the view.
    #[error(
        "the memory holds {found}, the view is of {expected}: convert it, or use the op of that \
         element type"
    )]
    DType {
        /// Element type of the view.
        expected: ElementType,
        /// Element type that the description of the memory names.
        found: ElementType,
    },
}

flux_core::debug_is_text!(TensorError);
