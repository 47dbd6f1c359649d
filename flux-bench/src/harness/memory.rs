//! Operands in host or device memory.
//!
//! Invariant: a [`Buffer`] starts on a 16-byte border and is used only with the context that made
//! it.

use flux_cuda::DeviceBlock;
use flux_kernels::TensorElement;
use flux_kernels::harness::HostBuffer;

/// Elements in host or device memory.
#[derive(Debug)]
pub enum Buffer<T> {
    /// In this process's memory.
    Host(HostBuffer<T>),
    /// In the memory of the rank's device.
    Cuda {
        /// The memory.
        block: DeviceBlock,
        /// How many elements.
        elements: usize,
    },
}

impl<T: TensorElement> Buffer<T> {
    /// How many elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Cuda { elements, .. } => *elements,
        }
    }

    /// Where it lies, to be read and written: in host memory or on the rank's device.
    pub(crate) fn address(&mut self) -> u64 {
        match self {
            Self::Host(buffer) => buffer.elements_mut().as_mut_ptr().expose_provenance() as u64,
            Self::Cuda { block, .. } => block.address(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
