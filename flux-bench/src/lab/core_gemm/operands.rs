//! One call's operands on the GPU, dense, for the kernel and for the library.
//!
//! Invariant: both read the same elements. Rows of an AllGather-GEMM's `x` carry their scales for
//! the kernel. The library has rows of codes alone, and scales where and as it wants them.

use crate::harness::data::Window;
use crate::harness::gpu::cublas::GemmOperands;
use crate::harness::gpu::{Gpu, LibraryOperands};
use crate::harness::scaled::bytes_behind_rows;
use crate::harness::{FIRST, Fill, Operands};
use anyhow::ensure;
use flux_core::problem::Shape;
use flux_core::{DType, Numerics, Problem, Rank, Scales};
use flux_cuda::DeviceBlock;
use flux_kernels::cuda::Matrix;
use flux_kernels::{Operand, OperandList, Shapes};

/// One call's operands.
#[derive(Debug)]
pub(super) struct OperandBlocks {
    x: DeviceBlock,
    x_row_bytes: u64,
    w: DeviceBlock,
    pub(super) y: DeviceBlock,
    scales: Option<ScaleBlocks>,
}

/// What operands of 8 bits have besides.
#[derive(Debug)]
struct ScaleBlocks {
    /// None where rows of `x` carry them.
    of_x: Option<DeviceBlock>,
    of_w: DeviceBlock,
    library: LibraryOperands,
}

impl OperandBlocks {
    /// Of one rank of a problem that has the whole local `x` and `y`.
    pub(super) fn new(gpu: &Gpu, alone: &Problem) -> anyhow::Result<Self> {
        let Numerics { operand, output, scales, .. } = alone.numerics();
        let part = |shape: Shape, dtype: DType| gpu.alloc(shape.elements() * dtype.bytes());
        let (x, w) = (alone.x_shape(FIRST), alone.w_shape(FIRST));
        let (codes, behind) = (x.cols as usize * operand.bytes(), bytes_behind_rows(alone));
        let x_row_bytes = codes + behind;
        let scale_blocks = || {
            let parts = Operands::new(*alone, 0, 0, Fill::SmallInts).own_parts(FIRST);
            let [of_x, of_w] = parts.map(|part| part.layout().elements * size_of::<f32>());
            anyhow::Ok(ScaleBlocks {
                of_x: (behind == 0).then(|| gpu.alloc(of_x)).transpose()?,
                of_w: gpu.alloc(of_w)?,
                library: LibraryOperands::new(gpu, &parts, behind)?,
            })
        };
        Ok(Self {
            x: gpu.alloc(x.rows as usize * x_row_bytes)?,
            x_row_bytes: x_row_bytes as u64,
            w: part(w, operand)?,
            y: part(alone.y_shape(FIRST), output)?,
            scales: (scales != Scales::None).then(scale_blocks).transpose()?,
        })
    }

    /// Fills `x` and `w` with windows of their global matrices, of a rank's part along `k`, in
    /// order on the stream.
    pub(super) fn fill(
        &self,
        gpu: &Gpu,
        operands: &Operands,
        [x, w]: [Window; 2],
        source: Rank,
    ) -> anyhow::Result<()> {
        let Some(scales) = &self.scales else {
            let dtype = operands.problem.numerics().operand;
            gpu.fill(&self.x, 0, x, operands.seed_x, operands.fill, dtype)?;
            return gpu.fill(&self.w, 0, w, operands.seed_w, operands.fill, dtype);
        };
        let parts = operands.parts([x, w], source);
        let [of_x, of_w] = &parts;
        gpu.fill_codes(&self.x, 0, of_x, bytes_behind_rows(&operands.problem))?;
        gpu.fill_codes(&self.w, 0, of_w, 0)?;
        if let Some(list) = &scales.of_x {
            gpu.fill_scales(list, of_x, of_x.layout())?;
        }
        gpu.fill_scales(&scales.of_w, of_w, of_w.layout())?;
        scales.library.fill(gpu, &parts)
    }

    /// What a rank's kernel is told of them.
    pub(super) fn of_kernel(
        &self,
        problem: &Problem,
        rank: Rank,
    ) -> anyhow::Result<OperandList<Matrix>> {
        let Numerics { operand, output, .. } = problem.numerics();
        let matrix = |block: &DeviceBlock, rows: u32, row_bytes: u64| {
            ensure!(
                block.bytes() as u64 >= u64::from(rows) * row_bytes,
                "{} bytes do not hold {rows} rows of {row_bytes} bytes",
                block.bytes()
            );
            Ok(Matrix { address: block.address(), row_bytes })
        };
        let dense = |block, Shape { rows, cols }: Shape, bytes: usize| {
            matrix(block, rows, u64::from(cols) * bytes as u64)
        };
        let x = problem.x_shape(rank);
        let mut operands = OperandList::new();
        operands.set(Operand::X, 0, matrix(&self.x, x.rows, self.x_row_bytes)?);
        operands.set(Operand::W, 0, dense(&self.w, problem.w_shape(rank), operand.bytes())?);
        operands.set(Operand::Y, 0, dense(&self.y, problem.y_shape(rank), output.bytes())?);
        let Some(scales) = &self.scales else { return Ok(operands) };
        let shapes = Shapes::new(problem, rank);
        let list = |block, of| dense(block, shapes.of_operand(of, 0), size_of::<f32>());
        let of_x = match &scales.of_x {
            Some(block) => list(block, Operand::ScaleX)?,
            None => Matrix {
                address: self.x.address() + u64::from(x.cols) * operand.bytes() as u64,
                row_bytes: self.x_row_bytes,
            },
        };
        operands.set(Operand::ScaleX, 0, of_x);
        operands.set(Operand::ScaleW, 0, list(&scales.of_w, Operand::ScaleW)?);
        Ok(operands)
    }

    /// What the library is told of them.
    pub(super) fn of_library(&self) -> GemmOperands {
        let library = self.scales.as_ref().map(|scales| &scales.library);
        let x = library.and_then(|of| of.codes.as_ref()).unwrap_or(&self.x);
        let [x, w, y] = [x, &self.w, &self.y].map(DeviceBlock::address);
        let scales = library.map(|of| of.scales.each_ref().map(DeviceBlock::address));
        GemmOperands { x, w, y, scales }
    }
}
