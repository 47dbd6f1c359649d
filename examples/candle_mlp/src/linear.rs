//! flux's ops as candle's: `y = forward(x, w)`, each a matrix of bf16.

use candle_core::{CpuStorage, CustomOp2, Error, Layout, Result, Shape};
use flux_ops::{AllGatherGemm, CallError, GemmReduceScatter, TensorMut, TensorRef, bf16};
use flux_transport::{Communicator, Stream};

/// One rank's part of a linear layer, `x w^T`, for the `m` that its op is built for.
pub struct Linear {
    op: Op,
    /// Extents of this rank's output.
    output: (usize, usize),
}

enum Op {
    Column(AllGatherGemm<bf16>),
    Row(GemmReduceScatter<bf16>),
}

impl Linear {
    /// Output features are split: takes this rank's rows of the input, and returns all rows.
    pub fn column(op: AllGatherGemm<bf16>, comm: &Communicator) -> Result<Self> {
        let y = op.problem(op.max_m()).map_err(Error::wrap)?.y_shape(comm.rank());
        Ok(Self { op: Op::Column(op), output: (y.rows as usize, y.cols as usize) })
    }

    /// Input features are split: takes all rows, and returns this rank's rows of the sum.
    pub fn row(op: GemmReduceScatter<bf16>, comm: &Communicator) -> Result<Self> {
        let y = op.problem(op.max_m()).map_err(Error::wrap)?.y_shape(comm.rank());
        Ok(Self { op: Op::Row(op), output: (y.rows as usize, y.cols as usize) })
    }

    fn forward(
        &self,
        x: &TensorRef<'_, bf16>,
        w: &TensorRef<'_, bf16>,
        y: &mut TensorMut<'_, bf16>,
        stream: Stream<'_>,
    ) -> std::result::Result<(), CallError> {
        match &self.op {
            Op::Column(op) => op.forward(x, w, y, stream),
            Op::Row(op) => op.forward(x, w, y, stream),
        }
    }
}

/// Where a matrix begins in its storage, and its extents and row stride for flux.
fn matrix(layout: &Layout) -> Result<(usize, flux_ops::Layout)> {
    let (rows, cols) = layout.shape().dims2()?;
    match layout.stride() {
        &[stride, 1] => Ok((layout.start_offset(), flux_ops::Layout::strided(rows, cols, stride))),
        other => Err(Error::msg(format!("rows are not contiguous, their strides are {other:?}: call contiguous() on the tensor"))),
    }
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        match self.op {
            Op::Column(_) => "all-gather-gemm",
            Op::Row(_) => "gemm-reduce-scatter",
        }
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_layout: &Layout, w: &CpuStorage, w_layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((x_start, x_layout), (w_start, w_layout)) = (matrix(x_layout)?, matrix(w_layout)?);
        let x = TensorRef::host(&x.as_slice::<bf16>()?[x_start..], x_layout).map_err(Error::wrap)?;
        let w = TensorRef::host(&w.as_slice::<bf16>()?[w_start..], w_layout).map_err(Error::wrap)?;
        let mut memory = vec![bf16::ZERO; self.output.0 * self.output.1];
        {
            let mut y = TensorMut::host(&mut memory, self.output).map_err(Error::wrap)?;
            self.forward(&x, &w, &mut y, Stream::Host).map_err(Error::wrap)?;
        }
        Ok((CpuStorage::BF16(memory), self.output.into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        x_layout: &Layout,
        w: &candle_core::CudaStorage,
        w_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;

        let device = x.device().clone();
        let stream = device.cuda_stream();
        let ((x_start, x_layout), (w_start, w_layout)) = (matrix(x_layout)?, matrix(w_layout)?);
        let (x, w) = (x.as_cuda_slice::<bf16>()?.slice(x_start..), w.as_cuda_slice::<bf16>()?.slice(w_start..));
        let mut memory = device.alloc_zeros::<bf16>(self.output.0 * self.output.1)?;
        {
            let x = TensorRef::cuda(&x, x_layout, &stream).map_err(Error::wrap)?;
            let w = TensorRef::cuda(&w, w_layout, &stream).map_err(Error::wrap)?;
            let mut y = TensorMut::cuda(&mut memory, self.output, &stream).map_err(Error::wrap)?;
            self.forward(&x, &w, &mut y, Stream::from(&stream)).map_err(Error::wrap)?;
        }
        Ok((candle_core::CudaStorage::wrap_cuda_slice(memory, device), self.output.into()))
    }
}
