//! A loaded kernel.

use super::error::LaunchError;
use super::module::Module;
use super::warm_up::warm_up;
use crate::variant::Variant;
use cudarc::driver::sys;
use std::ffi::CString;

/// A loaded variant of the fused kernel.
#[derive(Debug)]
pub struct Kernel {
    variant: Variant,
    pub(super) module: Module,
    pub(super) function: sys::CUfunction,
    multiprocessors: u32,
}

// SAFETY: the function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; launches do not change it.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads a compiled variant into the current context and launches it once without work, so that
    /// the first call is like any other. Waits for the device. [`loaded`](super::loaded()) shares
    /// kernels.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks the entry point.
    pub fn load(variant: Variant, cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let function = module.function(&CString::new(variant.entry()).unwrap_or_default())?;
        module.allow_shared(function, variant.shared_bytes())?;
        let multiprocessors = module.multiprocessors()?;
        warm_up(&module, function, variant, multiprocessors)?;
        Ok(Self { variant, module, function, multiprocessors })
    }

    /// Which variant this is.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Multiprocessors of the device: the CTAs of this kernel that run at once.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}
