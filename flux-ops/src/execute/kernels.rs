//! The kernels of an op, in the current context.
//!
//! Invariant: what an op before has loaded is taken. The others are looked for and compiled side by
//! side, as one takes seconds and an op has up to a dozen.

use super::plan::share_of_cores;
use crate::error::BuildError;
use flux_cuda::DeviceInfo;
use flux_kernels::cuda::{
    GatheredRows, Kernel, Quantize, RmsNorm, is_loaded, loaded, loaded_gathered_rows,
    loaded_quantize, loaded_rms_norm,
};
use flux_kernels::nvrtc::Arch;
use flux_kernels::{KernelTarget, Origin, Source, Variant, cubin, cubins};
use flux_transport::Communicator;
use std::sync::Arc;

/// The kernels of variants, in their order. The ranks share the cores, and begin at different
/// variants, so that those of one host find each other's.
pub(super) fn variants(
    variants: &[Variant],
    arch: Arch,
    comm: &Communicator,
) -> Result<Vec<Arc<Kernel>>, BuildError> {
    let mut missing = Vec::new();
    for variant in variants {
        if !is_loaded(*variant)? {
            missing.push(variant.source());
        }
    }
    let (rank, ranks) = (comm.rank().index(), comm.world_size().index());
    let (threads, first) = (share_of_cores(ranks) as usize, rank * missing.len() / ranks);
    let mut found: Vec<_> = missing.iter().zip(cubins(&missing, arch, threads, first)).collect();
    let mut load = |variant: Variant| {
        loaded(variant, || {
            let source = variant.source();
            let cubin = match found.iter().position(|(known, _)| **known == source) {
                Some(at) => found.swap_remove(at).1,
                None => cubin(&source, arch),
            }?;
            if cubin.origin == Origin::Compiled {
                tracing::info!(kernel = %variant, "compiled; the next process finds it in the cache");
            }
            Ok(cubin.image)
        })
    };
    variants.iter().map(|&variant| load(variant)).collect()
}

/// The kernel that copies gathered rows.
pub(super) fn gathered_rows(arch: Arch) -> Result<Arc<GatheredRows>, BuildError> {
    loaded_gathered_rows(|| Ok(cubin(&Source::gathered_rows(), arch)?.image))
}

/// The quantising kernel of a device.
pub(crate) fn quantize(info: &DeviceInfo) -> Result<Arc<Quantize>, BuildError> {
    let target = KernelTarget::of(info.compute)?;
    if !target.quantizes() {
        let device = format!("{} of compute capability {}", info.name, info.compute);
        return Err(BuildError::NoQuantizedRows { device, generation: target.generation });
    }
    loaded_quantize(|| Ok(cubin(&Source::quantize(), target.arch)?.image))
}

/// The norm's kernel.
pub(super) fn rms_norm(arch: Arch) -> Result<Arc<RmsNorm>, BuildError> {
    loaded_rms_norm(|| Ok(cubin(&Source::rms_norm(), arch)?.image))
}
