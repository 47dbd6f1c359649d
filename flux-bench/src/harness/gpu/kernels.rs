//! The harness's kernels and the fused one, as cubins for a device.

use flux_kernels::nvrtc::{Arch, Nvrtc};
use flux_kernels::{Source, Variant};
use flux_transport::internal::cuda::CudaDevice;

/// The compute capabilities that [`arch`] takes, in words.
pub(crate) const CAPABILITIES: &str = "9.0";

/// What a device's kernels are compiled for, or why there are none for it.
pub(crate) fn arch(ordinal: u32, compute: (u32, u32)) -> anyhow::Result<Arch> {
    match compute {
        (9, 0) => Ok(Arch::Sm90a),
        (major, minor) => anyhow::bail!("GPU {ordinal} has compute capability {major}.{minor}, and the kernels are for {CAPABILITIES}"),
    }
}

/// Cubin of the harness.
pub(crate) fn harness(device: &CudaDevice) -> anyhow::Result<Vec<u8>> {
    cubin(device, &Source::harness())
}

/// Cubin of the link kernels.
pub(crate) fn links(device: &CudaDevice) -> anyhow::Result<Vec<u8>> {
    cubin(device, &Source::links())
}

/// Cubin of a variant of the fused kernel.
pub(crate) fn fused(device: &CudaDevice, variant: Variant) -> anyhow::Result<Vec<u8>> {
    cubin(device, &variant.source())
}

fn cubin(device: &CudaDevice, source: &Source) -> anyhow::Result<Vec<u8>> {
    Ok(flux_kernels::cubin(source, arch(device.ordinal(), device.info().compute)?)?.image)
}

/// The version of the compiler that made the kernels, as it is kept with them.
pub(crate) fn compiled_by() -> anyhow::Result<String> {
    Ok(flux_kernels::cubin(&Source::harness(), Arch::Sm90a)?.version.to_string())
}

/// The compiler that would be used, in words.
pub(crate) fn compiler() -> Result<String, String> {
    let nvrtc = Nvrtc::get().map_err(|why| why.to_string())?;
    Ok(format!("{}, {}", nvrtc.version(), nvrtc.path().display()))
}
