//! cuBLASLt's algorithms whose kernels are of sm_80: what the portable kernel is judged by on a
//! later GPU, where the library's best kernels use instructions that it does not have.

use super::operands::OperandBlocks;
use crate::harness::FIRST;
use crate::harness::gpu::cublas::{CublasError, Gemm, GemmShape};
use crate::harness::gpu::kernel_names::{is_of_sm80, of_captured};
use crate::harness::gpu::{Gpu, kernels};
use flux_core::tile::Generation;
use flux_core::{Problem, Scales};

/// The GEMM with these algorithms as candidates. None where the kernel has instructions of its own,
/// where all algorithms are of sm_80, and where the library has no such algorithm: of 8-bit
/// operands.
pub(super) fn sm80_gemm(
    gpu: &Gpu,
    alone: &Problem,
    set: &OperandBlocks,
) -> anyhow::Result<Option<Gemm>> {
    let device = gpu.device();
    if kernels::of_device(device)?.generation == Generation::Hopper
        || device.info().compute.major < 9
        || alone.numerics().scales != Scales::None
    {
        return Ok(None);
    }
    let mut gemm = Gemm::new(device, GemmShape::of(alone, FIRST), alone.numerics())?;
    gemm.take_all()?;
    let mut kept = Vec::with_capacity(gemm.candidates());
    for candidate in 0..gemm.candidates() {
        gemm.choose(candidate);
        // Loads its kernels.
        match launch(gpu, &gemm, set, gpu.raw_stream()) {
            Ok(()) => kept.push(is_of_sm80(&kernels_of(gpu, &gemm, set)?)),
            // What the library has accepted it may still refuse to launch.
            Err(CublasError::Call { .. }) => kept.push(false),
            Err(error) => return Err(error.into()),
        }
    }
    gpu.synchronize()?;
    gemm.retain(&kept);
    Ok((gemm.candidates() > 0).then_some(gemm))
}

/// Names of the kernels of the chosen algorithm, once it was launched.
pub(super) fn kernels_of(
    gpu: &Gpu,
    gemm: &Gemm,
    set: &OperandBlocks,
) -> anyhow::Result<Vec<String>> {
    of_captured(gpu.device(), |stream| Ok(launch(gpu, gemm, set, stream)?))
}

/// Enqueues a library's GEMM of a set's operands.
pub(super) fn launch(
    gpu: &Gpu,
    gemm: &Gemm,
    set: &OperandBlocks,
    stream: usize,
) -> Result<(), CublasError> {
    gpu.device().bind()?;
    // SAFETY: the set holds operands of the GEMM's shape. A stream that is captured runs nothing,
    // and the GEMM uses no other at the same time.
    unsafe { gemm.launch(set.of_library(), stream) }
}
