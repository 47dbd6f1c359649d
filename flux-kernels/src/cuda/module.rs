//! A loaded cubin, for kernels that take one parameter struct.

use super::call::{check, current_context, release_in, synchronize};
use super::error::LaunchError;
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};
use std::ffi::CStr;

/// A module of the context that was current when it was loaded.
#[derive(Debug)]
pub(crate) struct Module {
    handle: sys::CUmodule,
    context: sys::CUcontext,
}

// SAFETY: module and context handles may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Module {}

#[expect(
    clippy::unused_self,
    reason = "a module stands for the context in which its methods have to run"
)]
impl Module {
    /// Loads a cubin. With lazy loading, the driver's default, [`Self::function`] loads its kernel.
    pub(crate) fn load(cubin: &[u8]) -> Result<Self, LaunchError> {
        let context = current_context()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image is a cubin, which states its own length; the out pointer is valid.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&raw mut handle, cubin.as_ptr().cast())
        })?;
        Ok(Self { handle, context })
    }

    /// An entry point.
    pub(crate) fn function(&self, name: &CStr) -> Result<sys::CUfunction, LaunchError> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name NUL-terminated.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, self.handle, name.as_ptr())
        })?;
        Ok(function)
    }

    /// Lets a function use this much dynamic shared memory.
    pub(crate) fn allow_shared(
        &self,
        function: sys::CUfunction,
        bytes: u32,
    ) -> Result<(), LaunchError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to this loaded module.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(function, attribute, bytes.cast_signed())
        })
    }

    /// Multiprocessors of the context's device.
    pub(crate) fn multiprocessors(&self) -> Result<u32, LaunchError> {
        let (mut device, mut count) = (0, 0);
        // SAFETY: the out pointer is valid.
        check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) })?;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the out pointer is valid, the device exists.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut count, attribute, device)
        })?;
        Ok(count.unsigned_abs())
    }

    /// Launches a function that takes one parameter struct, by value.
    ///
    /// # Safety
    /// `params` has the layout of the function's parameters; what it points to is valid until the
    /// launch has completed.
    pub(crate) unsafe fn launch<P: Copy>(
        &self,
        function: sys::CUfunction,
        grid: (u32, u32),
        threads: u32,
        shared: u32,
        params: &P,
        stream: usize,
    ) -> Result<(), LaunchError> {
        let mut argument = std::ptr::from_ref(params).cast_mut().cast::<std::ffi::c_void>();
        let stream = stream as sys::CUstream;
        let null = std::ptr::null_mut();
        // SAFETY: the caller answers for the parameters, which the driver copies before the call
        // returns.
        let result = unsafe {
            sys::cuLaunchKernel(
                function,
                grid.0,
                grid.1,
                1,
                threads,
                1,
                1,
                shared,
                stream,
                &raw mut argument,
                null,
            )
        };
        check("cuLaunchKernel", result)
    }

    /// Sets bytes.
    ///
    /// # Safety
    /// The range is valid until the stream has passed this point.
    pub(crate) unsafe fn memset(
        &self,
        address: u64,
        byte: u8,
        bytes: u64,
        stream: usize,
    ) -> Result<(), LaunchError> {
        // SAFETY: the caller answers for the range.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(address, byte, bytes as usize, stream as sys::CUstream)
        })
    }

    /// Copies to the device, in stream order, and waits.
    pub(crate) fn write(
        &self,
        address: u64,
        bytes: &[u8],
        stream: usize,
    ) -> Result<(), LaunchError> {
        // SAFETY: the destination was allocated with this size; the source lives until the
        // synchronisation below.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                address,
                bytes.as_ptr().cast(),
                bytes.len(),
                stream as sys::CUstream,
            )
        })?;
        self.synchronize(stream)
    }

    /// Copies from the device, in stream order, and waits.
    pub(crate) fn read(
        &self,
        address: u64,
        bytes: &mut [u8],
        stream: usize,
    ) -> Result<(), LaunchError> {
        // SAFETY: the source was allocated with this size; the destination lives until the
        // synchronisation below.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                bytes.as_mut_ptr().cast(),
                address,
                bytes.len(),
                stream as sys::CUstream,
            )
        })?;
        self.synchronize(stream)
    }

    /// Waits on this thread until the stream is empty.
    pub(crate) fn synchronize(&self, stream: usize) -> Result<(), LaunchError> {
        synchronize(stream)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        release_in(self.context, || {
            // SAFETY: loaded in `load`, unloaded once; the driver waits for running kernels of the
            // module.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        });
    }
}
