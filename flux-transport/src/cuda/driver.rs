//! The table of driver entry points, loaded once.
//!
//! Invariant: a [`Driver`] exists only if every entry point was found, `cuInit` succeeded and there
//! is a device. Handles travel as `usize`.

use super::vmm::{Access, PageProperties};
use super::{CudaError, Unavailable};
use cudarc::driver::sys::{CUDA_MEMCPY2D, CUstreamBatchMemOpParams};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// An opaque handle of the driver: `CUcontext`, `CUstream` or `CUevent`.
pub(crate) type Handle = usize;

macro_rules! table {
    ($($name:ident = $symbol:literal ($($type:ty),* $(,)?);)*) => {
        /// Entry points by the names of the driver API, without version suffix.
        pub(crate) struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
            _library: Library,
        }

        impl Driver {
            fn load(library: Library) -> Result<Self, Unavailable> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the entry point's declaration in cuda.h (opaque
                        // pointers as `usize`, enums as integers, which have the same
                        // representation); `_library` keeps it loaded as long as the table.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> c_int>($symbol) };
                        *symbol.map_err(|_| Unavailable::Symbol { symbol: stringify!($name) })?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

table! {
    cu_init = b"cuInit\0" (c_uint);
    cu_driver_get_version = b"cuDriverGetVersion\0" (*mut c_int);
    cu_get_error_name = b"cuGetErrorName\0" (c_int, *mut *const c_char);
    cu_device_get_count = b"cuDeviceGetCount\0" (*mut c_int);
    cu_device_get = b"cuDeviceGet\0" (*mut c_int, c_int);
    cu_device_get_name = b"cuDeviceGetName\0" (*mut c_char, c_int, c_int);
    cu_device_get_uuid = b"cuDeviceGetUuid_v2\0" (*mut [u8; 16], c_int);
    cu_device_get_pci_bus_id = b"cuDeviceGetPCIBusId\0" (*mut c_char, c_int, c_int);
    cu_device_get_attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, c_int);
    cu_device_total_mem = b"cuDeviceTotalMem_v2\0" (*mut usize, c_int);
    cu_device_can_access_peer = b"cuDeviceCanAccessPeer\0" (*mut c_int, c_int, c_int);
    cu_ctx_get_current = b"cuCtxGetCurrent\0" (*mut Handle);
    cu_ctx_set_current = b"cuCtxSetCurrent\0" (Handle);
    cu_ctx_push_current = b"cuCtxPushCurrent_v2\0" (Handle);
    cu_ctx_pop_current = b"cuCtxPopCurrent_v2\0" (*mut Handle);
    cu_ctx_synchronize = b"cuCtxSynchronize\0" ();
    cu_ctx_get_stream_priority_range = b"cuCtxGetStreamPriorityRange\0" (*mut c_int, *mut c_int);
    cu_stream_create_with_priority = b"cuStreamCreateWithPriority\0" (*mut Handle, c_uint, c_int);
    cu_stream_destroy = b"cuStreamDestroy_v2\0" (Handle);
    cu_stream_synchronize = b"cuStreamSynchronize\0" (Handle);
    cu_stream_query = b"cuStreamQuery\0" (Handle);
    cu_stream_wait_event = b"cuStreamWaitEvent\0" (Handle, Handle, c_uint);
    cu_stream_write_value = b"cuStreamWriteValue32_v2\0" (Handle, u64, u32, c_uint);
    cu_stream_wait_value = b"cuStreamWaitValue32_v2\0" (Handle, u64, u32, c_uint);
    cu_stream_batch_mem_op = b"cuStreamBatchMemOp_v2\0" (Handle, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
    cu_stream_get_ctx = b"cuStreamGetCtx\0" (Handle, *mut Handle);
    cu_stream_get_id = b"cuStreamGetId\0" (Handle, *mut c_ulonglong);
    cu_stream_get_capture_info = b"cuStreamGetCaptureInfo_v3\0"
        (Handle, *mut c_int, *mut u64, *mut c_void, *mut c_void, *mut c_void, *mut usize);
    cu_event_create = b"cuEventCreate\0" (*mut Handle, c_uint);
    cu_event_destroy = b"cuEventDestroy_v2\0" (Handle);
    cu_event_query = b"cuEventQuery\0" (Handle);
    cu_event_record = b"cuEventRecord\0" (Handle, Handle);
    cu_event_synchronize = b"cuEventSynchronize\0" (Handle);
    cu_event_elapsed_time = b"cuEventElapsedTime\0" (*mut f32, Handle, Handle);
    cu_mem_get_info = b"cuMemGetInfo_v2\0" (*mut usize, *mut usize);
    cu_mem_alloc = b"cuMemAlloc_v2\0" (*mut u64, usize);
    cu_mem_free = b"cuMemFree_v2\0" (u64);
    cu_mem_host_alloc = b"cuMemHostAlloc\0" (*mut *mut c_void, usize, c_uint);
    cu_mem_host_get_device_pointer = b"cuMemHostGetDevicePointer_v2\0" (*mut u64, *mut c_void, c_uint);
    cu_mem_free_host = b"cuMemFreeHost\0" (*mut c_void);
    cu_mem_host_register = b"cuMemHostRegister_v2\0" (*mut c_void, usize, c_uint);
    cu_mem_host_unregister = b"cuMemHostUnregister\0" (*mut c_void);
    cu_memcpy_htod_async = b"cuMemcpyHtoDAsync_v2\0" (u64, *const c_void, usize, Handle);
    cu_memcpy_dtoh_async = b"cuMemcpyDtoHAsync_v2\0" (*mut c_void, u64, usize, Handle);
    cu_memcpy_dtod_async = b"cuMemcpyDtoDAsync_v2\0" (u64, u64, usize, Handle);
    cu_memcpy_2d_async = b"cuMemcpy2DAsync_v2\0" (*const CUDA_MEMCPY2D, Handle);
    cu_memcpy_dtoh = b"cuMemcpyDtoH_v2\0" (*mut c_void, u64, usize);
    cu_memset_d32_async = b"cuMemsetD32Async\0" (u64, c_uint, usize, Handle);
    cu_mem_create = b"cuMemCreate\0" (*mut u64, usize, *const PageProperties, c_ulonglong);
    cu_mem_release = b"cuMemRelease\0" (u64);
    cu_mem_get_allocation_granularity = b"cuMemGetAllocationGranularity\0" (*mut usize, *const PageProperties, c_uint);
    cu_mem_export_to_shareable_handle = b"cuMemExportToShareableHandle\0" (*mut c_void, u64, c_uint, c_ulonglong);
    cu_mem_import_from_shareable_handle = b"cuMemImportFromShareableHandle\0" (*mut u64, *mut c_void, c_uint);
    cu_mem_address_reserve = b"cuMemAddressReserve\0" (*mut u64, usize, usize, u64, c_ulonglong);
    cu_mem_address_free = b"cuMemAddressFree\0" (u64, usize);
    cu_mem_map = b"cuMemMap\0" (u64, usize, usize, u64, c_ulonglong);
    cu_mem_unmap = b"cuMemUnmap\0" (u64, usize);
    cu_mem_set_access = b"cuMemSetAccess\0" (u64, usize, *const Access, usize);
}

/// What the loader tries, in order. `libcuda.so` alone may be a link-time stub, so it comes last.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The driver of this process, loaded and initialised at the first call.
pub(crate) fn driver() -> Result<&'static Driver, Unavailable> {
    static DRIVER: OnceLock<Result<Driver, Unavailable>> = OnceLock::new();
    DRIVER.get_or_init(start).as_ref().map_err(Clone::clone)
}

fn start() -> Result<Driver, Unavailable> {
    let mut reason = String::new();
    let mut library = None;
    for name in NAMES {
        // SAFETY: the driver's initialisers are made to run in any process at any time.
        match unsafe { Library::new(name) } {
            Ok(found) => {
                library = Some(found);
                break;
            }
            Err(error) if reason.is_empty() => reason = crate::cuda::loading::words(&error),
            Err(_) => {}
        }
    }
    let library =
        library.ok_or_else(|| Unavailable::Library { tried: NAMES.join(", "), reason })?;
    let driver = Driver::load(library)?;
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
