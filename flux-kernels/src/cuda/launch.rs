//! Enqueues a call.

use super::args::{LaunchArgs, LaunchStart};
use super::encode::encode_params;
use super::error::LaunchError;
use super::kernel::Kernel;
use super::program::DeviceProgram;
use crate::epilogue::Activation;
use crate::operand::{Operand, Presence};
use crate::variant::Variant;
use flux_cuda::Launch;

/// Enqueues one call on the stream. Does not wait for the device and allocates nothing.
///
/// # Safety
/// - The program passes [`check::verify`](flux_core::program::check::verify) together with those of
///   the other ranks, as built by
///   [`TileProgram::build_across`](flux_core::program::TileProgram::build_across). Neither this
///   function nor the kernel checks it. Awaits may be missing for data that has arrived when the
///   kernel begins.
/// - Every address is valid on the current device for the extents that the program implies, until
///   the launch has completed.
/// - All ranks of the world enqueue the same call.
///
/// # Errors
/// [`LaunchError`], before anything is enqueued.
///
/// # Panics
/// If there are fewer data regions or pads than ranks.
pub unsafe fn launch(
    kernel: &Kernel,
    program: &DeviceProgram,
    args: &LaunchArgs<'_>,
) -> Result<(), LaunchError> {
    let p = program.program();
    let variant = kernel.variant();
    let ctas = args.workers;
    let weights = p.problem.weight_count();
    let has = |operand, weight| args.operands.get(operand, weight).is_some();
    let always = |operand: &Operand| operand.presence() == Presence::Always;
    let has_operands = Operand::ALL.into_iter().filter(always).all(|operand| has(operand, 0))
        && args.operands.is_of_all_or_none(weights);
    let has_activation = Activation::of(p.problem.op()).contains(&args.activation);
    let operands_fit = variant.is_gated() == args.gates.is_some() && has_operands && has_activation;
    if !variant.fits(p) || !program.has_room_for(variant, ctas) || !operands_fit {
        let program = format!("{} with tiles of {}", p.problem, p.tile);
        return Err(LaunchError::Mismatch { program, kernel: variant.to_string() });
    }
    let limit = kernel.multiprocessors();
    if ctas == 0 || ctas > limit {
        return Err(LaunchError::Grid { ctas, limit });
    }
    let items = program.item_count();
    if args.trace.is_some_and(|trace| !trace.fits(items, ctas)) {
        return Err(LaunchError::Trace { items, ctas });
    }
    let params = encode_params(variant, program, args)?;
    let launch = Launch {
        grid: (ctas, 1),
        threads: Variant::THREADS,
        shared_bytes: variant.shared_bytes(),
        stream: args.stream,
        programmatic: args.start != LaunchStart::Behind,
    };
    // SAFETY: the kernel takes one `Params`; the caller answers for the addresses in it.
    Ok(unsafe { kernel.module.launch(kernel.function, launch, &params) }?)
}
