//! Loaded cubins, for kernels that take one parameter struct.

use crate::CudaError;
use crate::current::Context;
use crate::driver::{Handle, driver};
use cudarc::driver::sys::{
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
};
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{from_ref, null_mut, with_exposed_provenance_mut};

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const DYNAMIC_SHARED_BYTES: c_int = 8;

/// A module of the context that was current when it was loaded.
#[derive(Debug)]
pub struct Module {
    handle: Handle,
    context: Context,
}

/// A kernel of a [`Module`], which outlives its launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    handle: Handle,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// CTAs along x and y.
    pub grid: (u32, u32),
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// A `CUstream` of the current context, or 0 for its default stream.
    pub stream: usize,
    /// Whether it may begin before the launch ahead on the stream has ended: programmatic dependent
    /// launch. The function then awaits that end itself. The driver takes it in captures from CUDA
    /// 12.3 on.
    pub programmatic: bool,
}

impl Module {
    /// Loads a cubin, or PTX that ends with a zero. With lazy loading, the driver's default,
    /// [`function`](Self::function) loads its kernel.
    ///
    /// # Errors
    /// The driver's refusal: the image does not suit the device.
    pub fn load(image: &[u8]) -> Result<Self, CudaError> {
        let (context, driver) = (Context::current()?, driver()?);
        let mut handle = 0;
        // SAFETY: the image is a cubin, which states its own length, or PTX, which ends with a
        // zero; `handle` is a place for the result.
        driver.check("cuModuleLoadData", unsafe {
            (driver.cu_module_load_data)(&raw mut handle, image.as_ptr().cast::<c_void>())
        })?;
        Ok(Self { handle, context })
    }

    /// An entry point, which may use this much dynamic shared memory.
    ///
    /// # Errors
    /// The driver's refusal: there is none of this name, or the memory is not there.
    pub fn function(&self, name: &CStr, shared_bytes: u32) -> Result<Function, CudaError> {
        let driver = driver()?;
        let mut handle = 0;
        // SAFETY: the module is loaded, the name ends with a zero, and `handle` is a place for the
        // result.
        driver.check("cuModuleGetFunction", unsafe {
            (driver.cu_module_get_function)(&raw mut handle, self.handle, name.as_ptr())
        })?;
        if shared_bytes > 0 {
            let bytes = shared_bytes.cast_signed();
            // SAFETY: the function is of this loaded module.
            driver.check("cuFuncSetAttribute", unsafe {
                (driver.cu_func_set_attribute)(handle, DYNAMIC_SHARED_BYTES, bytes)
            })?;
        }
        Ok(Function { handle })
    }

    /// Launches a function of this module, which takes one parameter struct by value.
    ///
    /// # Safety
    /// `params` has the layout of the function's parameters; what it points to is valid until the
    /// launch has completed.
    ///
    /// # Errors
    /// The driver's refusal, before anything is enqueued.
    pub unsafe fn launch<P: Copy>(
        &self,
        function: Function,
        launch: Launch,
        params: &P,
    ) -> Result<(), CudaError> {
        let driver = driver()?;
        let mut argument = from_ref(params).cast_mut().cast::<c_void>();
        let Launch { grid, threads, shared_bytes, stream, programmatic } = launch;
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: with_exposed_provenance_mut(stream),
            attrs: &raw mut attribute,
            numAttrs: u32::from(programmatic),
        };
        // SAFETY: the caller answers for the parameters, which the driver copies before the call
        // returns, as it does the configuration.
        let code = unsafe {
            (driver.cu_launch_kernel_ex)(
                &raw const config,
                function.handle,
                &raw mut argument,
                null_mut(),
            )
        };
        driver.check("cuLaunchKernelEx", code)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: loaded in `load`, unloaded once; the driver waits for running kernels of the
            // module.
            driver.report("cuModuleUnload", unsafe { (driver.cu_module_unload)(self.handle) });
        });
    }
}
