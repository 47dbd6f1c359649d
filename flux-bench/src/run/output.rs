//! The output file of a run, to which each rank writes its part.
//!
//! Invariant: a part goes to the file from where the op has left it. On the host it is copied
//! nowhere, from a device it comes in blocks of [`BLOCK`] bytes at most, or of a row.

use crate::atomic_file::ResultFile;
use crate::harness::data::Window;
use crate::harness::{Buffer, RankContext};
use flux_core::{DType, Problem};
use flux_kernels::Element;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::path::Path;

/// Few enough to be had anywhere, and enough for the full speed of a copy.
const BLOCK: usize = 4 << 20;

/// A safetensors file with `y` `[m, n]` alone.
#[derive(Debug)]
pub(super) struct Output {
    file: ResultFile,
    /// Bytes before `y`.
    head: u64,
    /// Bytes of a row of `y`.
    row: u64,
}

impl Output {
    /// Begins the file; it has its name from [`commit`](Self::commit) on.
    pub(super) fn create(path: &Path, problem: &Problem) -> anyhow::Result<Self> {
        let head = head(problem)?;
        let file = ResultFile::create(path)?;
        file.write_at(&head, 0)?;
        let row = u64::from(problem.n()) * problem.numerics().output.bytes() as u64;
        Ok(Self { file, head: head.len() as u64, row })
    }

    /// Writes what `y` holds to the place of its window.
    pub(super) fn write<T: Element>(
        &self,
        ctx: &RankContext,
        y: &Buffer<T>,
        window: Window,
    ) -> anyhow::Result<()> {
        let (cols, element) = (window.cols as usize, size_of::<T>());
        let rows = (BLOCK / (cols * element)).max(1);
        ctx.download_blocks(y, rows * cols, |first, block| {
            let at = |row: usize| {
                self.head
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
fn head(problem: &Problem) -> anyhow::Result<Vec<u8>> {
    let (m, n) = (problem.m() as usize, problem.n() as usize);
    let output = problem.numerics().output;
    let dtype = match output {
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
    };
    let y = TensorInfo { dtype, shape: vec![m, n], data_offsets: (0, m * n * output.bytes()) };
    let mut text = serde_json::to_vec(&Metadata::new(None, vec![("y".to_owned(), y)])?)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{OpKind, WorldSize};
    use safetensors::tensor::TensorView;

    #[test]
    fn the_head_is_that_of_the_safetensors_library() {
        for dtype in [DType::Bf16, DType::F16] {
            let problem =
                Problem::new(OpKind::AllGatherGemm, 16, 64, 32, dtype, WorldSize::new(2).unwrap())
                    .unwrap();
            let data = vec![0; 16 * 64 * 2];
            let own = if dtype == DType::F16 { Dtype::F16 } else { Dtype::BF16 };
            let whole = safetensors::serialize(
                [("y", TensorView::new(own, vec![16, 64], &data).unwrap())],
                None,
            )
            .unwrap();
            assert_eq!([head(&problem).unwrap(), data].concat(), whole);
        }
    }
}
