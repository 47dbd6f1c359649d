//! Operands of 8 bits with scales, as functions of seed and position.
//!
//! Invariant: [`scale`] equals its counterpart in `flux-kernels/cuda/harness/data.cuh`. A scale has
//! four significant bits and a code as many, so products of two dequantised elements are exact in
//! fp32. Scales of small integers keep sums integers.

use crate::harness::data::{self, Window};
use crate::harness::{Fill, Operands, elements};
use flux_core::numerics::SCALE_BLOCK;
use flux_core::{Rank, Scales};
use flux_kernels::{Element, F8E4M3};
use std::num::NonZeroUsize;

/// Makes another seed of an operand's: that of its scales.
const SCALE_SEED: u64 = 0x5CA1E5 << 32;

/// A scale by its place in the matrix of all ranks' scales.
fn scale(fill: Fill, seed: u64, row: u32, col: u32) -> f32 {
    let raw = data::raw(seed ^ SCALE_SEED, row, col);
    match fill {
        Fill::Uniform => (8 + raw % 8) as f32 / 16.0,
        Fill::SmallInts => 1.0 - 2.0 * (raw % 2) as f32,
    }
}

/// The scales of a rank's part of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartScales {
    form: Scales,
    fill: Fill,
    seed: u64,
    part: Window,
    /// Lines that share a scale of [`Scales::Block`].
    lines: u32,
    /// The rank whose part along `k` it is.
    source: u32,
}

impl PartScales {
    /// Of a window of the global `x`, a rank's part along `k`.
    pub(crate) fn of_x(operands: &Operands, part: Window, source: Rank) -> Self {
        Self::new(operands, operands.seed_x, part, source, 1)
    }

    /// Of a window of the global `w`, a rank's part along `k`.
    pub(crate) fn of_w(operands: &Operands, part: Window, source: Rank) -> Self {
        Self::new(operands, operands.seed_w, part, source, SCALE_BLOCK)
    }

    fn new(operands: &Operands, seed: u64, part: Window, source: Rank, lines: u32) -> Self {
        let problem = &operands.problem;
        let source = if problem.op().gathers() { 0 } else { source.get() };
        let (form, fill) = (problem.numerics().scales, operands.fill);
        Self { form, fill, seed, part, lines, source }
    }

    /// Of an element of the part.
    fn of(&self, line: u32, col: u32) -> f32 {
        let Window { row0, col0, .. } = self.part;
        let (line, block) = match self.form {
            Scales::None => return 1.0,
            Scales::Tensor => (0, self.source),
            Scales::Row => (row0 + line, self.source),
            Scales::Block => ((row0 + line) / self.lines, (col0 + col) / SCALE_BLOCK),
        };
        scale(self.fill, self.seed, line, block)
    }

    /// First lines and first columns of what has a scale of its own.
    fn firsts(&self) -> (std::iter::StepBy<std::ops::Range<u32>>, u32) {
        let Window { rows, cols, .. } = self.part;
        let (line_step, col_step) = match self.form {
            Scales::None | Scales::Tensor => (rows.max(1), cols),
            Scales::Row => (1, cols),
            Scales::Block => (self.lines, SCALE_BLOCK),
        };
        ((0..rows.max(1)).step_by(line_step as usize), col_step)
    }

    /// As ops take them, line by line.
    pub(crate) fn list(&self) -> Vec<f32> {
        let (lines, step) = self.firsts();
        let cols = self.part.cols;
        lines
            .flat_map(|line| (0..cols).step_by(step as usize).map(move |col| self.of(line, col)))
            .collect()
    }

    /// As cuBLASLt takes them: of 1 x 128 elements those of a block of columns side by side, of
    /// 128 x 128 those of 128 rows, padded to a multiple of four.
    pub(crate) fn list_of_cublas(&self) -> Vec<f32> {
        let (rows, cols) = (self.part.rows, self.part.cols);
        if self.form != Scales::Block {
            return self.list();
        }
        if self.lines == 1 {
            let blocks = (0..cols).step_by(SCALE_BLOCK as usize);
            return blocks.flat_map(|col| (0..rows).map(move |line| self.of(line, col))).collect();
        }
        let (lines, _) = self.firsts();
        let padded = cols.div_ceil(SCALE_BLOCK).next_multiple_of(4);
        let of_line = |line| {
            (0..padded).map(move |block| {
                let col = block * SCALE_BLOCK;
                if col < cols { self.of(line, col) } else { 0.0 }
            })
        };
        lines.flat_map(of_line).collect()
    }

    /// The dequantised elements of the part, of type `X`.
    pub(crate) fn dequantised<X: Element>(&self) -> Vec<f32> {
        let mut narrow = vec![X::from_f32(0.0); elements(self.part)];
        data::fill(&mut narrow, self.part, self.seed, self.fill);
        let mut wide = vec![0.0; narrow.len()];
        X::widen(&narrow, &mut wide);
        if self.form != Scales::None {
            for (line, row) in (0..).zip(wide.chunks_exact_mut(self.part.cols as usize)) {
                for (block, part) in (0..).zip(row.chunks_mut(SCALE_BLOCK as usize)) {
                    let scale = self.of(line, block * SCALE_BLOCK);
                    part.iter_mut().for_each(|element| *element *= scale);
                }
            }
        }
        wide
    }

    /// The part's codes, and behind those of each line `behind` more: its scales, then zeros.
    pub(crate) fn codes(&self, behind: usize) -> Vec<F8E4M3> {
        let wide = self.part.cols as usize + behind;
        let mut all = vec![F8E4M3::from_bits(0); self.part.rows as usize * wide];
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let rows = (self.part.rows as usize).div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (first, lines) in (0..).step_by(rows).zip(all.chunks_mut(rows * wide)) {
                scope.spawn(move || {
                    for (line, to) in (first..).zip(lines.chunks_exact_mut(wide)) {
                        self.write_line(line, to);
                    }
                });
            }
        });
        all
    }

    fn write_line(&self, line: u32, to: &mut [F8E4M3]) {
        let cols = self.part.cols;
        let (codes, behind) = to.split_at_mut(cols as usize);
        let row = Window { row0: self.part.row0 + line, rows: 1, ..self.part };
        data::fill(codes, row, self.seed, self.fill);
        let (_, step) = self.firsts();
        let scales =
            (0..cols).step_by(step as usize).flat_map(|col| self.of(line, col).to_le_bytes());
        for (to, byte) in behind.iter_mut().zip(scales) {
            *to = F8E4M3::from_bits(byte);
        }
    }
}
