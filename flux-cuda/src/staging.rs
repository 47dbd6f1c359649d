//! Host memory for copy engines, and words that streams write and wait for.
//!
//! Invariant: a registration holds what it registers. Nothing here needs an SM, so a kernel that
//! holds all of them may wait for it.

use super::driver::Handle;
use super::{CudaDevice, CudaError};
use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUmemorytype, CUstreamBatchMemOpParams,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st as WaitValue,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 as WaitWord,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st as WriteValue,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as WriteWord,
    CUstreamBatchMemOpType as OpType,
};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr;

/// Memory of the host, pinned and mapped for every device of the process.
#[derive(Debug)]
pub struct Registration<M> {
    device: CudaDevice,
    host: usize,
    // What is registered; dropped after it was unregistered, if it can be.
    memory: ManuallyDrop<M>,
}

const PORTABLE_MAPPED: u32 = 1 | 2;

impl<M> Registration<M> {
    /// Registers `bytes` bytes at `host`, held by `memory`, once in a process.
    ///
    /// # Safety
    /// The range is page-aligned and mapped as long as `memory` lives.
    pub unsafe fn new(
        device: &CudaDevice,
        memory: M,
        host: u64,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let host = super::host_size(host);
        // SAFETY: the caller's promise.
        let code = unsafe {
            (driver.cu_mem_host_register)(
                ptr::with_exposed_provenance_mut(host),
                bytes,
                PORTABLE_MAPPED,
            )
        };
        driver.check("cuMemHostRegister", code)?;
        Ok(Self { device: device.clone(), host, memory: ManuallyDrop::new(memory) })
    }

    /// What holds the range.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The range's address on `device`.
    pub fn address(&self, device: &CudaDevice) -> Result<u64, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut address = 0;
        let host = ptr::with_exposed_provenance_mut(self.host);
        // SAFETY: `address` is a place for the result; the range was registered as mapped for all
        // devices.
        let code = unsafe { (driver.cu_mem_host_get_device_pointer)(&raw mut address, host, 0) };
        driver.check("cuMemHostGetDevicePointer", code)?;
        Ok(address)
    }
}

impl<M> Drop for Registration<M> {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_unpin() else {
            return;
        };
        let driver = self.device.driver();
        let host = ptr::with_exposed_provenance_mut::<c_void>(self.host);
        // SAFETY: registered in `new`, unregistered only here; `memory` is dropped after this.
        driver.report("cuMemHostUnregister", unsafe { (driver.cu_mem_host_unregister)(host) });
        // SAFETY: dropped once, here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}

/// Rows on one side of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Of the first row.
    pub address: u64,
    /// Bytes from a row to the next.
    pub pitch: u64,
}

/// A copy of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    /// Where they go.
    pub to: Rows,
    /// Where they come from.
    pub from: Rows,
    /// How many.
    pub rows: u64,
    /// Bytes of each.
    pub width: u64,
}

impl RowCopy {
    /// The copy between addresses of the device.
    pub(super) fn described(&self) -> CUDA_MEMCPY2D {
        CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: ptr::null(),
            srcDevice: self.from.address,
            srcArray: ptr::null_mut(),
            srcPitch: super::host_size(self.from.pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: self.to.address,
            dstArray: ptr::null_mut(),
            dstPitch: super::host_size(self.to.pitch),
            WidthInBytes: super::host_size(self.width),
            Height: super::host_size(self.rows),
        }
    }

    /// Its bytes, where both sides' rows follow each other without gaps.
    fn dense(&self) -> Option<usize> {
        let Self { to, from, rows, width } = *self;
        (rows == 1 || (to.pitch == width && from.pitch == width))
            .then(|| super::host_size(rows * width))
    }
}

/// Copies rows from the device to registered memory at a host address.
///
/// # Safety
/// Both ranges stay until the copy is done; `device`'s context is current.
pub unsafe fn copy_out_async(
    device: &CudaDevice,
    rows: &RowCopy,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    let host: *mut c_void = ptr::with_exposed_provenance_mut(super::host_size(rows.to.address));
    if let Some(bytes) = rows.dense() {
        // SAFETY: the caller's promise.
        let code = unsafe { (driver.cu_memcpy_dtoh_async)(host, rows.from.address, bytes, stream) };
        return driver.check("cuMemcpyDtoHAsync", code);
    }
    let copy = CUDA_MEMCPY2D {
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        dstHost: host,
        ..rows.described()
    };
    // SAFETY: the caller's promise; the descriptor is read before the call returns.
    driver.check("cuMemcpy2DAsync", unsafe { (driver.cu_memcpy_2d_async)(&raw const copy, stream) })
}

/// Copies rows from registered memory at a host address to the device.
///
/// # Safety
/// As [`copy_out_async`].
pub unsafe fn copy_in_async(
    device: &CudaDevice,
    rows: &RowCopy,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    let host: *const c_void = ptr::with_exposed_provenance(super::host_size(rows.from.address));
    if let Some(bytes) = rows.dense() {
        // SAFETY: the caller's promise.
        let code = unsafe { (driver.cu_memcpy_htod_async)(rows.to.address, host, bytes, stream) };
        return driver.check("cuMemcpyHtoDAsync", code);
    }
    let copy = CUDA_MEMCPY2D {
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host,
        ..rows.described()
    };
    // SAFETY: the caller's promise; the descriptor is read before the call returns.
    driver.check("cuMemcpy2DAsync", unsafe { (driver.cu_memcpy_2d_async)(&raw const copy, stream) })
}

/// What a stream does with a word, after everything before it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOp {
    /// Waits until the word is `value` or at most 2^31 - 1 ahead of it, modulo 2^32.
    Await {
        /// Of the word.
        address: u64,
        /// What is waited for.
        value: u32,
    },
    /// Stores, after a barrier for all that the stream has done.
    Write {
        /// Of the word.
        address: u64,
        /// What is stored.
        value: u32,
    },
    /// As [`Write`](Self::Write), of 64 bits.
    WriteLong {
        /// Of the word.
        address: u64,
        /// What is stored.
        value: u64,
    },
}

/// `CU_STREAM_WAIT_VALUE_GEQ`: cyclic, `(i32)(word - value) >= 0`.
const AT_LEAST: u32 = 0;
/// The most operations of one batch.
const BATCH: usize = 32;

impl WordOp {
    fn described(self) -> CUstreamBatchMemOpParams {
        match self {
            Self::Await { address, value } => CUstreamBatchMemOpParams {
                waitValue: WaitValue {
                    operation: OpType::CU_STREAM_MEM_OP_WAIT_VALUE_32,
                    address,
                    __bindgen_anon_1: WaitWord { value64: u64::from(value) },
                    flags: AT_LEAST,
                    alias: 0,
                },
            },
            Self::Write { address, value } => {
                written(OpType::CU_STREAM_MEM_OP_WRITE_VALUE_32, address, u64::from(value))
            }
            Self::WriteLong { address, value } => {
                written(OpType::CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value)
            }
        }
    }
}

const fn written(operation: OpType, address: u64, value: u64) -> CUstreamBatchMemOpParams {
    let word = WriteWord { value64: value };
    // In a batch each has its barrier: without, the driver refuses it.
    CUstreamBatchMemOpParams {
        writeValue: WriteValue { operation, address, __bindgen_anon_1: word, flags: 0, alias: 0 },
    }
}

/// Does `ops` on `stream`, in order, in as few batches as possible.
///
/// # Safety
/// The words stay mapped until they were written or waited for; `device`'s context is current.
pub unsafe fn words_async(
    device: &CudaDevice,
    ops: impl IntoIterator<Item = WordOp>,
    stream: Handle,
) -> Result<(), CudaError> {
    let driver = device.driver();
    let mut ops = ops.into_iter().peekable();
    while let Some(&first) = ops.peek() {
        let mut batch = [first.described(); BATCH];
        let mut count = 0;
        for (place, op) in batch.iter_mut().zip(&mut ops) {
            *place = op.described();
            count += 1;
        }
        // SAFETY: the caller's promise; the batch is read before the call returns.
        let code = unsafe { (driver.cu_stream_batch_mem_op)(stream, count, batch.as_mut_ptr(), 0) };
        driver.check("cuStreamBatchMemOp", code)?;
    }
    Ok(())
}
