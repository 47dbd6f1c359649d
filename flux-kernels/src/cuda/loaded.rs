//! Kernels that are loaded for good.
//!
//! Invariant: a variant is loaded at most once while a context lives, and unloaded by nobody: it
//! goes with the context. The driver does not give back all that a kernel took when its module is
//! unloaded (41 to 61 KiB of device memory with 580.159.04), so ops that come and go would leak. All variants together are some 9 MB.

use super::LaunchError;
use super::call::{check, current_context};
use super::launch::Kernel;
use crate::Variant;
use cudarc::driver::sys;
use std::sync::{Arc, Mutex, PoisonError};

/// A kernel in the context of this number.
struct Loaded {
    context: u64,
    kernel: Arc<Kernel>,
}

/// Nothing of it is ever dropped: whose context is gone would be unloaded from another.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// The kernel of a variant in the current context: the one that was loaded there before, or one
/// loaded now, from the cubin that `cubin` finds.
///
/// It stays loaded until the context goes, whoever else holds it. Loading waits for the device.
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
    // A primary context that is made anew has the handle of the one that went.
    all.extract_if(.., |loaded| loaded.context != context && loaded.kernel.context() == handle).for_each(std::mem::forget);
    let kernel = Arc::new(Kernel::load(variant, &cubin()?)?);
    all.push(Loaded { context, kernel: Arc::clone(&kernel) });
    Ok(kernel)
}

/// The number that no other context of this process has had, where handles come again.
fn number_of(context: sys::CUcontext) -> Result<u64, LaunchError> {
    let mut number = 0;
    // SAFETY: the context is current, so it lives; the out pointer is valid.
    check("cuCtxGetId", unsafe { sys::cuCtxGetId(context, &raw mut number) })?;
    Ok(number)
}
