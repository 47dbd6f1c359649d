//! One call's operands on the GPU, dense, for the kernel and for the library.
//!
//! Invariant: both read the same elements. Rows of an AllGather-GEMM's `x` carry their scales for
//! the kernel. The library has rows of codes alone, and scales where and as it wants them.

use crate::harness::data::Window;
use crate::harness::gpu::Gpu;
use crate::harness::gpu::cublas::GemmOperands;
use crate::harness::scaled::bytes_behind_rows;
use crate::harness::{FIRST, Fill, Operands};
use anyhow::ensure;
use flux_core::problem::Shape;
use flux_core::{DType, Numerics, Problem, Rank, Scales};
use flux_cuda::DeviceBlock;
use flux_kernels::cuda::Matrix;
use flux_kernels::{Operand, OperandList, Shapes, WeightLayout};

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
    /// The library's `x`, where the kernel's rows carry more.
    library_x: Option<DeviceBlock>,
    /// Of `x` and `w`, as the library lays them out.
    library: [DeviceBlock; 2],
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
            let window = |Shape { rows, cols }| Window { row0: 0, col0: 0, rows, cols };
            let operands = Operands::new(*alone, 0, 0, Fill::SmallInts);
            let [of_x, of_w] = operands.parts([window(x), window(w)], FIRST);
            let block = |list: Vec<f32>| gpu.alloc(size_of_val(&list[..]));
            anyhow::Ok(ScaleBlocks {
                of_x: (behind == 0).then(|| block(of_x.scales())).transpose()?,
                of_w: block(of_w.scales())?,
                library_x: (behind > 0).then(|| part(x, operand)).transpose()?,
                library: [block(of_x.scales_of_cublas())?, block(of_w.scales_of_cublas())?],
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
            gpu.fill(&self.x, x, operands.seed_x, operands.fill, dtype)?;
            return gpu.fill(&self.w, w, operands.seed_w, operands.fill, dtype);
        };
        let [of_x, of_w] = operands.parts([x, w], source);
        let upload = |to: &DeviceBlock, list: Vec<f32>| gpu.upload(to, bytemuck::cast_slice(&list));
        let behind = bytes_behind_rows(&operands.problem);
        gpu.upload(&self.x, bytemuck::cast_slice(&of_x.codes(behind)))?;
        if let Some(dense) = &scales.library_x {
            gpu.upload(dense, bytemuck::cast_slice(&of_x.codes(0)))?;
        }
        gpu.upload(&self.w, bytemuck::cast_slice(&of_w.codes(0)))?;
        if let Some(list) = &scales.of_x {
            upload(list, of_x.scales())?;
        }
        upload(&scales.of_w, of_w.scales())?;
        upload(&scales.library[0], of_x.scales_of_cublas())?;
        upload(&scales.library[1], of_w.scales_of_cublas())
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
        let shapes = Shapes { problem, rank, layout: WeightLayout::Nk, gates: None };
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
        let scales = self.scales.as_ref();
        let x = scales.and_then(|scales| scales.library_x.as_ref()).unwrap_or(&self.x);
        let [x, w, y] = [x, &self.w, &self.y].map(DeviceBlock::address);
        let scales = scales.map(|scales| scales.library.each_ref().map(DeviceBlock::address));
        GemmOperands { x, w, y, scales }
    }
}
