//! Device memory with separate pages and addresses, so that devices and processes can share pages.
//!
//! Invariant: an [`Allocation`] and each [`Mapping`] hold a reference to the pages. Sizes are
//! multiples of the granularity.

use super::{CudaDevice, CudaError, host_size};
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// Whether pages can leave the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handles {
    /// They cannot.
    None,
    /// As a file descriptor.
    PosixFd,
}

impl Handles {
    /// Its `CUmemAllocationHandleType`.
    const fn kind(self) -> c_uint {
        match self {
            Self::None => 0,
            Self::PosixFd => 1,
        }
    }
}

/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
const RECOMMENDED: c_uint = 1;

/// `CUmemLocation`. Declared here, as cudarc's fields differ with the version of CUDA.
#[repr(C)]
#[derive(Debug)]
struct Location {
    kind: c_uint,
    ordinal: c_int,
}

impl Location {
    fn device(ordinal: u32) -> Self {
        const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
        Self { kind: CU_MEM_LOCATION_TYPE_DEVICE, ordinal: ordinal.cast_signed() }
    }
}

/// `CUmemAllocationProp`: what pages are made of.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PageProperties {
    kind: c_uint,
    handles: c_uint,
    location: Location,
    /// Of Windows.
    handle_attributes: *mut c_void,
    /// No compression, no GPUDirect RDMA, no usage.
    flags: [u8; 8],
}

impl PageProperties {
    fn pinned(device: &CudaDevice, handles: Handles) -> Self {
        const CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
        Self {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            handles: handles.kind(),
            location: Location::device(device.ordinal()),
            handle_attributes: ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`: a device that may read and write a mapping.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Access {
    location: Location,
    flags: c_uint,
}

impl Access {
    fn read_and_write(ordinal: u32) -> Self {
        const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;
        Self { location: Location::device(ordinal), flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
    }
}

// The sizes of cuda.h on 64-bit hosts.
const _: () = assert!(size_of::<PageProperties>() == 32 && size_of::<Access>() == 12);

/// `bytes` rounded up to a multiple of `granularity`; `None` on overflow or zero bytes.
pub fn round_up(bytes: u64, granularity: u64) -> Option<u64> {
    if bytes == 0 || granularity == 0 { None } else { bytes.checked_next_multiple_of(granularity) }
}

/// Pages of device memory, own or imported.
#[derive(Debug)]
pub struct Allocation {
    device: CudaDevice,
    handle: u64,
    bytes: u64,
}

impl Allocation {
    /// The multiple that sizes on `device` are rounded up to.
    pub fn granularity(device: &CudaDevice, handles: Handles) -> Result<u64, CudaError> {
        let driver = device.driver();
        let properties = PageProperties::pinned(device, handles);
        let mut granularity = 0;
        // SAFETY: `granularity` is a place for the result; the properties are read before the call
        // returns.
        let code = unsafe {
            (driver.cu_mem_get_allocation_granularity)(
                &raw mut granularity,
                &raw const properties,
                RECOMMENDED,
            )
        };
        driver.check("cuMemGetAllocationGranularity", code)?;
        Ok(granularity as u64)
    }

    /// Makes `bytes` bytes of pages on `device`; `bytes` is a multiple of the granularity.
    pub fn new(device: &CudaDevice, bytes: u64, handles: Handles) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let properties = PageProperties::pinned(device, handles);
        let mut handle = 0;
        // SAFETY: `handle` is a place for the result; the properties are read before the call
        // returns.
        let code = unsafe {
            (driver.cu_mem_create)(&raw mut handle, host_size(bytes), &raw const properties, 0)
        };
        driver.check("cuMemCreate", code)?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// A descriptor of the pages, for another process. Each open descriptor keeps the pages.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let driver = self.device.driver();
        let mut fd: c_int = -1;
        // SAFETY: for this kind of handle the driver stores an `int`; the allocation was made with
        // the kind.
        let code = unsafe {
            (driver.cu_mem_export_to_shareable_handle)(
                (&raw mut fd).cast(),
                self.handle,
                Handles::PosixFd.kind(),
                0,
            )
        };
        driver.check("cuMemExportToShareableHandle", code)?;
        // SAFETY: the driver has just opened it for this process, which nobody else knows of.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Imports the pages behind another process's descriptor. Mapping more than there is fails in
    /// the driver.
    pub fn import(device: &CudaDevice, fd: BorrowedFd<'_>, bytes: u64) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut handle = 0;
        // The driver takes the descriptor's number in place of a pointer.
        let number = ptr::without_provenance_mut(fd.as_raw_fd().unsigned_abs() as usize);
        // SAFETY: `handle` is a place for the result; the descriptor is open during the call, which
        // keeps no hold of it.
        let code = unsafe {
            (driver.cu_mem_import_from_shareable_handle)(
                &raw mut handle,
                number,
                Handles::PosixFd.kind(),
            )
        };
        driver.check("cuMemImportFromShareableHandle", code)?;
        Ok(Self { device: device.clone(), handle, bytes })
    }

    /// Maps the pages at a fresh address, for the devices of this process with these ordinals.
    pub fn map(&self, ordinals: &[u32]) -> Result<Mapping, CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        let bytes = host_size(self.bytes);
        let mut address = 0;
        // SAFETY: `address` is a place for the result; no alignment, place or flag is asked for.
        driver.check("cuMemAddressReserve", unsafe {
            (driver.cu_mem_address_reserve)(&raw mut address, bytes, 0, 0, 0)
        })?;
        // From here on the destructor undoes what was done.
        let mut mapping =
            Mapping { device: self.device.clone(), address, bytes: self.bytes, mapped: false };
        // SAFETY: the range was just reserved and is as long as the pages; offset and flags must
        // be 0.
        let code = unsafe { (driver.cu_mem_map)(address, bytes, 0, self.handle, 0) };
        driver.check("cuMemMap", code)?;
        mapping.mapped = true;
        let mut access = Vec::with_capacity(ordinals.len());
        for (i, &ordinal) in ordinals.iter().enumerate() {
            if !ordinals[..i].contains(&ordinal) {
                access.push(Access::read_and_write(ordinal));
            }
        }
        // SAFETY: the range is mapped; the descriptors are read before the call returns.
        let code =
            unsafe { (driver.cu_mem_set_access)(address, bytes, access.as_ptr(), access.len()) };
        driver.check("cuMemSetAccess", code)?;
        Ok(mapping)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_free() else {
            return;
        };
        let driver = self.device.driver();
        // SAFETY: made or imported once, released only here; mappings keep the pages.
        driver.report("cuMemRelease", unsafe { (driver.cu_mem_release)(self.handle) });
    }
}

/// Pages in the address space of some devices.
#[derive(Debug)]
pub struct Mapping {
    device: CudaDevice,
    address: u64,
    bytes: u64,
    mapped: bool,
}

impl Mapping {
    /// Its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_free() else {
            return;
        };
        let driver = self.device.driver();
        if self.mapped {
            // SAFETY: mapped in `Allocation::map`, unmapped only here; the owner of the mapping has
            // drained what uses it.
            driver.report("cuMemUnmap", unsafe {
                (driver.cu_mem_unmap)(self.address, host_size(self.bytes))
            });
        }
        // SAFETY: reserved in `Allocation::map`, freed only here, and no longer mapped.
        driver.report("cuMemAddressFree", unsafe {
            (driver.cu_mem_address_free)(self.address, host_size(self.bytes))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_round_up_to_the_granularity() {
        let two_mib = 2 << 20;
        assert_eq!(round_up(1, two_mib), Some(two_mib));
        assert_eq!(round_up(two_mib, two_mib), Some(two_mib));
        assert_eq!(round_up(two_mib + 1, two_mib), Some(2 * two_mib));
        assert_eq!(round_up(0, two_mib), None);
        assert_eq!(round_up(u64::MAX, two_mib), None);
    }
}
