//! Operands in fp32, and their product.
//!
//! Invariant: an item's product is one call of one routine on the same numbers, so it does not
//! depend on the worker that computes it.

use super::error::ExecuteError;
use super::operands::grow;
use crate::element::Element;
use flux_core::program::RowSource;
use std::ops::Range;

/// A row-major operand, converted in blocks of rows and steps along `k` when they are first used.
#[derive(Debug, Default)]
pub(super) struct Panel {
    values: Vec<f32>,
    /// By row block, then step.
    ready: Vec<bool>,
    /// Marks in use.
    blocks: usize,
    /// Steps of a row.
    steps: usize,
    /// Rows and columns.
    block: (usize, usize),
    cols: usize,
    /// The source of the converted blocks.
    key: Option<(RowSource, u32)>,
}

impl Panel {
    /// Makes room for `rows` of `cols`, converted in blocks of `block` rows and columns.
    pub(super) fn reserve(
        &mut self,
        (rows, cols): (usize, usize),
        block: (usize, usize),
    ) -> Result<(), ExecuteError> {
        grow(
            "marks of converted blocks",
            &mut self.ready,
            rows.div_ceil(block.0) * cols.div_ceil(block.1),
        )?;
        grow("a worker's rows of x in fp32", &mut self.values, rows * cols)
    }

    /// Takes these extents, for which there is room, and forgets the converted blocks.
    pub(super) fn open(&mut self, (rows, cols): (usize, usize), block: (usize, usize)) {
        (self.steps, self.block, self.cols, self.key) = (cols.div_ceil(block.1), block, cols, None);
        self.blocks = rows.div_ceil(block.0) * self.steps;
    }

    /// Bytes that are held.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.values[..]) + size_of_val(&self.ready[..])
    }

    /// The rows from `row`, which begins a block, from the first column of `steps` on, converted
    /// within `steps`. Rows lie all of the operand's columns apart. For blocks that are not
    /// converted under this `key`, `source` gives columns of the operand's row `row + i`.
    pub(super) fn rows<'s, T: Element>(
        &mut self,
        key: (RowSource, u32),
        (row, rows): (usize, usize),
        steps: Range<usize>,
        source: impl Fn(usize, Range<usize>) -> &'s [T],
    ) -> &[f32] {
        if self.key != Some(key) {
            self.ready[..self.blocks].fill(false);
            self.key = Some(key);
        }
        let cols = steps.start * self.block.1..self.cols.min(steps.end * self.block.1);
        let values = &mut self.values[row * self.cols..(row + rows) * self.cols];
        let first = row / self.block.0 * self.steps;
        let ready = &mut self.ready[first + steps.start..first + steps.end];
        if ready.contains(&false) {
            for (i, to) in values.chunks_exact_mut(self.cols).enumerate() {
                T::widen(source(i, cols.clone()), &mut to[cols.clone()]);
            }
            ready.fill(true);
        }
        &values[cols.start..]
    }
}

/// `c[m, n] = a[m, k] * transpose(b[n, k])`, row-major, with rows of `a` and `b` `ldk` apart and
/// rows of `c` `ldc` apart.
pub(super) fn multiply(
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: &[f32],
    ldk: usize,
    c: &mut [f32],
    ldc: usize,
) {
    assert!(m > 0 && n > 0 && ldc >= n && ldk >= k, "{m} x {n} in rows of {ldc}, {k} of {ldk}");
    assert!(
        a.len() >= (m - 1) * ldk + k
            && b.len() >= (n - 1) * ldk + k
            && c.len() >= (m - 1) * ldc + n
    );
    let (k_stride, ldc) = (ldk.cast_signed(), ldc.cast_signed());
    // SAFETY: a is read at i * ldk + p, b at j * ldk + p, and c is written at i * ldc + j, for i <
    // m, j < n, p < k. The assertions keep these within the slices. c is not read, as beta = 0.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.as_ptr(),
            k_stride,
            1,
            b.as_ptr(),
            1,
            k_stride,
            0.0,
            c.as_mut_ptr(),
            ldc,
            1,
        );
    }
}
