//! A loaded kernel.

use super::error::LaunchError;
use super::warm_up::warm_up;
use crate::variant::Variant;
use flux_cuda::{Function, Module, current};
use std::ffi::CString;

/// A loaded variant of the fused kernel.
#[derive(Debug)]
pub struct Kernel {
    variant: Variant,
    pub(super) module: Module,
    pub(super) function: Function,
    multiprocessors: u32,
}

impl Kernel {
    /// Loads a compiled variant into the current context and launches it once without work, so that
    /// the first call is like any other. Waits for the device. [`loaded`](super::loaded()) shares
    /// kernels.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks the entry point.
    pub fn load(variant: Variant, cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let entry = CString::new(variant.entry()).unwrap_or_default();
        let function = module.function(&entry, variant.shared_bytes())?;
        let multiprocessors = current::multiprocessors()?;
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
