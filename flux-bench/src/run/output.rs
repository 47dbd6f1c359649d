//! The output file of a run, to which each rank writes its part.
//!
//! Invariant: a part goes to the file from where the op has left it. On the host it is copied
//! nowhere, from a device it comes in blocks of [`BLOCK`] bytes at most, or of a row.

use crate::atomic_file::ResultFile;
use crate::harness::data::Window;
use crate::harness::{Buffer, RankContext, elements};
use flux_core::DType;
use flux_kernels::Element;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::path::Path;

/// Few enough to be had anywhere, and enough for the full speed of a copy.
const BLOCK: usize = 4 << 20;

/// A safetensors file with `y`, and behind it perhaps `y_norm`, which is as large.
#[derive(Debug)]
pub(super) struct Output {
    file: ResultFile,
    /// Bytes before `y`.
    head: u64,
    /// Bytes of a row.
    row: u64,
    /// Rows.
    rows: u64,
}

/// Extents of a result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub rows: usize,
    pub cols: usize,
    pub dtype: DType,
    /// Whether there is `y_norm`.
    pub normed: bool,
}

/// A tensor of the file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tensor {
    Y,
    YNorm,
}

impl Output {
    /// Begins the file; it has its name from [`commit`](Self::commit) on.
    pub(super) fn create(path: &Path, extents: Extents) -> anyhow::Result<Self> {
        let head = head(extents)?;
        let file = ResultFile::create(path)?;
        file.write_at(&head, 0)?;
        let row = (extents.cols * extents.dtype.bytes()) as u64;
        Ok(Self { file, head: head.len() as u64, row, rows: extents.rows as u64 })
    }

    /// Writes what `from` holds to the place of its window.
    pub(super) fn write<T: Element>(
        &self,
        ctx: &RankContext,
        tensor: Tensor,
        from: &Buffer<T>,
        window: Window,
    ) -> anyhow::Result<()> {
        let (cols, element) = (window.cols as usize, size_of::<T>());
        let rows = (BLOCK / (cols * element)).max(1);
        let begin = match tensor {
            Tensor::Y => self.head,
            Tensor::YNorm => self.head + self.rows * self.row,
        };
        ctx.download_blocks(from, elements(window), rows * cols, |first, block| {
            let at = |row: usize| {
                begin
                    + (u64::from(window.row0) + row as u64) * self.row
                    + u64::from(window.col0) * element as u64
            };
            let row = first / cols;
            if (cols * element) as u64 == self.row {
                return Ok(self.file.write_at(bytemuck::cast_slice(block), at(row))?);
            }
            for (row, line) in (row..).zip(block.chunks_exact(cols)) {
                self.file.write_at(bytemuck::cast_slice(line), at(row))?;
            }
            Ok(())
        })
    }

    /// Puts the file under its name.
    pub(super) fn commit(self) -> anyhow::Result<()> {
        Ok(self.file.commit()?)
    }
}

/// The length of the description, and the description, padded so that `y` begins at a multiple of
/// 8.
fn head(Extents { rows, cols, dtype, normed }: Extents) -> anyhow::Result<Vec<u8>> {
    let bytes = rows * cols * dtype.bytes();
    let dtype = match dtype {
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::E4m3 => Dtype::F8_E4M3,
    };
    let names = if normed { &["y", "y_norm"][..] } else { &["y"] };
    let tensor = |(number, name): (usize, &&str)| {
        let data_offsets = (number * bytes, (number + 1) * bytes);
        ((*name).to_owned(), TensorInfo { dtype, shape: vec![rows, cols], data_offsets })
    };
    let tensors = names.iter().enumerate().map(tensor).collect();
    let mut text = serde_json::to_vec(&Metadata::new(None, tensors)?)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    #[test]
    fn the_head_is_that_of_the_safetensors_library() {
        for dtype in [DType::Bf16, DType::F16] {
            for names in [&["y"][..], &["y", "y_norm"]] {
                let extents = Extents { rows: 16, cols: 64, dtype, normed: names.len() > 1 };
                let data = vec![0; 16 * 64 * 2];
                let own = if dtype == DType::F16 { Dtype::F16 } else { Dtype::BF16 };
                let view = |name: &&str| {
                    ((*name).to_owned(), TensorView::new(own, vec![16, 64], &data).unwrap())
                };
                let whole = safetensors::serialize(names.iter().map(view), None).unwrap();
                let written = [head(extents).unwrap(), data.repeat(names.len())].concat();
                assert_eq!(written, whole);
            }
        }
    }
}
