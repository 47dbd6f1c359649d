//! Memory where a rank works: host memory, or a CUDA device's. A framework has this already;
//! examples and tests need it for both.

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use flux_ops::{Layout, TensorElement, TensorMut, TensorRef};
use flux_transport::{Communicator, Stream};
use std::error::Error;
use std::sync::Arc;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Where a rank works, and what orders its work there.
#[derive(Debug)]
pub(crate) enum Device {
    Host,
    Cuda(Arc<CudaStream>),
}

/// Memory of a device.
#[derive(Debug)]
pub(crate) enum Memory<T> {
    Host(Vec<T>),
    Cuda(CudaSlice<T>),
}

impl Device {
    /// Where `comm` works.
    pub(crate) fn of(comm: &Communicator) -> Result<Self> {
        Ok(match comm.device().ordinal() {
            None => Self::Host,
            Some(ordinal) => Self::Cuda(CudaContext::new(ordinal as usize)?.new_stream()?),
        })
    }

    /// The stream of this rank's calls.
    pub(crate) fn stream(&self) -> Stream<'_> {
        match self {
            Self::Host => Stream::Host,
            Self::Cuda(stream) => Stream::from(stream),
        }
    }

    /// Copies to the device.
    pub(crate) fn put<T: TensorElement + DeviceRepr>(&self, elements: Vec<T>) -> Result<Memory<T>> {
        Ok(match self {
            Self::Host => Memory::Host(elements),
            Self::Cuda(stream) => Memory::Cuda(stream.clone_htod(&elements)?),
        })
    }

    /// Copies back, when all that is on the stream is done.
    pub(crate) fn get<T: TensorElement + DeviceRepr>(&self, memory: &Memory<T>) -> Result<Vec<T>> {
        match (memory, self) {
            (Memory::Host(memory), Self::Host) => Ok(memory.clone()),
            (Memory::Cuda(memory), Self::Cuda(stream)) => {
                // Apart from the copy: to pageable memory it waits with the context locked, and
                // ranks that share a device could not launch what it waits for.
                stream.synchronize()?;
                Ok(stream.clone_dtoh(memory)?)
            }
            _ => Err("memory of another device".into()),
        }
    }

    /// Overwrites memory, in the stream's order.
    pub(crate) fn write<T: TensorElement + DeviceRepr>(
        &self,
        memory: &mut Memory<T>,
        elements: &[T],
    ) -> Result<()> {
        match (memory, self) {
            (Memory::Host(memory), Self::Host) => memory.copy_from_slice(elements),
            (Memory::Cuda(memory), Self::Cuda(stream)) => stream.memcpy_htod(elements, memory)?,
            _ => return Err("memory of another device".into()),
        }
        Ok(())
    }

    /// Address of the first element.
    pub(crate) fn address<T: TensorElement + DeviceRepr>(&self, memory: &Memory<T>) -> Result<u64> {
        match (memory, self) {
            (Memory::Host(memory), Self::Host) => Ok(memory.as_ptr().expose_provenance() as u64),
            (Memory::Cuda(memory), Self::Cuda(stream)) => Ok(memory.device_ptr(stream).0),
            _ => Err("memory of another device".into()),
        }
    }

    /// An operand that a call on this device's stream reads.
    pub(crate) fn view<'a, T: TensorElement>(
        &'a self,
        memory: &'a Memory<T>,
        layout: impl Into<Layout>,
    ) -> Result<TensorRef<'a, T>> {
        Ok(match (memory, self) {
            (Memory::Host(memory), Self::Host) => TensorRef::host(memory, layout)?,
            (Memory::Cuda(memory), Self::Cuda(stream)) => TensorRef::cuda(memory, layout, stream)?,
            _ => return Err("memory of another device".into()),
        })
    }

    /// An operand that a call on this device's stream writes.
    pub(crate) fn view_mut<'a, T: TensorElement>(
        &'a self,
        memory: &'a mut Memory<T>,
        layout: impl Into<Layout>,
    ) -> Result<TensorMut<'a, T>> {
        Ok(match (memory, self) {
            (Memory::Host(memory), Self::Host) => TensorMut::host(memory, layout)?,
            (Memory::Cuda(memory), Self::Cuda(stream)) => TensorMut::cuda(memory, layout, stream)?,
            _ => return Err("memory of another device".into()),
        })
    }
}
