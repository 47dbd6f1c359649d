//! Operands and buffers in host memory.

use super::error::ExecuteError;
use bytemuck::Zeroable;
use flux_core::problem::Shape;

/// An operand in host memory, row-major.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    /// From the first element of the first row to the last of the last.
    pub elements: &'a [T],
    /// Elements between the starts of two rows.
    pub stride: usize,
}

impl<'a, T> Rows<'a, T> {
    pub(super) fn row(self, row: usize, cols: usize) -> &'a [T] {
        &self.elements[row * self.stride..][..cols]
    }
}

/// The output in host memory, row-major.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    /// From the first element of the first row to the last of the last.
    pub elements: &'a mut [T],
    /// Elements between the starts of two rows.
    pub stride: usize,
}

/// A buffer of zeros; untouched ones take no memory.
fn zeroed<V: Zeroable>(what: &'static str, length: usize) -> Result<Vec<V>, ExecuteError> {
    bytemuck::allocation::try_zeroed_vec(length).map_err(|()| ExecuteError::OutOfMemory {
        what,
        bytes: length.saturating_mul(size_of::<V>()),
    })
}

/// Makes `buffer` at least `length` long. The old one goes first, so that both are never held.
pub(super) fn grow<V: Zeroable>(
    what: &'static str,
    buffer: &mut Vec<V>,
    length: usize,
) -> Result<(), ExecuteError> {
    if buffer.len() < length {
        *buffer = Vec::new();
        *buffer = zeroed(what, length)?;
    }
    Ok(())
}

/// Whether an operand of `have` elements holds its shape at its stride.
pub(super) fn fits(
    operand: &'static str,
    shape: Shape,
    have: usize,
    stride: usize,
) -> Result<(), ExecuteError> {
    let (rows, cols) = (shape.rows, shape.cols);
    let need = (rows as usize)
        .checked_sub(1)
        .map_or(0, |before_last| before_last.saturating_mul(stride).saturating_add(cols as usize));
    if stride < cols as usize || have < need {
        return Err(ExecuteError::Operand { operand, rows, cols, stride, need, have });
    }
    Ok(())
}
