//! A device of this process, with its primary context retained.
//!
//! Invariant: it is the context of the CUDA runtime and of frameworks. Everything made on a device
//! holds the device.

use super::driver::{Driver, Handle, driver};
use super::info::{DeviceInfo, device_info};
use super::{CudaError, DeviceUuid, patience};
use cudarc::driver::CudaContext;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A device and its primary context. Cheap to clone.
#[derive(Clone)]
pub struct CudaDevice {
    inner: Arc<Inner>,
}

struct Inner {
    info: DeviceInfo,
    context: Arc<CudaContext>,
    driver: &'static Driver,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(&self.inner.info).finish()
    }
}

impl CudaDevice {
    /// Retains the primary context of device `ordinal` and makes it current on this thread.
    ///
    /// # Errors
    /// No CUDA, no such device, or the driver's refusal.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let driver = driver()?;
        let info = device_info(ordinal)?;
        let context = CudaContext::new(ordinal as usize).map_err(|error| {
            let code = error.0 as i32;
            CudaError::Call { call: "cuDevicePrimaryCtxRetain", code, name: driver.name_of(code) }
        })?;
        Ok(Self { inner: Arc::new(Inner { info, context, driver }) })
    }

    /// What the driver says of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Number in this process.
    pub fn ordinal(&self) -> u32 {
        self.inner.info.ordinal
    }

    /// Identity across processes.
    pub fn uuid(&self) -> DeviceUuid {
        self.inner.info.uuid
    }

    /// The context, for the crates that load modules and launch.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.context
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.inner.driver
    }

    fn handle(&self) -> Handle {
        self.inner.context.cu_ctx() as Handle
    }

    /// Makes the device's context current on this thread, and leaves it so.
    pub fn bind(&self) -> Result<(), CudaError> {
        let driver = self.driver();
        // SAFETY: the context is retained as long as `self` lives.
        driver.check("cuCtxSetCurrent", unsafe { (driver.cu_ctx_set_current)(self.handle()) })
    }

    /// Makes the device's context current on this thread until the guard is dropped.
    pub fn enter(&self) -> Result<Current, CudaError> {
        let driver = self.driver();
        let mut current: Handle = 0;
        // SAFETY: `current` is a place for the result.
        let code = unsafe { (driver.cu_ctx_get_current)(&raw mut current) };
        driver.check("cuCtxGetCurrent", code)?;
        let pushed = current != self.handle();
        if pushed {
            // SAFETY: the context is retained as long as `self` lives, and the guard pops it on
            // this thread.
            driver.check("cuCtxPushCurrent", unsafe {
                (driver.cu_ctx_push_current)(self.handle())
            })?;
        }
        Ok(Current { pushed, driver, not_send: PhantomData })
    }

    /// Waits until all work of all streams of the context is done, whoever launched it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        let driver = self.driver();
        // SAFETY: a context is current.
        driver.check("cuCtxSynchronize", unsafe { (driver.cu_ctx_synchronize)() })
    }

    /// Notes that the device was waited for in vain: nothing of it is freed in this process from
    /// then on.
    pub fn give_up(&self, why: &str) {
        if patience::give_up(self.ordinal(), why) {
            // The last reference would release the context, and memory that peers use.
            patience::keep(&self.inner);
        }
    }

    /// Whether the device was waited for in vain: freeing would wait, too.
    pub fn is_given_up(&self) -> bool {
        patience::is_given_up(self.ordinal())
    }

    /// Makes the context current to free something of it, unless the device was given up.
    pub(super) fn enter_to_free(&self) -> Option<Current> {
        if self.is_given_up() { None } else { self.enter().ok() }
    }

    /// The same for pinned memory, which every device of the process can use.
    pub(super) fn enter_to_unpin(&self) -> Option<Current> {
        if patience::is_any_given_up() { None } else { self.enter().ok() }
    }

    /// Free and total bytes of device memory.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let _current = self.enter()?;
        let driver = self.driver();
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current; both are places for results.
        driver.check("cuMemGetInfo", unsafe {
            (driver.cu_mem_get_info)(&raw mut free, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    /// Whether `stream`, a `CUstream`, belongs to this device's primary context. Default streams
    /// do.
    ///
    /// # Errors
    /// An unknown handle, or a stream in an unsafe state of capture.
    pub fn owns_stream(&self, stream: usize) -> Result<bool, CudaError> {
        let _current = self.enter()?;
        let driver = self.driver();
        let mut context: Handle = 0;
        // SAFETY: `context` is a place for the result; the caller vouches for the handle.
        driver.check("cuStreamGetCtx", unsafe {
            (driver.cu_stream_get_ctx)(stream, &raw mut context)
        })?;
        Ok(context == self.handle())
    }
}

/// While it lives, a device's context is current on this thread; then the one before it is again.
#[must_use]
pub struct Current {
    pushed: bool,
    driver: &'static Driver,
    // The stack of current contexts is the thread's own.
    not_send: PhantomData<*const ()>,
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Current").field("pushed", &self.pushed).finish_non_exhaustive()
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: Handle = 0;
            // SAFETY: `enter` pushed a context on this thread (the guard is not Send), and guards
            // nest.
            self.driver.report("cuCtxPopCurrent", unsafe {
                (self.driver.cu_ctx_pop_current)(&raw mut popped)
            });
        }
    }
}
