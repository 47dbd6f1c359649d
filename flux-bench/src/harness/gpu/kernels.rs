//! The harness's kernels and the fused one, as images for a device.

use flux_cuda::{ComputeCapability, CudaDevice};
use flux_kernels::nvrtc::{Arch, Nvrtc};
use flux_kernels::{KernelTarget, Source, Variant};

/// The compute capabilities that kernels run on, in words.
pub(crate) const CAPABILITIES: &str = "8.0 and later; for 8-bit operands 9.0, or 8.9 and later \
                                       with a driver and NVRTC of CUDA 12.4";

/// The kernels of a device, or why there are none for it.
pub(crate) fn target(ordinal: u32, compute: ComputeCapability) -> anyhow::Result<KernelTarget> {
    KernelTarget::of(compute).map_err(|why| anyhow::anyhow!("GPU {ordinal}: {why}"))
}

/// The kernels of an open device.
pub(crate) fn of_device(device: &CudaDevice) -> anyhow::Result<KernelTarget> {
    target(device.ordinal(), device.info().compute)
}

/// Image of the harness.
pub(crate) fn harness(device: &CudaDevice) -> anyhow::Result<Vec<u8>> {
    image(device, &Source::harness())
}

/// Image of the link kernels, which are Hopper's.
pub(crate) fn links(device: &CudaDevice) -> anyhow::Result<Vec<u8>> {
    let compute = device.info().compute;
    anyhow::ensure!(
        compute == ComputeCapability::new(9, 0),
        "links are measured by kernels for compute capability 9.0, not {compute}"
    );
    Ok(flux_kernels::cubin(&Source::links(), Arch::Sm90a)?.image)
}

/// Image of a variant of the fused kernel.
pub(crate) fn fused(device: &CudaDevice, variant: Variant) -> anyhow::Result<Vec<u8>> {
    image(device, &variant.source())
}

fn image(device: &CudaDevice, source: &Source) -> anyhow::Result<Vec<u8>> {
    Ok(flux_kernels::cubin(source, of_device(device)?.arch)?.image)
}

/// The version of the compiler that made the kernels, as it is kept with them.
pub(crate) fn compiled_by() -> anyhow::Result<String> {
    let device = CudaDevice::open(0)?;
    Ok(flux_kernels::cubin(&Source::harness(), of_device(&device)?.arch)?.version.to_string())
}

/// The compiler that would be used, in words.
pub(crate) fn compiler() -> Result<String, String> {
    let nvrtc = Nvrtc::get().map_err(|why| why.to_string())?;
    Ok(format!("{}, {}", nvrtc.version(), nvrtc.path().display()))
}
