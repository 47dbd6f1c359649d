//! Every kernel of this machine's first GPU, compiled before anything waits for it.
//!
//! Invariant: afterwards each is a file that was compiled ahead of time, or one of the cache.

use crate::harness::gpu::kernels;
use crate::out;
use flux_cuda::CudaDevice;
use flux_kernels::{Cubin, Origin, Source, Variant, cubins};
use std::time::Instant;

/// Compiles those that are not there, on all cores.
///
/// # Errors
/// The first kernel's that does not compile.
pub(super) fn run() -> anyhow::Result<()> {
    let target = kernels::of_device(&CudaDevice::open(0)?)?;
    let others = [Source::rms_norm(), Source::gathered_rows(), Source::harness()];
    let quantize = target.quantizes().then(Source::quantize);
    let others = others.into_iter().chain(quantize);
    let sources: Vec<_> = Variant::all(target).iter().map(Variant::source).chain(others).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let start = Instant::now();
    let all = cubins(&sources, target.arch, cores, 0);
    let all = all.into_iter().collect::<Result<Vec<Cubin>, _>>()?;
    let compiled = all.iter().filter(|cubin| cubin.origin == Origin::Compiled).count();
    out::note(&format!(
        "{} kernels for {}, of which {compiled} were compiled in {:.1} s on {cores} cores",
        all.len(),
        target.arch.name(),
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}
