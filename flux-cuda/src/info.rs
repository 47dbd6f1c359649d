//! Lists devices without making a context.
//!
//! Invariant: an ordinal is valid in this process only; across processes a device is known by its
//! [`DeviceUuid`].

use super::CudaError;
use super::driver::{Driver, driver};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::ffi::c_int;
use std::fmt;
use std::str::FromStr;

/// A device's identity, the same in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (i, byte) in self.0.iter().enumerate() {
            let dash = if matches!(i, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

/// Text that is no [`DeviceUuid`].
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "not the UUID of a GPU: `GPU-` and 32 hexadecimal digits in groups of 8, 4, 4, 4 and 12 are \
     expected"
)]
pub struct ParseUuidError;

crate::error::debug_is_text!(ParseUuidError);

impl FromStr for DeviceUuid {
    type Err = ParseUuidError;

    fn from_str(text: &str) -> Result<Self, ParseUuidError> {
        let digits: String = text.strip_prefix("GPU-").ok_or(ParseUuidError)?.split('-').collect();
        let mut uuid = [0; 16];
        for (byte, at) in uuid.iter_mut().zip((0..).step_by(2)) {
            let pair = digits.get(at..at + 2).ok_or(ParseUuidError)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| ParseUuidError)?;
        }
        // One text for each identity: what is accepted is what is printed.
        Some(Self(uuid)).filter(|uuid| uuid.to_string() == text).ok_or(ParseUuidError)
    }
}

/// Which instructions a device has; later generations are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// The generation.
    pub major: u32,
    /// The variety of it.
    pub minor: u32,
}

impl ComputeCapability {
    /// `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// What the driver says of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number in this process.
    pub ordinal: u32,
    /// Identity across processes.
    pub uuid: DeviceUuid,
    /// PCI address, `domain:bus:device.function`.
    pub pci: String,
    /// Marketing name.
    pub name: String,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Bytes of L2 cache.
    pub l2_bytes: u64,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Compute capability.
    pub compute: ComputeCapability,
    /// Whether memory can be created and mapped apart (VMM).
    pub virtual_memory: bool,
    /// Whether such memory can be handed to another process as a file descriptor.
    pub posix_handles: bool,
}

/// The version of CUDA that the driver supports: `1000 * major + 10 * minor`.
pub fn driver_version() -> Result<u32, CudaError> {
    let driver = driver()?;
    let mut version = 0;
    // SAFETY: `version` is a place for the result.
    let code = unsafe { (driver.cu_driver_get_version)(&raw mut version) };
    driver.check("cuDriverGetVersion", code)?;
    Ok(version.unsigned_abs())
}

/// The number of CUDA devices that this process sees, at least 1; `CUDA_VISIBLE_DEVICES` may hide
/// some. Makes no context.
///
/// ```
/// // A rank for each GPU, or four on the host.
/// let ranks = flux_cuda::device_count().unwrap_or(4);
/// assert!(ranks > 0);
/// ```
///
/// # Errors
/// [`CudaError::Unavailable`] without a driver or a device, and [`CudaError::Call`] if the driver
/// refuses to count.
pub fn device_count() -> Result<u32, CudaError> {
    let driver = driver()?;
    let mut count = 0;
    // SAFETY: `count` is a place for the result.
    driver.check("cuDeviceGetCount", unsafe { (driver.cu_device_get_count)(&raw mut count) })?;
    Ok(count.unsigned_abs())
}

pub(super) fn device_handle(driver: &Driver, ordinal: u32) -> Result<c_int, CudaError> {
    let count = device_count()?;
    if ordinal >= count {
        return Err(CudaError::NoSuchDevice { ordinal, count });
    }
    let mut device = 0;
    // SAFETY: `device` is a place for the result; the ordinal is in range.
    driver.check("cuDeviceGet", unsafe {
        (driver.cu_device_get)(&raw mut device, ordinal.cast_signed())
    })?;
    Ok(device)
}

fn attribute(driver: &Driver, device: c_int, attribute: Attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: `value` is a place for the result; `device` came from `device_handle`.
    let code =
        unsafe { (driver.cu_device_get_attribute)(&raw mut value, attribute as c_int, device) };
    driver.check("cuDeviceGetAttribute", code)?;
    Ok(value.unsigned_abs())
}

/// A text of the driver's, which ends at the first zero.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// What the driver says of device `ordinal`.
pub fn device_info(ordinal: u32) -> Result<DeviceInfo, CudaError> {
    let driver = driver()?;
    let device = device_handle(driver, ordinal)?;
    let mut name = [0_u8; 128];
    // SAFETY: room for 128 characters, the last of which the driver leaves alone.
    driver.check("cuDeviceGetName", unsafe {
        (driver.cu_device_get_name)(name.as_mut_ptr().cast(), 127, device)
    })?;
    let mut pci = [0_u8; 32];
    // SAFETY: room for 32 characters, the last of which the driver leaves alone.
    driver.check("cuDeviceGetPCIBusId", unsafe {
        (driver.cu_device_get_pci_bus_id)(pci.as_mut_ptr().cast(), 31, device)
    })?;
    let mut uuid = [0; 16];
    // SAFETY: `uuid` has the 16 bytes of a CUuuid.
    let code = unsafe { (driver.cu_device_get_uuid)(&raw mut uuid, device) };
    driver.check("cuDeviceGetUuid", code)?;
    let mut memory = 0;
    // SAFETY: `memory` is a place for the result.
    driver.check("cuDeviceTotalMem", unsafe {
        (driver.cu_device_total_mem)(&raw mut memory, device)
    })?;
    let get = |a| attribute(driver, device, a);
    Ok(DeviceInfo {
        ordinal,
        uuid: DeviceUuid(uuid),
        pci: text(&pci),
        name: text(&name),
        sms: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: u64::from(get(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_bytes: memory as u64,
        compute: ComputeCapability::new(
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        virtual_memory: get(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
            != 0,
        posix_handles: get(
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        )? != 0,
    })
}

/// Whether `device` can access memory of `peer`, both ordinals of this process. True for itself.
pub fn can_access_peer(device: u32, peer: u32) -> Result<bool, CudaError> {
    let driver = driver()?;
    let (from, to) = (device_handle(driver, device)?, device_handle(driver, peer)?);
    if device == peer {
        return Ok(true);
    }
    let mut can = 0;
    // SAFETY: `can` is a place for the result; both handles came from `device_handle`.
    driver.check("cuDeviceCanAccessPeer", unsafe {
        (driver.cu_device_can_access_peer)(&raw mut can, from, to)
    })?;
    Ok(can != 0)
}

/// [`can_access_peer`] of all pairs: `matrix[device][peer]`.
pub fn peer_matrix() -> Result<Vec<Vec<bool>>, CudaError> {
    let count = device_count()?;
    (0..count)
        .map(|device| (0..count).map(|peer| can_access_peer(device, peer)).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_as_the_tools_print_it() {
        let uuid = DeviceUuid(std::array::from_fn(|i| u8::try_from(i).unwrap() * 17));
        assert_eq!(uuid.to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(uuid.to_string().parse(), Ok(uuid));
        for other in [
            "",
            "GPU-",
            "00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-AABBCCDDEEFF",
            "GPU-0011223344556677",
        ] {
            assert_eq!(other.parse::<DeviceUuid>(), Err(ParseUuidError), "{other}");
        }
    }

    #[test]
    fn text_ends_at_the_first_zero() {
        assert_eq!(text(b"H200\0X"), "H200");
        assert_eq!(text("H200 \u{b5}".as_bytes()), "H200 \u{b5}");
    }
}
