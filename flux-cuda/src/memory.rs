//! Device memory, pinned host memory, and copies by the copy engines.
//!
//! Invariant: a block is freed once, under its device's context, after its owner's copies (the
//! driver waits for those).

use super::driver::Handle;
use super::staging::RowCopy;
use super::{CudaDevice, CudaError};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::AtomicU32;

/// Plain device memory, private to its device.
#[derive(Debug)]
pub struct DeviceBlock {
    device: CudaDevice,
    address: u64,
    bytes: usize,
}

impl DeviceBlock {
    /// Allocates; the contents are undefined. No bytes have an address, too.
    pub fn new(device: &CudaDevice, bytes: usize) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut address = 0;
        // SAFETY: a context is current; `address` is a place for the result.
        driver.check("cuMemAlloc", unsafe {
            (driver.cu_mem_alloc)(&raw mut address, bytes.max(1))
        })?;
        Ok(Self { device: device.clone(), address, bytes })
    }

    /// The device that it is of.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_free() else {
            return;
        };
        let driver = self.device.driver();
        // SAFETY: allocated in `new`, freed only here.
        driver.report("cuMemFree", unsafe { (driver.cu_mem_free)(self.address) });
    }
}

/// Pinned host memory that every device of the process can address, zeroed.
#[derive(Debug)]
pub struct PinnedBlock {
    device: CudaDevice,
    host: ptr::NonNull<c_void>,
    address: u64,
    bytes: usize,
}

// SAFETY: the block is plain memory; whoever reads or writes it through `host` answers for the
// accesses.
unsafe impl Send for PinnedBlock {}
// SAFETY: shared references hand out its address, and words that are accessed as a whole.
unsafe impl Sync for PinnedBlock {}

const PORTABLE_MAPPED: u32 = 1 | 2;

impl PinnedBlock {
    /// Allocates and zeroes.
    pub fn new(device: &CudaDevice, bytes: usize) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut host: *mut c_void = ptr::null_mut();
        // SAFETY: a context is current; `host` is a place for the result.
        driver.check("cuMemHostAlloc", unsafe {
            (driver.cu_mem_host_alloc)(&raw mut host, bytes, PORTABLE_MAPPED)
        })?;
        let Some(host) = ptr::NonNull::new(host) else {
            return Err(CudaError::Call {
                call: "cuMemHostAlloc",
                code: 0,
                name: "returned a null pointer".to_owned(),
            });
        };
        // From here on the destructor frees it.
        let mut block = Self { device: device.clone(), host, address: 0, bytes };
        // SAFETY: `bytes` bytes at `host` were just allocated and nobody else knows them.
        unsafe { ptr::write_bytes(host.as_ptr().cast::<u8>(), 0, bytes) };
        // SAFETY: `host` was allocated with the mapped flag.
        let code = unsafe {
            (driver.cu_mem_host_get_device_pointer)(&raw mut block.address, host.as_ptr(), 0)
        };
        driver.check("cuMemHostGetDevicePointer", code)?;
        Ok(block)
    }

    /// The word at `offset`, in bytes.
    ///
    /// # Panics
    /// If it is no word of the block.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset.checked_add(4).is_some_and(|end| end <= self.bytes),
            "{offset} is no offset of a word"
        );
        // SAFETY: in bounds and aligned, as the block begins at a page; it lives as long as `self`.
        // Who accesses a word in another way, through `host`, answers for that.
        unsafe { AtomicU32::from_ptr(self.host.as_ptr().byte_add(offset).cast()) }
    }

    /// The host address, aligned to a page.
    pub fn host(&self) -> *mut c_void {
        self.host.as_ptr()
    }

    /// The address for devices.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_unpin() else {
            return;
        };
        let driver = self.device.driver();
        // SAFETY: allocated in `new`, freed only here.
        driver.report("cuMemFreeHost", unsafe { (driver.cu_mem_free_host)(self.host.as_ptr()) });
    }
}

/// Copies `bytes` on `stream`.
///
/// # Safety
/// Both ranges are mapped with access for `device` until the copy is done; `device`'s context is
/// current.
pub unsafe fn copy_async(
    device: &CudaDevice,
    to: u64,
    from: u64,
    bytes: usize,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    // SAFETY: the caller's promise.
    driver.check("cuMemcpyDtoDAsync", unsafe {
        (driver.cu_memcpy_dtod_async)(to, from, bytes, stream)
    })
}

/// Copies rows on `stream`.
///
/// # Safety
/// As [`copy_async`], for the rows of both sides.
pub unsafe fn copy_rows_async(
    device: &CudaDevice,
    rows: &RowCopy,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    let copy = rows.described();
    // SAFETY: the caller's promise; the descriptor is read before the call returns.
    driver.check("cuMemcpy2DAsync", unsafe { (driver.cu_memcpy_2d_async)(&raw const copy, stream) })
}

/// Stores one word on `stream`, in order, without a copy engine or an SM.
///
/// # Safety
/// As [`copy_async`], for 4 bytes at `to`.
pub unsafe fn write_value_async(
    device: &CudaDevice,
    to: u64,
    value: u32,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    // SAFETY: the caller's promise; flags 0 keep the barrier before the store.
    driver.check("cuStreamWriteValue32", unsafe {
        (driver.cu_stream_write_value)(stream, to, value, 0)
    })
}

/// Makes `stream` wait until the word at `from` is `value` or up to 2^31 - 1 more, modulo 2^32. No
/// SM waits.
///
/// # Safety
/// As [`copy_async`], for 4 bytes at `from`.
pub unsafe fn wait_value_async(
    device: &CudaDevice,
    from: u64,
    value: u32,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    // SAFETY: the caller's promise; flags 0 compare the difference's sign.
    driver.check("cuStreamWaitValue32", unsafe {
        (driver.cu_stream_wait_value)(stream, from, value, 0)
    })
}

/// Fills `words` words on `stream`.
///
/// # Safety
/// As [`copy_async`], for `4 * words` bytes at `to`.
pub unsafe fn fill_words(
    device: &CudaDevice,
    to: u64,
    value: u32,
    words: usize,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    // SAFETY: the caller's promise.
    driver.check("cuMemsetD32Async", unsafe {
        (driver.cu_memset_d32_async)(to, value, words, stream)
    })
}

/// Reads device memory, after all work of blocking streams of the context.
///
/// # Safety
/// `into.len()` bytes at `from` are mapped with access for `device`.
pub unsafe fn read(device: &CudaDevice, into: &mut [u8], from: u64) -> Result<(), CudaError> {
    let _current = device.enter()?;
    let driver = device.driver();
    // SAFETY: the caller's promise; `into` is writable for its length.
    driver.check("cuMemcpyDtoH", unsafe {
        (driver.cu_memcpy_dtoh)(into.as_mut_ptr().cast(), from, into.len())
    })
}
