//! Where a rank computes, and what orders its work there.
//!
//! Invariant: a [`Stream::Cuda`] borrows its stream, or is made by who vouches for the handle.

use cudarc::driver::CudaStream;
use flux_cuda::{DeviceInfo, DeviceUuid};
use std::fmt;
use std::marker::PhantomData;
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
        /// What the driver says of it.
        info: Arc<DeviceInfo>,
    },
}

impl Device {
    /// The device's number in this process; `None` for the host. It says nothing in another.
    pub fn ordinal(&self) -> Option<u32> {
        self.info().map(|info| info.ordinal)
    }

    /// The device's identity across processes.
    pub fn uuid(&self) -> Option<DeviceUuid> {
        self.info().map(|info| info.uuid)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.info().map_or("host", |info| &info.name)
    }

    /// What the driver says of it.
    pub fn info(&self) -> Option<&DeviceInfo> {
        match self {
            Self::Host => None,
            Self::Cuda { info } => Some(info),
        }
    }
}

impl From<DeviceInfo> for Device {
    fn from(info: DeviceInfo) -> Self {
        Self::Cuda { info: Arc::new(info) }
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
/// device, which lives for `'s`.
///
/// ```no_run
/// use cudarc::driver::CudaContext;
/// use flux_transport::Stream;
/// let stream = CudaContext::new(0)?.new_stream()?;
/// let of_a_call = Stream::from(&stream);
/// assert!(of_a_call.raw().is_some());
/// # Ok::<(), cudarc::driver::DriverError>(())
/// ```
///
/// The handle of a stream that is gone does not compile:
///
/// ```compile_fail,E0597
/// use cudarc::driver::CudaContext;
/// use flux_transport::Stream;
/// let of_a_call = {
///     let stream = CudaContext::new(0)?.new_stream()?;
///     Stream::from(&stream)
/// };
/// assert!(of_a_call.raw().is_some());
/// # Ok::<(), cudarc::driver::DriverError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stream<'s> {
    /// The calling thread.
    Host,
    /// A `CUstream`.
    #[non_exhaustive]
    Cuda(usize, PhantomData<&'s ()>),
}

impl Stream<'_> {
    /// The stream with this `CUstream` handle.
    ///
    /// # Safety
    /// The handle is a stream of this process and stays one for as long as calls are made with it.
    pub const unsafe fn from_raw(stream: usize) -> Self {
        Self::Cuda(stream, PhantomData)
    }

    /// The `CUstream`, if it is one.
    pub const fn raw(self) -> Option<usize> {
        match self {
            Self::Host => None,
            Self::Cuda(stream, _) => Some(stream),
        }
    }
}

impl<'s> From<&'s CudaStream> for Stream<'s> {
    fn from(stream: &'s CudaStream) -> Self {
        Self::Cuda(stream.cu_stream().addr(), PhantomData)
    }
}

impl<'s> From<&'s Arc<CudaStream>> for Stream<'s> {
    fn from(stream: &'s Arc<CudaStream>) -> Self {
        Self::from(&**stream)
    }
}

/// Some whole GPU, for tests of what is made of it.
#[cfg(test)]
pub(crate) fn some_gpu() -> DeviceInfo {
    DeviceInfo {
        ordinal: 0,
        uuid: DeviceUuid([0; 16]),
        pci: "0000:17:00.0".to_owned(),
        name: "NVIDIA H200".to_owned(),
        sms: 132,
        l2_bytes: 0,
        memory_bytes: 0,
        compute: flux_cuda::ComputeCapability::new(9, 0),
        virtual_memory: true,
        posix_handles: true,
    }
}
