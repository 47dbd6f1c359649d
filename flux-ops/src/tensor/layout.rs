//! Extents of a row-major view.
//!
//! Invariant: a layout that passed [`Layout::check`] has its rows on 16-byte borders, of scales on
//! 4-byte borders, and spans less
//! than 2^40 bytes, the most that a bulk tensor load can address.

use super::TensorError;
use flux_core::ElementType;
use flux_core::numerics::VECTOR_BYTES;
use flux_core::problem::Shape;

/// Bytes by which the first element's address must be divisible.
pub(super) const ALIGNMENT: u64 = VECTOR_BYTES as u64;
/// Bytes that `rows * row_stride` elements stay below.
pub(super) const MAX_SPAN_BYTES: usize = 1 << 40;

/// Rows, columns and row stride of a row-major matrix, in elements.
///
/// ```
/// use flux_ops::Layout;
/// assert_eq!(Layout::from((4, 64)), Layout::dense(4, 64));
/// assert_eq!(Layout::from((64,)), Layout::dense(1, 64));
/// assert_eq!(Layout::from(flux_ops::Shape { rows: 4, cols: 64 }), Layout::dense(4, 64));
/// assert_eq!(Layout::strided(4, 64, 72).span(), 3 * 72 + 64);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Rows.
    pub rows: usize,
    /// Columns: consecutive elements of a row.
    pub cols: usize,
    /// Elements from the start of a row to the start of the next.
    pub row_stride: usize,
}

impl Layout {
    /// Rows that follow each other without a gap.
    pub const fn dense(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols }
    }

    /// Rows of `cols` elements that start `row_stride` elements apart.
    pub const fn strided(rows: usize, cols: usize, row_stride: usize) -> Self {
        Self { rows, cols, row_stride }
    }

    /// Elements from the first to the last, both included; zero for an empty layout. Saturates
    /// instead of overflowing.
    pub const fn span(&self) -> usize {
        match self.rows.checked_sub(1) {
            Some(before_last) if self.cols > 0 => {
                before_last.saturating_mul(self.row_stride).saturating_add(self.cols)
            }
            _ => 0,
        }
    }

    /// Whether a kernel can address this layout over `available` elements from `address` on.
    pub(super) fn check(
        &self,
        dtype: ElementType,
        address: u64,
        available: usize,
    ) -> Result<(), TensorError> {
        if self.cols == 0 {
            return Err(TensorError::Empty);
        }
        if self.row_stride < self.cols {
            return Err(TensorError::RowStrideShort {
                row_stride: self.row_stride,
                cols: self.cols,
            });
        }
        // Scales are read one by one.
        let alignment = match dtype {
            ElementType::Matrix(_) => ALIGNMENT,
            ElementType::F32 => size_of::<f32>() as u64,
        };
        let multiple = (alignment as usize / dtype.bytes()).max(1);
        if (self.cols, self.row_stride) == (1, 1) && self.rows > 1 && multiple > 1 {
            return Err(TensorError::Column { rows: self.rows });
        }
        let row_stride = self.row_stride;
        if !row_stride.is_multiple_of(multiple) {
            return Err(TensorError::RowStrideAlignment { row_stride, multiple });
        }
        let limit = MAX_SPAN_BYTES / dtype.bytes();
        if self.rows.saturating_mul(row_stride) >= limit {
            return Err(TensorError::TooLarge { rows: self.rows, row_stride, limit });
        }
        if self.span() > available {
            return Err(TensorError::TooShort { layout: *self, needed: self.span(), available });
        }
        // Without rows there is no memory.
        if self.rows == 0 {
            return Ok(());
        }
        if address == 0 {
            return Err(TensorError::Null);
        }
        if !address.is_multiple_of(alignment) {
            return Err(TensorError::Misaligned { address, alignment });
        }
        Ok(())
    }
}

impl From<(usize, usize)> for Layout {
    /// A dense `(rows, cols)`.
    fn from((rows, cols): (usize, usize)) -> Self {
        Self::dense(rows, cols)
    }
}

impl From<Shape> for Layout {
    /// A dense operand of this shape, as `op.problem()` gives those of one rank.
    fn from(shape: Shape) -> Self {
        Self::dense(shape.rows as usize, shape.cols as usize)
    }
}

impl From<(usize,)> for Layout {
    /// One row of `cols`: a vector.
    fn from((cols,): (usize,)) -> Self {
        Self::dense(1, cols)
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}, {}] with row stride {}", self.rows, self.cols, self.row_stride)
    }
}
