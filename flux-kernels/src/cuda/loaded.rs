//! Kernels that stay loaded.
//!
//! Invariant: a kernel is loaded at most once while a context lives, and goes with the context.
//! The driver keeps device memory of an unloaded module (41 to 61 KiB with 580.159.04), so ops that
//! come and go would leak. All variants together take some 9 MB.

use super::error::LaunchError;
use super::gathered_rows::GatheredRows;
use super::kernel::Kernel;
use super::quantize::Quantize;
use super::rms_norm::RmsNorm;
use crate::variant::Variant;
use flux_cuda::current::Context;
use std::sync::{Arc, Mutex, PoisonError};

/// A kernel in the context of this number.
struct Loaded<K> {
    context: u64,
    handle: Context,
    kernel: Arc<K>,
}

/// Nothing in it is dropped: a kernel of a lost context would be unloaded from another one.
type Registry<K> = Mutex<Vec<Loaded<K>>>;

static VARIANTS: Registry<Kernel> = Mutex::new(Vec::new());
static GATHERED_ROWS: Registry<GatheredRows> = Mutex::new(Vec::new());
static QUANTIZE: Registry<Quantize> = Mutex::new(Vec::new());
static RMS_NORM: Registry<RmsNorm> = Mutex::new(Vec::new());

/// The kernel of a variant in the current context: loaded there already, or now from the cubin that
/// `cubin` returns. It stays loaded until the context goes. Loading waits for the device.
///
/// # Errors
/// What `cubin` returns; [`LaunchError`] as [`Kernel::load`].
pub fn loaded<E: From<LaunchError>>(
    variant: Variant,
    cubin: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Arc<Kernel>, E> {
    find_or_load(
        &VARIANTS,
        |kernel| kernel.variant() == variant,
        || Ok(Kernel::load(variant, &cubin()?)?),
    )
}

/// Whether [`loaded`] finds the variant in the current context.
///
/// # Errors
/// [`LaunchError::Driver`] without a context.
pub fn is_loaded(variant: Variant) -> Result<bool, LaunchError> {
    let context = Context::current()?.number()?;
    let all = VARIANTS.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(all.iter().any(|loaded| loaded.context == context && loaded.kernel.variant() == variant))
}

/// As [`loaded`], the RMSNorm kernel.
///
/// # Errors
/// What `cubin` returns; [`LaunchError`] as [`RmsNorm::load`].
pub fn loaded_rms_norm<E: From<LaunchError>>(
    cubin: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Arc<RmsNorm>, E> {
    find_or_load(&RMS_NORM, |_| true, || Ok(RmsNorm::load(&cubin()?)?))
}

/// As [`loaded`], the quantising kernel.
///
/// # Errors
/// What `cubin` returns; [`LaunchError`] as [`Quantize::load`].
pub fn loaded_quantize<E: From<LaunchError>>(
    cubin: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Arc<Quantize>, E> {
    find_or_load(&QUANTIZE, |_| true, || Ok(Quantize::load(&cubin()?)?))
}

/// As [`loaded`], the kernel that copies gathered rows.
///
/// # Errors
/// What `cubin` returns; [`LaunchError`] as [`GatheredRows::load`].
pub fn loaded_gathered_rows<E: From<LaunchError>>(
    cubin: impl FnOnce() -> Result<Vec<u8>, E>,
) -> Result<Arc<GatheredRows>, E> {
    find_or_load(&GATHERED_ROWS, |_| true, || Ok(GatheredRows::load(&cubin()?)?))
}

fn find_or_load<K, E: From<LaunchError>>(
    registry: &Registry<K>,
    is_wanted: impl Fn(&K) -> bool,
    load: impl FnOnce() -> Result<K, E>,
) -> Result<Arc<K>, E> {
    let number = || {
        let handle = Context::current()?;
        handle.number().map(|number| (handle, number))
    };
    let (handle, context) = number().map_err(LaunchError::from)?;
    let mut all = registry.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) =
        all.iter().find(|loaded| loaded.context == context && is_wanted(&loaded.kernel))
    {
        return Ok(Arc::clone(&loaded.kernel));
    }
    // A new primary context may have the handle of one that is gone.
    all.extract_if(.., |loaded| loaded.context != context && loaded.handle == handle)
        .for_each(std::mem::forget);
    let kernel = Arc::new(load()?);
    all.push(Loaded { context, handle, kernel: Arc::clone(&kernel) });
    Ok(kernel)
}
