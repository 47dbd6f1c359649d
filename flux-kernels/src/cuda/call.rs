//! Driver calls, with their errors converted to ours.

use super::error::LaunchError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;

/// `Ok` on success, else the call's name with the driver's code.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), LaunchError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the out pointer is valid; the driver stores a pointer to a static string or null.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut name) } == CUresult::CUDA_SUCCESS
        && !name.is_null();
    let name = if known {
        // SAFETY: a non-null name is a NUL-terminated static string of the driver.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    } else {
        "unknown error".to_owned()
    };
    Err(LaunchError::Driver { call, code: result as i32, name })
}

/// The context that is current on this thread.
pub(super) fn current_context() -> Result<sys::CUcontext, LaunchError> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut context) })?;
    if context.is_null() {
        return Err(LaunchError::Driver {
            call: "cuCtxGetCurrent",
            code: 201,
            name: "no context is current on this thread".to_owned(),
        });
    }
    Ok(context)
}

/// Waits on this thread until `stream`, of the current context or its default one, is empty. A copy
/// from pageable memory or a fill returns before it is done, and launches may be on streams that do
/// not wait for the default stream.
pub(super) fn synchronize(stream: usize) -> Result<(), LaunchError> {
    // SAFETY: a stream of the current context, as the callers say, or the default stream.
    check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream as sys::CUstream) })
}

/// Runs `release` with `context` current; for destructors, which can run on any thread.
pub(super) fn release_in(context: sys::CUcontext, release: impl FnOnce()) {
    // SAFETY: the context was current when the resource was made, and primary contexts outlive what
    // was made in them.
    if unsafe { sys::cuCtxPushCurrent_v2(context) } != CUresult::CUDA_SUCCESS {
        tracing::warn!("a CUDA context is gone; its resources went with it");
        return;
    }
    release();
    let mut previous = std::ptr::null_mut();
    // SAFETY: pops what was pushed above.
    let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut previous) };
}
