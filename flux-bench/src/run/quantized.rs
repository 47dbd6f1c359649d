//! Rows of codes with their scales behind them: as an op of 8-bit operands takes `x`.

use super::cut;
use super::input::InputError;
use super::scaled::Extents;
use crate::harness::data::Window;
use flux_core::Scales;
use flux_kernels::cpu::{Rows, RowsMut, quantize};
use flux_kernels::{Element, F8E4M3, with_element};

/// `x` of 16 bits as a server makes it an 8-bit operand.
#[derive(Debug)]
pub(super) struct QuantizedX {
    pub(super) rows: Vec<F8E4M3>,
    /// Codes of a row with what is behind them.
    pub(super) row: usize,
}

impl QuantizedX {
    /// By the `given` scale, or by scales of their own.
    pub(super) fn new(
        bytes: &[u8],
        Extents { rows, cols, dtype }: Extents,
        form: Scales,
        given: Option<f32>,
    ) -> Result<Self, InputError> {
        let row = cols + form.bytes_behind_row(cols as u32) as usize;
        let mut made = crate::harness::room(rows * row)?;
        made.resize(rows * row, F8E4M3::from_bits(0));
        with_element!(dtype, T, {
            let whole = Window { row0: 0, col0: 0, rows: rows as u32, cols: cols as u32 };
            let wide = cut::<T>(bytes, cols, [whole])?;
            let x = Rows { elements: &wide, stride: cols };
            let out = RowsMut { elements: &mut made, stride: row };
            quantize(x, (rows, cols), None, (form, given), out, None);
        });
        Ok(Self { rows: made, row })
    }

    /// What lies behind the codes, row by row.
    pub(super) fn scales(&self, Extents { cols, .. }: Extents, form: Scales) -> Vec<f32> {
        let of_row = |row: &[F8E4M3]| {
            let bytes: &[u8] = bytemuck::cast_slice(&row[cols..]);
            let count = form.of_row(cols as u32) as usize;
            let scales = bytes.as_chunks().0.iter().take(count);
            scales.map(|&bytes| f32::from_le_bytes(bytes)).collect::<Vec<_>>()
        };
        self.rows.chunks_exact(self.row).flat_map(of_row).collect()
    }

    /// The rows as bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.rows)
    }
}

/// Rows of codes with their scales behind them, in so many bytes.
pub(super) fn with_scales<X: Element>(
    codes: &[X],
    cols: usize,
    scales: &[f32],
    behind: usize,
) -> anyhow::Result<Vec<X>> {
    let count = codes.len() / cols;
    let mut rows = crate::harness::room(count * (cols + behind))?;
    let of_row = scales.len() / count.max(1);
    for (number, codes) in codes.chunks_exact(cols).enumerate() {
        rows.extend_from_slice(codes);
        rows.extend_from_slice(bytemuck::cast_slice(&scales[number * of_row..][..of_row]));
        rows.resize((number + 1) * (cols + behind), X::from_f32(0.0));
    }
    Ok(rows)
}
