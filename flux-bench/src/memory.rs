//! Operands' memory, wherever the rank works.
//!
//! Invariant: a [`Buffer`] starts on a 16-byte border, as the ops require, and is used only with the [`Site`](crate::site::Site) that made it.

use flux_kernels::Element;
use flux_transport::cuda::DeviceBlock;
use std::marker::PhantomData;

/// Elements in host memory.
#[derive(Debug)]
pub struct HostBuffer<T> {
    // 16-byte aligned, which `Vec<T>` is only by chance.
    blocks: Vec<u128>,
    elements: usize,
    element: PhantomData<T>,
}

impl<T: Element> HostBuffer<T> {
    /// `elements` zeros.
    pub fn new(elements: usize) -> Self {
        let blocks = vec![0; (elements * size_of::<T>()).div_ceil(size_of::<u128>())];
        Self { blocks, elements, element: PhantomData }
    }

    /// The elements.
    pub fn elements(&self) -> &[T] {
        &bytemuck::cast_slice(&self.blocks)[..self.elements]
    }

    /// The elements.
    pub fn elements_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.blocks)[..self.elements]
    }
}

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

impl<T> Buffer<T> {
    /// How many elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.elements,
            Self::Cuda { elements, .. } => *elements,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn host_buffers_are_aligned_and_exact() {
        for elements in [1, 7, 8, 9, 1000] {
            let mut buffer = HostBuffer::<bf16>::new(elements);
            assert_eq!(buffer.elements().len(), elements);
            assert_eq!(buffer.elements().as_ptr().addr() % 16, 0);
            buffer.elements_mut()[elements - 1] = bf16::ONE;
            assert_eq!(buffer.elements()[elements - 1], bf16::ONE);
        }
    }
}
