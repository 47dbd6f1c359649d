//! Kernels that stay loaded.
//!
//! Invariant: a variant is loaded at most once while a context lives, and goes with the context.
//! The driver keeps device memory of an unloaded module (41 to 61 KiB with 580.159.04), so ops that
//! come and go would leak. All variants together take some 9 MB.

use super::call::{check, current_context};
use super::error::LaunchError;
use super::kernel::Kernel;
use crate::variant::Variant;
use cudarc::driver::sys;
use std::sync::{Arc, Mutex, PoisonError};

/// A kernel in the context of this number.
struct Loaded {
    context: u64,
    kernel: Arc<Kernel>,
}

/// Nothing in it is dropped: a kernel of a lost context would be unloaded from another one.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// The kernel of a variant in the current context: loaded there already, or now from the cubin that
/// `cubin` returns. It stays loaded until the context goes. Loading waits for the device.
///
/// # Errors
/// What `cubin` returns; [`LaunchError`] as [`Kernel::load`].
pub fn loaded<E: From<LaunchError>>(variant: Variant, cubin: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Arc<Kernel>, E> {
    let handle = current_context()?;
    let context = number_of(handle)?;
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = all.iter().find(|loaded| loaded.context == context && loaded.kernel.variant() == variant) {
        return Ok(Arc::clone(&loaded.kernel));
    }
    // A new primary context may have the handle of one that is gone.
    all.extract_if(.., |loaded| loaded.context != context && loaded.kernel.context() == handle).for_each(std::mem::forget);
    let kernel = Arc::new(Kernel::load(variant, &cubin()?)?);
    all.push(Loaded { context, kernel: Arc::clone(&kernel) });
    Ok(kernel)
}

/// The context's number, unique in this process, where handles are reused.
fn number_of(context: sys::CUcontext) -> Result<u64, LaunchError> {
    let mut number = 0;
    // SAFETY: the context is current, so it lives; the out pointer is valid.
    check("cuCtxGetId", unsafe { sys::cuCtxGetId(context, &raw mut number) })?;
    Ok(number)
}
