//! A tensor-parallel MLP on candle's tensors: `y = gelu(x w1^T) w2^T`, with the rows of `y` split
//! over the ranks, and with all rows on each.
//!
//! flux's ops are custom ops of candle. They read candle's storage in place, on the CPU or on GPUs,
//! and return candle's tensors.
//!
//! `cargo run` has two ranks on the CPU, and fails if a number is off. With `--features cuda` each
//! GPU is a rank.

mod linear;

use candle_core::{DType, Device, Error, Result, Tensor};
use flux_ops::{Activation, AllGatherGemm, GemmAllReduce, GemmReduceScatter, bf16};
use flux_transport::{Communicator, Select, World};
use linear::Linear;
use std::ops::Range;

/// Rows of the calls, which the ranks need not divide.
const ROWS: [usize; 2] = [64, 37];
const MAX_M: usize = 64;
const FEATURES: usize = 128;
/// Inner features of all ranks, in groups of 8, which the ranks need not divide.
const INNER: usize = 264;

fn main() -> Result<()> {
    flux_transport::probe::serve(); // first: a probe of peer access is this program again
    let (ranks, select) = ranks()?;
    let worlds = World::local(ranks).map_err(Error::wrap)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || mlp(&world, select))).collect();
        ranks
            .into_iter()
            .try_for_each(|rank| rank.join().unwrap_or_else(|_| Err(Error::msg("a rank panicked"))))
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
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let device = match comm.device().ordinal() {
        Some(ordinal) => Device::new_cuda_with_stream(ordinal as usize)?,
        None => Device::Cpu,
    };
    // Built once for all numbers of rows.
    let up = AllGatherGemm::<bf16>::builder(MAX_M, INNER, FEATURES)
        .activation(Activation::Gelu)
        .build(&comm)
        .map_err(Error::wrap)?;
    let down = GemmReduceScatter::<bf16>::builder(MAX_M, FEATURES, INNER)
        .build(&comm)
        .map_err(Error::wrap)?;
    let whole =
        GemmAllReduce::<bf16>::builder(MAX_M, FEATURES, INNER).build(&comm).map_err(Error::wrap)?;
    let (columns, inner) = (up.columns(rank), down.inner(rank));
    let rows = ROWS.map(|m| up.rows(m, rank).map_err(Error::wrap));
    let (up, down, whole) =
        (Linear::new(up, &comm), Linear::new(down, &comm), Linear::new(whole, &comm));

    // This rank's inner features. On the CPU the columns of w2 are a view with a stride; on its way
    // to a GPU candle makes them dense.
    let [w1, w2] = [global(1, INNER, FEATURES)?, global(2, FEATURES, INNER)?];
    let part = |tensor: &Tensor, dim, part: &Range<usize>| {
        tensor.narrow(dim, part.start, part.len())?.to_device(&device)
    };
    let (w1_own, w2_own) = (part(&w1, 0, &columns)?, part(&w2, 1, &inner)?);
    let mut checked = 0;
    for (m, rows) in ROWS.into_iter().zip(rows) {
        let (x, rows) = (global(0, m, FEATURES)?, rows?);
        let h = up.forward(&part(&x, 0, &rows)?, &w1_own, m)?;
        let (y_own, y) = (down.forward(&h, &w2_own, m)?, whole.forward(&h, &w2_own, m)?);
        device.synchronize()?;
        comm.status().map_err(Error::wrap)?; // the first fault of any call, from the device too

        for (found, first) in [(y_own, rows.start), (y, 0)] {
            let found = found.to_device(&Device::Cpu)?;
            check(&found, first, [&x, &w1, &w2], ranks.index())?;
            checked += found.elem_count();
        }
    }
    println!("rank {rank} of {ranks} on {}: {checked} numbers checked", comm.device().name());
    Ok(())
}

/// Compares rows of `y`, from global row `first` on, with candle's own product in fp32. Roundings
/// to bf16: the inner features, the partial sums that travel, the output. A library's all-reduce
/// rounds once more for each rank beyond two. fp32 adds less than a twentieth.
fn check(y: &Tensor, first: usize, global: [&Tensor; 3], ranks: usize) -> Result<()> {
    let [x, w1, w2] = global.map(|tensor| tensor.to_dtype(DType::F32));
    let (x, w1, w2) = (x?, w1?, w2?);
    let h = x.matmul(&w1.t()?)?.gelu()?;
    let exact = h.matmul(&w2.t()?)?;
    let parts = (h.abs()?.matmul(&w2.abs()?.t()?)? * ranks.max(2) as f64)?;
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
        bf16::from_f32(
            ((row * 37 + col * 101 + tensor * 53 + row * col * 7) % 129) as f32 / 64.0 - 1.0,
        )
    };
    Tensor::from_vec((0..rows * cols).map(element).collect(), (rows, cols), &Device::Cpu)
}
