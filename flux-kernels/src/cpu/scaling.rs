//! Scales of 8-bit operands: the factors of a tile's sums.
//!
//! Invariant: a sum is multiplied by the scale of `x` times that of `w` in fp32, once for all of an
//! item's steps, or for each block along `k`.

use super::call::Call;
use super::operands::Rows;
use super::panel::{self, Product};
use crate::element::Element;
use crate::weights::GateLayout;
use flux_core::numerics::SCALE_BLOCK;
use flux_core::problem::WeightList;
use flux_core::program::{RowSource, WorkItem};
use flux_core::{Rank, Scales};

/// The scales of a call.
pub(super) struct Scaling<'a> {
    /// Of the caller's `x`.
    pub(super) x: Option<Rows<'a, f32>>,
    /// Of each weight.
    pub(super) w: WeightList<Rows<'a, f32>>,
    pub(super) gates: Option<GateLayout>,
}

impl Scaling<'_> {
    /// Of a row of a weight's `n`, as tiles hold them, at a block along `k`.
    fn of_w(&self, scales: Scales, weight: usize, (row, n): (u32, u32), block: usize) -> f32 {
        let Some(w) = self.w.iter().nth(weight) else { return 1.0 };
        let row = self.gates.map_or(row, |gates| gates.row_in_tiles(row, n)) as usize;
        match scales {
            Scales::None | Scales::Tensor => w.elements[0],
            Scales::Row => w.elements[row],
            Scales::Block => w.elements[row / SCALE_BLOCK as usize * w.stride + block],
        }
    }
}

impl<X: Element, Y: Element> Call<'_, X, Y> {
    /// Multiplies the item's sums by their scales, where operands have one for all of `k`.
    pub(super) fn scale(&self, item: &WorkItem, acc: &mut [f32]) {
        if self.scales.x.is_some() {
            self.each_sum(item, 0, acc, |acc, scale| *acc *= scale);
        }
    }

    /// Multiplies block by block of `step` along `k`, each with its scales. `product` is that of
    /// all blocks.
    pub(super) fn multiply_blocks(
        &self,
        item: &WorkItem,
        product: Product,
        step: usize,
        (a, b): (&[f32], &[f32]),
        acc: &mut [f32],
        block: &mut [f32],
    ) {
        let first = (item.k_first * self.program.tile.k) as usize;
        for row in acc.chunks_mut(product.ldc).take(product.m) {
            row.fill(0.0);
        }
        let mut at = 0;
        while at < product.k {
            let number = (first + at) / step;
            let of_block =
                Product { k: (step - (first + at) % step).min(product.k - at), ..product };
            panel::multiply(of_block, &a[at..], &b[at..], block);
            let mut sums = block.chunks(product.ldc).flat_map(|row| &row[..product.n]);
            self.each_sum(item, number, acc, |acc, scale| {
                *acc += sums.next().expect("a sum for each") * scale;
            });
            at += of_block.k;
        }
    }

    /// Calls `apply` with each sum of the item, row by row, and its scale at a block along `k`.
    fn each_sum(
        &self,
        item: &WorkItem,
        block: usize,
        acc: &mut [f32],
        mut apply: impl FnMut(&mut f32, f32),
    ) {
        let (problem, cols) = (&self.program.problem, item.cols as usize);
        let scales = problem.numerics().scales;
        let (weight, col) = self.program.weight_column(item.col);
        let n = problem.weight_columns(weight, self.program.rank).len() as u32;
        for (i, row) in acc
            .chunks_mut(super::buffers::stride(self.program))
            .take(item.rows as usize)
            .enumerate()
        {
            let of_x = self.of_x(item, i, block);
            for (col, acc) in (col..).zip(&mut row[..cols]) {
                apply(acc, of_x * self.scales.of_w(scales, weight, (col, n), block));
            }
        }
    }

    /// Of the item's `i`-th row of `x`.
    fn of_x(&self, item: &WorkItem, i: usize, block: usize) -> f32 {
        let (problem, row) = (&self.program.problem, item.row as usize + i);
        let Some(x) = self.scales.x else { return 1.0 };
        if !problem.rows_carry_scales() {
            return x.elements[0];
        }
        if item.a_source == RowSource::Gather {
            let bytes = size_of::<f32>() as u64;
            let codes = u64::from(problem.k()) * size_of::<X>() as u64;
            let offset = self.program.gather_place_offset(item.a_outer)
                + row as u64 * problem.gathered_row_bytes()
                + codes
                + block as u64 * bytes;
            let half = self.protocol.half();
            let scale: *const f32 = self.memory.half(self.program.rank, half, offset, bytes);
            // SAFETY: `half` has checked that it lies inside the own data region. It came with its
            // row, which the item has awaited.
            return unsafe { scale.read() };
        }
        let first = problem.shard_rows(Rank::new(item.a_outer)).start as usize;
        x.elements[(first + row) * x.stride + block]
    }
}
