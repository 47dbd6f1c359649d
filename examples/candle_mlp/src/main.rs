//! A tensor-parallel MLP on candle's tensors: `y = gelu(x w1^T) w2^T`.
//!
//! flux's ops are custom ops of candle. They read candle's storage in place, on the CPU or on GPUs,
//! and return candle's tensors.
//!
//! `cargo run` has two ranks on the CPU, and fails if a number is off. With `--features cuda` each
//! GPU is a rank.

mod linear;

use candle_core::{DType, Device, Error, Result, Tensor};
use flux_ops::{Activation, AllGatherGemm, GemmReduceScatter, bf16};
use flux_transport::{Communicator, Select, World};
use linear::Linear;

const M: usize = 64;
const FEATURES: usize = 128;
const INNER: usize = 256;

fn main() -> Result<()> {
    flux_transport::probe::serve(); // peer access is proven in a process of its own, which is this program again
    let (ranks, select) = ranks()?;
    let worlds = World::local(ranks).map_err(Error::wrap)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || mlp(&world, select))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or_else(|_| Err(Error::msg("a rank panicked"))))
    })
}

/// The number of ranks, and the transport.
#[cfg(not(feature = "cuda"))]
fn ranks() -> Result<(u32, Select)> {
    Ok((2, Select::Host))
}

/// The number of ranks, and the transport.
#[cfg(feature = "cuda")]
fn ranks() -> Result<(u32, Select)> {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;

    Ok((CudaContext::device_count().map_err(Error::wrap)?.unsigned_abs(), Select::Auto))
}

/// One rank's part of the layer.
fn mlp(world: &World, select: Select) -> Result<()> {
    let comm = Communicator::connect_blocking(world, select).map_err(Error::wrap)?;
    let (rank, ranks) = (comm.rank().index(), comm.world_size().index());
    let device = match comm.device().ordinal() {
        Some(ordinal) => Device::new_cuda_with_stream(ordinal as usize)?,
        None => Device::Cpu,
    };
    let up = AllGatherGemm::builder(M, INNER, FEATURES).activation(Activation::Gelu).build(&comm).map_err(Error::wrap)?;
    let down = GemmReduceScatter::builder(M, FEATURES, INNER).build(&comm).map_err(Error::wrap)?;
    let (up, down) = (Linear::column(up, &comm)?, Linear::row(down, &comm)?);

    let [x, w1, w2] = [global(0, M, FEATURES)?, global(1, INNER, FEATURES)?, global(2, FEATURES, INNER)?];
    // This rank's rows of x, and its inner features of w1 and w2. On the CPU the columns of w2 are a
    // view with a stride; on its way to a GPU candle makes them dense.
    let part = |tensor: &Tensor, dim, of| tensor.narrow(dim, rank * of / ranks, of / ranks)?.to_device(&device);
    let (x_own, w1_own, w2_own) = (part(&x, 0, M)?, part(&w1, 0, INNER)?, part(&w2, 1, INNER)?);
    let y = x_own.apply_op2_no_bwd(&w1_own, &up)?.apply_op2_no_bwd(&w2_own, &down)?;
    device.synchronize()?;
    comm.status().map_err(Error::wrap)?; // the first fault of any call, from the device too

    let found = y.to_device(&Device::Cpu)?;
    check(&found, rank * M / ranks, [&x, &w1, &w2])?;
    println!("rank {rank} of {ranks} on {}: {} numbers checked", comm.device().name(), found.elem_count());
    Ok(())
}

/// Compares rows of `y`, from global row `first` on, with candle's own product in fp32. Roundings to
/// bf16: the inner features, the partial sums that travel, the output; fp32 adds less than a
/// twentieth.
fn check(y: &Tensor, first: usize, global: [&Tensor; 3]) -> Result<()> {
    let [x, w1, w2] = global.map(|tensor| tensor.to_dtype(DType::F32));
    let (x, w1, w2) = (x?, w1?, w2?);
    let h = x.matmul(&w1.t()?)?.gelu()?;
    let exact = h.matmul(&w2.t()?)?;
    let parts = (h.abs()?.matmul(&w2.abs()?.t()?)? * 2.0)?;
    let bound = ((parts + exact.abs()?)? * (1.05 * flux_ops::DType::Bf16.unit_roundoff()))?;
    let rows = y.dim(0)?;
    let (exact, bound) = (exact.narrow(0, first, rows)?, bound.narrow(0, first, rows)?);
    // No NaN is within a bound.
    let within = (y.to_dtype(DType::F32)? - exact)?.abs()?.le(&bound)?.to_dtype(DType::F32)?;
    let right = within.sum_all()?.to_scalar::<f32>()?;
    if right as usize == y.elem_count() {
        Ok(())
    } else {
        Err(Error::msg(format!("{right} of {} numbers are within bounds", y.elem_count())))
    }
}

/// A global matrix, of numbers between -1 and 1 that are exact in bf16.
fn global(tensor: usize, rows: usize, cols: usize) -> Result<Tensor> {
    let element = |i: usize| {
        let (row, col) = (i / cols, i % cols);
        bf16::from_f32(((row * 37 + col * 101 + tensor * 53 + row * col * 7) % 129) as f32 / 64.0 - 1.0)
    };
    Tensor::from_vec((0..rows * cols).map(element).collect(), (rows, cols), &Device::Cpu)
}
