//! The table of driver entry points, loaded once.
//!
//! Invariant: a [`Driver`] exists only if every entry point was found, `cuInit` succeeded and there
//! is a device. Handles travel as `usize`.

use crate::library;
use crate::vmm::{Access, PageProperties};
use crate::{CudaError, Unavailable};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUlaunchConfig, CUstreamBatchMemOpParams};
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// An opaque handle of the driver: `CUcontext`, `CUstream` or `CUevent`.
pub(crate) type Handle = usize;

crate::table! {
    /// Entry points by the names of the driver API, without version suffix.
    pub(crate) struct Driver {
        cu_init = "cuInit" (c_uint) -> c_int;
        cu_driver_get_version = "cuDriverGetVersion" (*mut c_int) -> c_int;
        cu_get_error_name = "cuGetErrorName" (c_int, *mut *const c_char) -> c_int;
        cu_device_get_count = "cuDeviceGetCount" (*mut c_int) -> c_int;
        cu_device_get = "cuDeviceGet" (*mut c_int, c_int) -> c_int;
        cu_device_get_name = "cuDeviceGetName" (*mut c_char, c_int, c_int) -> c_int;
        cu_device_get_uuid = "cuDeviceGetUuid_v2" (*mut [u8; 16], c_int) -> c_int;
        cu_device_get_pci_bus_id = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int) -> c_int;
        cu_device_get_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int) -> c_int;
        cu_device_total_mem = "cuDeviceTotalMem_v2" (*mut usize, c_int) -> c_int;
        cu_device_can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, c_int, c_int) -> c_int;
        cu_ctx_get_device = "cuCtxGetDevice" (*mut c_int) -> c_int;
        cu_ctx_get_id = "cuCtxGetId" (Handle, *mut c_ulonglong) -> c_int;
        cu_ctx_get_current = "cuCtxGetCurrent" (*mut Handle) -> c_int;
        cu_ctx_set_current = "cuCtxSetCurrent" (Handle) -> c_int;
        cu_ctx_push_current = "cuCtxPushCurrent_v2" (Handle) -> c_int;
        cu_ctx_pop_current = "cuCtxPopCurrent_v2" (*mut Handle) -> c_int;
        cu_ctx_synchronize = "cuCtxSynchronize" () -> c_int;
        cu_ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange"
            (*mut c_int, *mut c_int) -> c_int;
        cu_stream_create_with_priority = "cuStreamCreateWithPriority"
            (*mut Handle, c_uint, c_int) -> c_int;
        cu_stream_destroy = "cuStreamDestroy_v2" (Handle) -> c_int;
        cu_stream_synchronize = "cuStreamSynchronize" (Handle) -> c_int;
        cu_stream_query = "cuStreamQuery" (Handle) -> c_int;
        cu_stream_wait_event = "cuStreamWaitEvent" (Handle, Handle, c_uint) -> c_int;
        cu_stream_write_value = "cuStreamWriteValue32_v2" (Handle, u64, u32, c_uint) -> c_int;
        cu_stream_wait_value = "cuStreamWaitValue32_v2" (Handle, u64, u32, c_uint) -> c_int;
        cu_stream_batch_mem_op = "cuStreamBatchMemOp_v2"
            (Handle, c_uint, *mut CUstreamBatchMemOpParams, c_uint) -> c_int;
        cu_stream_get_ctx = "cuStreamGetCtx" (Handle, *mut Handle) -> c_int;
        cu_stream_get_id = "cuStreamGetId" (Handle, *mut c_ulonglong) -> c_int;
        cu_stream_get_capture_info = "cuStreamGetCaptureInfo_v3"
            (Handle, *mut c_int, *mut u64, *mut c_void, *mut c_void, *mut c_void,
             *mut usize) -> c_int;
        cu_event_create = "cuEventCreate" (*mut Handle, c_uint) -> c_int;
        cu_event_destroy = "cuEventDestroy_v2" (Handle) -> c_int;
        cu_event_query = "cuEventQuery" (Handle) -> c_int;
        cu_event_record = "cuEventRecord" (Handle, Handle) -> c_int;
        cu_event_synchronize = "cuEventSynchronize" (Handle) -> c_int;
        cu_event_elapsed_time = "cuEventElapsedTime" (*mut f32, Handle, Handle) -> c_int;
        cu_mem_get_info = "cuMemGetInfo_v2" (*mut usize, *mut usize) -> c_int;
        cu_mem_alloc = "cuMemAlloc_v2" (*mut u64, usize) -> c_int;
        cu_mem_free = "cuMemFree_v2" (u64) -> c_int;
        cu_mem_host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint) -> c_int;
        cu_mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"
            (*mut u64, *mut c_void, c_uint) -> c_int;
        cu_mem_free_host = "cuMemFreeHost" (*mut c_void) -> c_int;
        cu_mem_host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint) -> c_int;
        cu_mem_host_unregister = "cuMemHostUnregister" (*mut c_void) -> c_int;
        cu_memcpy_htod_async = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle) -> c_int;
        cu_memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle) -> c_int;
        cu_memcpy_dtod_async = "cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle) -> c_int;
        cu_memcpy_2d_async = "cuMemcpy2DAsync_v2" (*const CUDA_MEMCPY2D, Handle) -> c_int;
        cu_memcpy_dtoh = "cuMemcpyDtoH_v2" (*mut c_void, u64, usize) -> c_int;
        cu_memset_d8_async = "cuMemsetD8Async" (u64, c_uchar, usize, Handle) -> c_int;
        cu_memset_d32_async = "cuMemsetD32Async" (u64, c_uint, usize, Handle) -> c_int;
        cu_pointer_get_attribute = "cuPointerGetAttribute" (*mut c_void, c_int, u64) -> c_int;
        cu_module_load_data = "cuModuleLoadData" (*mut Handle, *const c_void) -> c_int;
        cu_module_unload = "cuModuleUnload" (Handle) -> c_int;
        cu_module_get_function = "cuModuleGetFunction"
            (*mut Handle, Handle, *const c_char) -> c_int;
        cu_func_set_attribute = "cuFuncSetAttribute" (Handle, c_int, c_int) -> c_int;
        cu_launch_kernel_ex = "cuLaunchKernelEx"
            (*const CUlaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void) -> c_int;
        cu_mem_create = "cuMemCreate"
            (*mut u64, usize, *const PageProperties, c_ulonglong) -> c_int;
        cu_mem_release = "cuMemRelease" (u64) -> c_int;
        cu_mem_get_allocation_granularity = "cuMemGetAllocationGranularity"
            (*mut usize, *const PageProperties, c_uint) -> c_int;
        cu_mem_export_to_shareable_handle = "cuMemExportToShareableHandle"
            (*mut c_void, u64, c_uint, c_ulonglong) -> c_int;
        cu_mem_import_from_shareable_handle = "cuMemImportFromShareableHandle"
            (*mut u64, *mut c_void, c_uint) -> c_int;
        cu_mem_address_reserve = "cuMemAddressReserve"
            (*mut u64, usize, usize, u64, c_ulonglong) -> c_int;
        cu_mem_address_free = "cuMemAddressFree" (u64, usize) -> c_int;
        cu_mem_map = "cuMemMap" (u64, usize, usize, u64, c_ulonglong) -> c_int;
        cu_mem_unmap = "cuMemUnmap" (u64, usize) -> c_int;
        cu_mem_set_access = "cuMemSetAccess" (u64, usize, *const Access, usize) -> c_int;
    }
}

/// What the loader tries, in order. `libcuda.so` alone may be a link-time stub, so it comes last.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The driver of this process, loaded and initialised at the first call.
pub(crate) fn driver() -> Result<&'static Driver, Unavailable> {
    static DRIVER: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
    DRIVER.get_or_init(start).as_ref().map_err(Clone::clone)
}

fn start() -> Result<Driver, Unavailable> {
    let candidates = NAMES.iter().map(PathBuf::from).collect();
    let (_, library) = library::first(candidates).map_err(|none| Unavailable::Library {
        tried: NAMES.join(", "),
        reason: none.to_string(),
    })?;
    // SAFETY: the entries are declared as in cuda.h.
    let driver = unsafe { Driver::bind(library) }
        .map_err(|missing| Unavailable::Symbol { symbol: missing.symbol })?;
    let init = |call, code| Unavailable::Init { call, code, name: driver.name_of(code) };
    // SAFETY: 0 is the only value of the flags.
    let code = unsafe { (driver.cu_init)(0) };
    match code {
        0 => {}
        NO_DEVICE => return Err(Unavailable::NoDevice),
        code => return Err(init("cuInit", code)),
    }
    let mut count = 0;
    // SAFETY: `count` is a place for the result.
    match unsafe { (driver.cu_device_get_count)(&raw mut count) } {
        0 if count > 0 => Ok(driver),
        0 => Err(Unavailable::NoDevice),
        code => Err(init("cuDeviceGetCount", code)),
    }
}

const NOT_READY: c_int = 600;
const NO_DEVICE: c_int = 100;

impl Driver {
    pub(crate) fn name_of(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        // SAFETY: `name` is a place for the result, which is a static string or null.
        let found =
            unsafe { (self.cu_get_error_name)(code, &raw mut name) } == 0 && !name.is_null();
        if found {
            // SAFETY: checked above: a static, terminated string of the driver.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an error that this driver has no name for".to_owned()
        }
    }

    /// Turns a result into an error that names the call.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            Ok(())
        } else {
            Err(CudaError::Call { call, code, name: self.name_of(code) })
        }
    }

    /// What a query says: whether it is done.
    pub(crate) fn is_ready(&self, call: &'static str, code: c_int) -> Result<bool, CudaError> {
        if code == NOT_READY { Ok(false) } else { self.check(call, code).map(|()| true) }
    }

    /// The same where there is nobody to tell: in a destructor.
    pub(crate) fn report(&self, call: &'static str, code: c_int) {
        if let Err(error) = self.check(call, code) {
            tracing::warn!(%error, "while releasing");
        }
    }
}
