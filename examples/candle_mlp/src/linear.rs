//! flux's ops as candle's: `y = forward(x, w, m)`, of matrices of bf16.

use candle_core::{CpuStorage, CustomOp2, Error, Layout, Result, Shape, Tensor};
use flux_ops::{FusedLinear, Rank, TensorMut, TensorRef, bf16};
use flux_transport::{Communicator, Stream};

/// One rank's part of linear layers, `x w^T`. It holds no weights: one serves every layer of its
/// op's `n` and `k`, with any number of rows up to the op's `max_m`.
pub struct Linear {
    op: FusedLinear,
    rank: Rank,
}

impl Linear {
    /// An [`AllGatherGemm`](flux_ops::AllGatherGemm) splits output features: it takes this rank's
    /// rows of the input, and returns all rows. The others split input features, take all rows, and
    /// return this rank's rows of the sum, or all.
    pub fn new(op: impl Into<FusedLinear>, comm: &Communicator) -> Self {
        Self { op: op.into(), rank: comm.rank() }
    }

    /// This rank's `y` of `x` and `w`. `m` is the number of rows of all ranks together, which a
    /// rank's own rows do not tell where the ranks do not divide it.
    pub fn forward(&self, x: &Tensor, w: &Tensor, m: usize) -> Result<Tensor> {
        x.apply_op2_no_bwd(w, &Call { linear: self, m })
    }
}

/// One call of a layer, with `m` rows of all ranks together.
struct Call<'a> {
    linear: &'a Linear,
    m: usize,
}

impl Call<'_> {
    /// Rows and columns of this rank's output.
    fn output(&self) -> Result<(usize, usize)> {
        let Linear { op, rank } = self.linear;
        let y = op.problem(self.m).map_err(Error::wrap)?.y_shape(*rank);
        Ok((y.rows as usize, y.cols as usize))
    }
}

/// Where a matrix begins in its storage, and its extents and row stride for flux.
fn matrix(layout: &Layout) -> Result<(usize, flux_ops::Layout)> {
    let (rows, cols) = layout.shape().dims2()?;
    match layout.stride() {
        &[stride, 1] => Ok((layout.start_offset(), flux_ops::Layout::strided(rows, cols, stride))),
        other => Err(Error::msg(format!(
            "rows are not contiguous, their strides are {other:?}: call contiguous() on the tensor"
        ))),
    }
}

impl CustomOp2 for Call<'_> {
    fn name(&self) -> &'static str {
        self.linear.op.largest().op().name()
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let ((x_start, x_layout), (w_start, w_layout)) = (matrix(x_layout)?, matrix(w_layout)?);
        let x =
            TensorRef::host(&x.as_slice::<bf16>()?[x_start..], x_layout).map_err(Error::wrap)?;
        let w =
            TensorRef::host(&w.as_slice::<bf16>()?[w_start..], w_layout).map_err(Error::wrap)?;
        let output = self.output()?;
        let mut memory = vec![bf16::ZERO; output.0 * output.1];
        {
            let mut y = TensorMut::host(&mut memory, output).map_err(Error::wrap)?;
            self.linear.op.forward(&x, &w, &mut y, Stream::Host).map_err(Error::wrap)?;
        }
        Ok((CpuStorage::BF16(memory), output.into()))
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
        let (x, w) = (
            x.as_cuda_slice::<bf16>()?.slice(x_start..),
            w.as_cuda_slice::<bf16>()?.slice(w_start..),
        );
        let output = self.output()?;
        let mut memory = device.alloc_zeros::<bf16>(output.0 * output.1)?;
        {
            let x = TensorRef::cuda(&x, x_layout, &stream).map_err(Error::wrap)?;
            let w = TensorRef::cuda(&w, w_layout, &stream).map_err(Error::wrap)?;
            let mut y = TensorMut::cuda(&mut memory, output, &stream).map_err(Error::wrap)?;
            self.linear.op.forward(&x, &w, &mut y, &stream).map_err(Error::wrap)?;
        }
        Ok((candle_core::CudaStorage::wrap_cuda_slice(memory, device), output.into()))
    }
}
