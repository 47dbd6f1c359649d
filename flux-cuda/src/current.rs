//! What belongs to the context that is current on the calling thread, whoever made it so.
//!
//! Invariant: whatever was made in a context is released in it, on any thread.

use crate::CudaError;
use crate::driver::{Driver, Handle, driver};
use std::ffi::{c_int, c_void};

/// `CUDA_ERROR_INVALID_CONTEXT`.
const NO_CONTEXT: c_int = 201;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSORS: c_int = 16;

/// A context, by its handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    handle: Handle,
}

impl Context {
    /// The context that is current on this thread.
    ///
    /// # Errors
    /// There is none, or no CUDA.
    pub fn current() -> Result<Self, CudaError> {
        let driver = driver()?;
        let mut handle = 0;
        // SAFETY: `handle` is a place for the result.
        let code = unsafe { (driver.cu_ctx_get_current)(&raw mut handle) };
        driver
            .check("cuCtxGetCurrent", if code == 0 && handle == 0 { NO_CONTEXT } else { code })?;
        Ok(Self { handle })
    }

    /// Its number, unique in this process, where handles are reused. It is current.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn number(self) -> Result<u64, CudaError> {
        let driver = driver()?;
        let mut number = 0;
        // SAFETY: the context is current, so it lives; `number` is a place for the result.
        let code = unsafe { (driver.cu_ctx_get_id)(self.handle, &raw mut number) };
        driver.check("cuCtxGetId", code)?;
        Ok(number)
    }

    /// Runs `release` with the context current; for destructors.
    pub(crate) fn release(self, release: impl FnOnce(&Driver)) {
        let Ok(driver) = driver() else { return };
        // SAFETY: the context was current when the resource was made, and primary contexts outlive
        // what was made in them.
        if unsafe { (driver.cu_ctx_push_current)(self.handle) } != 0 {
            tracing::warn!("a CUDA context is gone; its resources went with it");
            return;
        }
        release(driver);
        let mut popped = 0;
        // SAFETY: pops what was pushed above.
        driver.report("cuCtxPopCurrent", unsafe { (driver.cu_ctx_pop_current)(&raw mut popped) });
    }
}

/// Device memory of the context that was current. It goes with the value.
#[derive(Debug)]
pub struct ContextMemory {
    address: u64,
    context: Context,
}

impl ContextMemory {
    /// Memory of at least one byte.
    ///
    /// # Errors
    /// The driver's refusal: memory is short, or `bytes` is 0.
    pub fn new(bytes: usize) -> Result<Self, CudaError> {
        let (context, driver) = (Context::current()?, driver()?);
        let mut address = 0;
        // SAFETY: a context is current; `address` is a place for the result.
        driver.check("cuMemAlloc", unsafe { (driver.cu_mem_alloc)(&raw mut address, bytes) })?;
        Ok(Self { address, context })
    }

    /// Its first byte.
    pub const fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for ContextMemory {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that uses it.
            driver.report("cuMemFree", unsafe { (driver.cu_mem_free)(self.address) });
        });
    }
}

/// Multiprocessors of the current context's device.
///
/// # Errors
/// The driver's refusal.
pub fn multiprocessors() -> Result<u32, CudaError> {
    let driver = driver()?;
    let (mut device, mut count) = (0, 0);
    // SAFETY: `device` is a place for the result.
    driver.check("cuCtxGetDevice", unsafe { (driver.cu_ctx_get_device)(&raw mut device) })?;
    // SAFETY: `count` is a place for the result; the device exists.
    driver.check("cuDeviceGetAttribute", unsafe {
        (driver.cu_device_get_attribute)(&raw mut count, MULTIPROCESSORS, device)
    })?;
    Ok(count.unsigned_abs())
}

/// The device that memory at `address` is on.
///
/// # Errors
/// The driver's refusal: it knows no such memory.
pub fn device_of(address: u64) -> Result<Option<u32>, CudaError> {
    let driver = driver()?;
    let mut ordinal: c_int = -1;
    // SAFETY: the attribute is an `int`, and `ordinal` is a place for one; any address may be asked
    // about.
    driver.check("cuPointerGetAttribute", unsafe {
        (driver.cu_pointer_get_attribute)((&raw mut ordinal).cast(), DEVICE_ORDINAL, address)
    })?;
    Ok(u32::try_from(ordinal).ok())
}

/// Waits on this thread until `stream`, of the current context or its default one, is empty. A copy
/// from pageable memory or a fill returns before it is done, and launches may be on streams that do
/// not wait for the default stream.
///
/// # Errors
/// What has failed on the stream, or the driver's refusal.
pub fn synchronize(stream: usize) -> Result<(), CudaError> {
    let driver = driver()?;
    // SAFETY: a stream of the current context, as the callers say, or the default stream.
    driver.check("cuStreamSynchronize", unsafe { (driver.cu_stream_synchronize)(stream) })
}

/// Sets `bytes` bytes at `address` on `stream`.
///
/// # Safety
/// The range is device memory until the stream has passed this point.
///
/// # Errors
/// The driver's refusal.
pub unsafe fn fill_bytes_async(
    address: u64,
    byte: u8,
    bytes: usize,
    stream: usize,
) -> Result<(), CudaError> {
    let driver = driver()?;
    // SAFETY: the caller answers for the range.
    driver.check("cuMemsetD8Async", unsafe {
        (driver.cu_memset_d8_async)(address, byte, bytes, stream)
    })
}

/// Puts a copy of `bytes` bytes of host memory to `address` on `stream`.
///
/// # Safety
/// Both ranges are there, and nothing writes `from`, until the stream has passed this point.
///
/// # Errors
/// The driver's refusal.
pub unsafe fn upload_async(
    address: u64,
    from: *const u8,
    bytes: usize,
    stream: usize,
) -> Result<(), CudaError> {
    let driver = driver()?;
    // SAFETY: the caller answers for the ranges.
    driver.check("cuMemcpyHtoDAsync", unsafe {
        (driver.cu_memcpy_htod_async)(address, from.cast::<c_void>(), bytes, stream)
    })
}

/// Copies `bytes` to `address` in the order of `stream`, and waits.
///
/// # Safety
/// The range is device memory of at least that many bytes.
///
/// # Errors
/// What has failed on the stream, or the driver's refusal.
pub unsafe fn upload(address: u64, bytes: &[u8], stream: usize) -> Result<(), CudaError> {
    // SAFETY: the caller answers for the destination; the source lives until the synchronisation.
    unsafe { upload_async(address, bytes.as_ptr(), bytes.len(), stream) }?;
    synchronize(stream)
}

/// Copies from `address` to `bytes` in the order of `stream`, and waits.
///
/// # Safety
/// The range is device memory of at least that many bytes.
///
/// # Errors
/// What has failed on the stream, or the driver's refusal.
pub unsafe fn download(address: u64, bytes: &mut [u8], stream: usize) -> Result<(), CudaError> {
    let driver = driver()?;
    // SAFETY: the caller answers for the source; the destination lives until the synchronisation.
    driver.check("cuMemcpyDtoHAsync", unsafe {
        (driver.cu_memcpy_dtoh_async)(
            bytes.as_mut_ptr().cast::<c_void>(),
            address,
            bytes.len(),
            stream,
        )
    })?;
    synchronize(stream)
}
