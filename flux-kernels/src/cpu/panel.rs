//! Operands in fp32, and their product.
//!
//! Invariant: an item's product is one call of one routine on the same numbers, so it does not
//! depend on the worker that computes it.

use super::error::ExecuteError;
use super::operands::grow;
use crate::element::Element;
use flux_core::problem::Shape;
use flux_core::program::RowSource;
use std::ops::Range;

/// Where the rows of an operand come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PanelSource {
    pub(super) rows: RowSource,
    pub(super) outer: u32,
}

/// A row-major operand, converted in blocks of rows and steps along `k` when they are first used.
#[derive(Debug)]
pub(super) struct Panel {
    values: Vec<f32>,
    /// By row block, then step.
    ready: Vec<bool>,
    /// Marks in use.
    blocks: usize,
    /// Steps of a row.
    steps: usize,
    /// Rows and columns that are converted together.
    block: Shape,
    cols: usize,
    /// The source of the converted blocks.
    key: Option<PanelSource>,
}

impl Default for Panel {
    fn default() -> Self {
        let block = Shape { rows: 1, cols: 1 };
        let (values, ready) = (Vec::new(), Vec::new());
        Self { values, ready, blocks: 0, steps: 0, block, cols: 0, key: None }
    }
}

impl Panel {
    /// Makes room for an operand that is converted in blocks.
    pub(super) fn reserve(&mut self, operand: Shape, block: Shape) -> Result<(), ExecuteError> {
        let blocks =
            operand.rows.div_ceil(block.rows) as usize * operand.cols.div_ceil(block.cols) as usize;
        grow("marks of converted blocks", &mut self.ready, blocks)?;
        grow("a worker's rows of x in fp32", &mut self.values, operand.elements())
    }

    /// Takes these extents, for which there is room, and forgets the converted blocks.
    pub(super) fn open(&mut self, operand: Shape, block: Shape) {
        (self.block, self.cols, self.key) = (block, operand.cols as usize, None);
        self.steps = operand.cols.div_ceil(block.cols) as usize;
        self.blocks = operand.rows.div_ceil(block.rows) as usize * self.steps;
    }

    /// Bytes that are held.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.values[..]) + size_of_val(&self.ready[..])
    }

    /// These rows, the first of which begins a block, from the first column of `steps` on,
    /// converted within `steps`. Rows lie all of the operand's columns apart. For blocks that are
    /// not converted under this `key`, `source` gives columns of the `i`-th of the rows.
    pub(super) fn rows<'s, T: Element>(
        &mut self,
        key: PanelSource,
        rows: Range<usize>,
        steps: Range<usize>,
        source: impl Fn(usize, Range<usize>) -> &'s [T],
    ) -> &[f32] {
        if self.key != Some(key) {
            self.ready[..self.blocks].fill(false);
            self.key = Some(key);
        }
        let (block_rows, block_cols) = (self.block.rows as usize, self.block.cols as usize);
        let cols = steps.start * block_cols..self.cols.min(steps.end * block_cols);
        let values = &mut self.values[rows.start * self.cols..rows.end * self.cols];
        let first = rows.start / block_rows * self.steps;
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

/// Extents of a product, with the elements between rows of `a` and `b`, and of `c`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) ldk: usize,
    pub(super) ldc: usize,
}

/// `c[m, n] = a[m, k] * transpose(b[n, k])`, row-major.
pub(super) fn multiply(product: Product, a: &[f32], b: &[f32], c: &mut [f32]) {
    let Product { m, n, k, ldk, ldc } = product;
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
