//! Operands in fp32, and their product.
//!
//! Invariant: an element is converted once per call and worker, however many tiles read it; the product of a tile is one call of one
//! routine on the same numbers, so it does not depend on who computes it.

use crate::Element;

/// A row-major operand of which blocks of rows are converted when they are first used.
#[derive(Debug)]
pub(super) struct Panel {
    values: Vec<f32>,
    ready: Vec<bool>,
    block: usize,
    cols: usize,
    /// What the converted blocks belong to.
    key: Option<(u32, u32)>,
}

impl Panel {
    /// Room for `rows` of `cols`, converted `block` rows at a time.
    pub(super) fn new(rows: usize, cols: usize, block: usize) -> Self {
        Self { values: vec![0.0; rows * cols], ready: vec![false; rows.div_ceil(block)], block, cols, key: None }
    }

    /// Forgets what was converted.
    pub(super) fn reset(&mut self) {
        self.key = None;
    }

    /// Rows from `row`, which begins a block, dense. `source` gives the operand's row `row + i` for `i` below `rows`; it is asked where the block
    /// is not converted yet for this `key`.
    pub(super) fn rows<'s, T: Element>(&mut self, key: (u32, u32), row: usize, rows: usize, source: impl Fn(usize) -> &'s [T]) -> &[f32] {
        if self.key != Some(key) {
            self.ready.fill(false);
            self.key = Some(key);
        }
        let values = &mut self.values[row * self.cols..(row + rows) * self.cols];
        let ready = &mut self.ready[row / self.block];
        if !*ready {
            for (i, to) in values.chunks_exact_mut(self.cols).enumerate() {
                T::widen(source(i), to);
            }
            *ready = true;
        }
        values
    }
}

/// `c[m, n] = a[m, k] * transpose(b[n, k])`, all dense row-major but `c`, whose rows lie `ldc` apart.
pub(super) fn multiply(m: usize, n: usize, k: usize, a: &[f32], b: &[f32], c: &mut [f32], ldc: usize) {
    assert!(m > 0 && n > 0 && ldc >= n, "{m} x {n} in rows of {ldc}");
    assert!(a.len() >= m * k && b.len() >= n * k && c.len() >= (m - 1) * ldc + n);
    let (k_stride, ldc) = (k.cast_signed(), ldc.cast_signed());
    // SAFETY: with the strides given, a is read at i * k + p, b at j * k + p and c written at i * ldc + j for i < m, j < n, p < k: within the
    // slices, by the assertions above. beta = 0: c is not read.
    unsafe {
        matrixmultiply::sgemm(m, k, n, 1.0, a.as_ptr(), k_stride, 1, b.as_ptr(), 1, k_stride, 0.0, c.as_mut_ptr(), ldc, 1);
    }
}
