//! Where a rank computes, and what orders its work there.
//!
//! Invariant: a [`Stream::Cuda`] is only made by who vouches for the handle.

use crate::cuda::{self, CudaError, DeviceInfo, DeviceUuid};
use std::fmt;
use std::sync::Arc;

/// Where a rank's tensors and workspace lie.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The host's memory.
    Host,
    /// A CUDA device.
    #[non_exhaustive]
    Cuda {
        /// Its number in this process; says nothing in another.
        ordinal: u32,
        /// What the driver says of it.
        info: Arc<DeviceInfo>,
    },
}

impl Device {
    /// CUDA device `ordinal` of this process.
    ///
    /// # Errors
    /// No CUDA, or no such device.
    pub fn cuda(ordinal: u32) -> Result<Self, CudaError> {
        cuda::device_info(ordinal).map(Self::from)
    }

    /// The device's number in this process; `None` for the host.
    pub fn ordinal(&self) -> Option<u32> {
        self.info().map(|info| info.ordinal)
    }

    /// The device's identity across processes.
    pub fn uuid(&self) -> Option<DeviceUuid> {
        self.info().map(|info| info.uuid)
    }

    /// Its PCI address.
    pub fn pci(&self) -> Option<&str> {
        self.info().map(|info| info.pci.as_str())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.info().map_or("host", |info| &info.name)
    }

    /// What the driver says of it.
    pub fn info(&self) -> Option<&DeviceInfo> {
        match self {
            Self::Host => None,
            Self::Cuda { info, .. } => Some(info),
        }
    }
}

impl From<DeviceInfo> for Device {
    fn from(info: DeviceInfo) -> Self {
        Self::Cuda { ordinal: info.ordinal, info: Arc::new(info) }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.uuid() == other.uuid()
    }
}

impl Eq for Device {}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.info() {
            None => f.write_str("host"),
            Some(info) => write!(f, "cuda:{} ({}, {})", info.ordinal, info.name, info.pci),
        }
    }
}

/// What orders a call's work: nothing on the host, where calls are synchronous; a stream on a
/// device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stream {
    /// The calling thread.
    Host,
    /// A `CUstream`.
    #[non_exhaustive]
    Cuda(usize),
}

impl Stream {
    /// The stream with this `CUstream` handle.
    ///
    /// # Safety
    /// The handle is a stream of this process and stays one for as long as calls are made with it.
    pub const unsafe fn from_raw(stream: usize) -> Self {
        Self::Cuda(stream)
    }

    /// The `CUstream`, if it is one.
    pub const fn raw(self) -> Option<usize> {
        match self {
            Self::Host => None,
            Self::Cuda(stream) => Some(stream),
        }
    }
}

/// The caller keeps the stream while calls are made with it.
impl From<&cudarc::driver::CudaStream> for Stream {
    fn from(stream: &cudarc::driver::CudaStream) -> Self {
        Self::Cuda(stream.cu_stream() as usize)
    }
}
