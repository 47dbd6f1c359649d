//! What a library's GEMM reads of operands with scales: rows of codes alone, and scales in its own
//! layout.
//!
//! Invariant: the elements are those of the op's operands.

use super::Gpu;
use crate::harness::scaled::Part;
use flux_cuda::DeviceBlock;

/// Operands of a library beside an op's, whose codes of `w` it reads, and those of `x` where its
/// rows carry nothing else.
#[derive(Debug)]
pub(crate) struct LibraryOperands {
    /// Rows of `x`, where the op's carry their scales.
    pub(crate) codes: Option<DeviceBlock>,
    /// Of `x` and `w`.
    pub(crate) scales: [DeviceBlock; 2],
}

impl LibraryOperands {
    /// Memory for parts of `x` and `w`; of rows of `x` with so many bytes behind them in the op's.
    pub(crate) fn new(gpu: &Gpu, parts: &[Part; 2], behind: usize) -> anyhow::Result<Self> {
        let codes = crate::harness::elements(parts[0].window());
        let scales = |part: &Part| {
            let bytes = part.layout_of_cublas().elements * size_of::<f32>();
            let block = gpu.alloc(bytes)?;
            // Between rows of scales nothing is filled.
            gpu.set_words(&block, 0, (bytes / size_of::<f32>()) as u64, 0)?;
            anyhow::Ok(block)
        };
        Ok(Self {
            codes: (behind > 0).then(|| gpu.alloc(codes)).transpose()?,
            scales: [scales(&parts[0])?, scales(&parts[1])?],
        })
    }

    /// Writes parts of `x` and `w`, in order on the stream.
    pub(crate) fn fill(&self, gpu: &Gpu, parts: &[Part; 2]) -> anyhow::Result<()> {
        if let Some(codes) = &self.codes {
            gpu.fill_codes(codes, 0, &parts[0], 0)?;
        }
        let mut scales = self.scales.iter().zip(parts);
        scales.try_for_each(|(to, part)| gpu.fill_scales(to, part, part.layout_of_cublas()))
    }
}
