//! Operands in host or device memory.
//!
//! Invariant: a [`Buffer`] starts on a 16-byte border and is used only with the context that made
//! it.

use anyhow::Context;
use flux_kernels::Element;
use flux_transport::internal::cuda::DeviceBlock;
use std::marker::PhantomData;

/// An empty list with room for so many elements.
pub(crate) fn room<T>(elements: usize) -> anyhow::Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(elements)
        .with_context(|| format!("{} bytes of operands cannot be had", elements.saturating_mul(size_of::<T>())))?;
    Ok(list)
}

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
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn new(elements: usize) -> anyhow::Result<Self> {
        let count = elements.saturating_mul(size_of::<T>()).div_ceil(size_of::<u128>());
        let mut blocks = room(count)?;
        blocks.resize(count, 0);
        Ok(Self { blocks, elements, element: PhantomData })
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
            let mut buffer = HostBuffer::<bf16>::new(elements).unwrap();
            assert_eq!(buffer.elements().len(), elements);
            assert_eq!(buffer.elements().as_ptr().addr() % 16, 0);
            buffer.elements_mut()[elements - 1] = bf16::ONE;
            assert_eq!(buffer.elements()[elements - 1], bf16::ONE);
        }
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_that_says_how_much() {
        let error = HostBuffer::<bf16>::new(1 << 60).unwrap_err();
        assert_eq!(error.to_string(), format!("{} bytes of operands cannot be had", 1_u64 << 61));
        assert!(HostBuffer::<bf16>::new(usize::MAX).is_err());
    }
}
