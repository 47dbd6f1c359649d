//! Operands with their scales, as functions of seed and position.
//!
//! Invariant: `scale` equals its counterpart in `cuda/harness/data.cuh`. A scale has four
//! significant bits and a code of 8 bits as many, so products of two dequantised elements are exact
//! in fp32. Scales of small integers keep sums integers.

use super::Fill;
use super::data::{self, Window, elements};
use crate::Element;
use flux_core::numerics::SCALE_BLOCK;
use flux_core::{DType, Numerics, Problem, Rank, Scales};
use std::num::NonZeroUsize;

/// Makes another seed of an operand's: that of its scales.
const SCALE_SEED: u64 = 0x005C_A1E5 << 32;

/// A scale by its place in the matrix of all ranks' scales.
fn scale(fill: Fill, seed: u64, row: u32, col: u32) -> f32 {
    let raw = data::raw(seed ^ SCALE_SEED, row, col);
    match fill {
        Fill::Uniform => (8 + raw % 8) as f32 / 16.0,
        Fill::SmallInts => 1.0 - 2.0 * (raw % 2) as f32,
    }
}

/// How the elements of a global operand are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generator {
    /// What they are.
    pub fill: Fill,
    /// Of the operand.
    pub seed: u64,
}

/// Where the scales of a part lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleLayout {
    /// Elements from a row of scales to the next, or from a column that lies in its place.
    pub stride: u32,
    /// Whether columns lie one after the other in place of rows.
    pub transposed: bool,
    /// Elements of all, those between rows included.
    pub elements: usize,
}

impl ScaleLayout {
    /// Of one row after the other.
    const fn rows(rows: u32, stride: u32) -> Self {
        Self { stride, transposed: false, elements: rows as usize * stride as usize }
    }
}

/// A window of a global operand that is a rank's along `k`, with its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    dtype: DType,
    form: Scales,
    generator: Generator,
    window: Window,
    /// Rows that share a scale of [`Scales::Block`].
    rows: u32,
    /// The rank whose part along `k` it is.
    source: u32,
}

impl Part {
    /// Of the global `x`, `[m, k]`.
    pub const fn of_x(
        problem: &Problem,
        generator: Generator,
        window: Window,
        source: Rank,
    ) -> Self {
        Self::new(problem, generator, window, source, 1)
    }

    /// Of the global `w`, `[n, k]`.
    pub const fn of_w(
        problem: &Problem,
        generator: Generator,
        window: Window,
        source: Rank,
    ) -> Self {
        Self::new(problem, generator, window, source, SCALE_BLOCK)
    }

    const fn new(
        problem: &Problem,
        generator: Generator,
        window: Window,
        source: Rank,
        rows: u32,
    ) -> Self {
        let source = if problem.op().gathers() { 0 } else { source.get() };
        let Numerics { operand: dtype, scales: form, .. } = problem.numerics();
        Self { dtype, form, generator, window, rows, source }
    }

    /// The type of its elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The window of the operand.
    pub const fn window(&self) -> Window {
        self.window
    }

    /// How its elements are made.
    pub const fn generator(&self) -> Generator {
        self.generator
    }

    /// Its scales as a window of the matrix of all ranks' scales.
    pub const fn scale_window(&self) -> Window {
        let Window { row0, col0, rows, cols } = self.window;
        match self.form {
            Scales::None => Window { row0: 0, col0: 0, rows: 0, cols: 0 },
            Scales::Tensor => Window { row0: 0, col0: self.source, rows: 1, cols: 1 },
            Scales::Row => Window { row0, col0: self.source, rows, cols: 1 },
            Scales::Block => Window {
                row0: row0 / self.rows,
                col0: col0 / SCALE_BLOCK,
                rows: rows.div_ceil(self.rows),
                cols: cols.div_ceil(SCALE_BLOCK),
            },
        }
    }

    /// Of an element.
    fn of(&self, line: u32, col: u32) -> f32 {
        let Window { row0, col0, .. } = self.scale_window();
        let (line, col) = match self.form {
            Scales::None => return 1.0,
            Scales::Tensor => (0, 0),
            Scales::Row => (line, 0),
            Scales::Block => (line / self.rows, col / SCALE_BLOCK),
        };
        scale(self.generator.fill, self.generator.seed, row0 + line, col0 + col)
    }

    /// Where ops read the scales: row by row.
    pub const fn layout(&self) -> ScaleLayout {
        let Window { rows, cols, .. } = self.scale_window();
        ScaleLayout::rows(rows, cols)
    }

    /// Where cuBLASLt reads them. Those of 1 x 128 elements lie side by side for a block of columns.
    /// Those of 128 x 128 lie side by side for 128 rows, padded to a multiple of four.
    pub const fn layout_of_cublas(&self) -> ScaleLayout {
        let Window { rows, cols, .. } = self.scale_window();
        match (self.form, self.rows) {
            (Scales::Block, 1) => ScaleLayout { transposed: true, ..ScaleLayout::rows(cols, rows) },
            (Scales::Block, _) => ScaleLayout::rows(rows, cols.next_multiple_of(4)),
            _ => self.layout(),
        }
    }

    /// The scales as they lie in memory, with zeros between rows.
    pub fn scales(&self, layout: ScaleLayout) -> Vec<f32> {
        let (Window { row0, col0, rows, cols }, stride) = (self.scale_window(), layout.stride);
        let mut all = vec![0.0; layout.elements];
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let at = if layout.transposed { col * stride + row } else { row * stride + col };
            let Generator { fill, seed } = self.generator;
            all[at as usize] = scale(fill, seed, row0 + row, col0 + col);
        }
        all
    }

    /// The elements in type `X`, times their scales.
    pub fn dequantised<X: Element>(&self) -> Vec<f32> {
        let mut narrow = vec![X::from_f32(0.0); elements(self.window)];
        data::fill(&mut narrow, self.window, self.generator.seed, self.generator.fill);
        let mut wide = vec![0.0; narrow.len()];
        X::widen(&narrow, &mut wide);
        if self.form == Scales::None {
            return wide;
        }
        for (line, row) in (0..).zip(wide.chunks_exact_mut(self.window.cols as usize)) {
            for (block, part) in (0..).zip(row.chunks_mut(SCALE_BLOCK as usize)) {
                let scale = self.of(line, block * SCALE_BLOCK);
                for element in part {
                    *element *= scale;
                }
            }
        }
        wide
    }

    /// Writes the codes, and behind those of each row so many bytes more: its scales, then zeros.
    ///
    /// # Panics
    /// If `to` is not as long, or of another type.
    pub fn write_codes<X: Element>(&self, to: &mut [X], behind: usize) {
        assert_eq!(X::DTYPE, self.dtype, "a part has elements of its problem's type");
        let wide = self.window.cols as usize + behind;
        assert_eq!(to.len(), self.window.rows as usize * wide, "{:?}", self.window);
        let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let rows = (self.window.rows as usize).div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for (first, lines) in (0..).step_by(rows).zip(to.chunks_mut(rows * wide)) {
                scope.spawn(move || {
                    for (line, to) in (first..).zip(lines.chunks_exact_mut(wide)) {
                        self.write_row(line, to);
                    }
                });
            }
        });
    }

    fn write_row<X: Element>(&self, line: u32, to: &mut [X]) {
        let Window { row0, cols, .. } = self.window;
        let (codes, behind) = to.split_at_mut(cols as usize);
        let row = Window { row0: row0 + line, rows: 1, ..self.window };
        data::fill(codes, row, self.generator.seed, self.generator.fill);
        let count = self.scale_window().cols;
        let scales = (0..count).flat_map(|at| self.of(line, at * SCALE_BLOCK).to_le_bytes());
        let behind: &mut [u8] = bytemuck::cast_slice_mut(behind);
        for (to, byte) in behind.iter_mut().zip(scales.chain(std::iter::repeat(0))) {
            *to = byte;
        }
    }
}

/// Rows of the global `x`, of all ranks' parts, times their scales.
pub fn rows_of_x<X: Element>(
    problem: &Problem,
    generator: Generator,
    row0: u32,
    rows: u32,
) -> Vec<f32> {
    of_parts(problem, row0, rows, |window, source| {
        Part::of_x(problem, generator, window, source).dequantised::<X>()
    })
}

/// Rows of the global `w`, of all ranks' parts, times their scales.
pub fn rows_of_w<X: Element>(
    problem: &Problem,
    generator: Generator,
    row0: u32,
    rows: u32,
) -> Vec<f32> {
    of_parts(problem, row0, rows, |window, source| {
        Part::of_w(problem, generator, window, source).dequantised::<X>()
    })
}

fn of_parts(
    problem: &Problem,
    row0: u32,
    rows: u32,
    part: impl Fn(Window, Rank) -> Vec<f32>,
) -> Vec<f32> {
    let k = problem.k();
    if problem.op().gathers() {
        return part(Window { row0, col0: 0, rows, cols: k }, Rank::new(0));
    }
    let mut all = vec![0.0; rows as usize * k as usize];
    for source in problem.world().ranks() {
        let inner = problem.inner(source);
        let window = Window { row0, col0: inner.start, rows, cols: inner.len() as u32 };
        let lines = all.chunks_exact_mut(k as usize);
        for (to, from) in lines.zip(part(window, source).chunks_exact(inner.len())) {
            to[inner.start as usize..inner.end as usize].copy_from_slice(from);
        }
    }
    all
}

/// Bytes behind the codes of a row of `x`: its scales travel with it.
pub fn bytes_behind_rows(problem: &Problem) -> usize {
    if problem.op().gathers() {
        problem.numerics().scales.bytes_behind_row(problem.k()) as usize
    } else {
        0
    }
}
