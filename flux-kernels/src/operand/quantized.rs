//! The form of rows as 8-bit operands.

use flux_core::Scales;
use flux_core::problem::Shape;

/// Rows of E4M3, with scales behind the codes of each row or apart; of 16 bits with
/// [`Scales::None`].
///
/// ```
/// use flux_core::Scales;
/// use flux_kernels::QuantizedRows;
/// let carried = QuantizedRows { scales: Scales::Block, apart: false };
/// // Three scales, in a whole cache line.
/// assert_eq!(carried.columns(384), 384 + 128);
/// let apart = QuantizedRows { apart: true, ..carried };
/// assert_eq!((apart.columns(384), apart.scales_apart(8, 384).rows), (384, 3));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantizedRows {
    /// What shares a scale.
    pub scales: Scales,
    /// Whether scales have memory of their own.
    pub apart: bool,
}

impl QuantizedRows {
    /// Columns of rows of `k` elements, the bytes of scales behind them among them.
    pub const fn columns(self, k: u32) -> u32 {
        if self.apart { k } else { k.saturating_add(self.scales.bytes_behind_row(k)) }
    }

    /// The scales of rows or blocks of `[rows, k]` elements in memory of their own: for each group
    /// of columns a row with a scale of each row. It has a column where there are no rows.
    pub fn scales_apart(self, rows: u32, k: u32) -> Shape {
        Shape { rows: self.scales.of_row(k), cols: rows.max(1) }
    }
}
