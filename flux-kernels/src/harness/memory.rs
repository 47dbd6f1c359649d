//! Host memory for operands.
//!
//! Invariant: a [`HostBuffer`] starts on a 16-byte border, as the ops require.

use crate::TensorElement;
use std::marker::PhantomData;

/// There is not so much memory.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{bytes} bytes of memory cannot be had: the limit is `ulimit -v`, the container's or the \
     machine's"
)]
pub struct NoMemory {
    /// What was asked for.
    pub bytes: usize,
}

flux_core::debug_is_text!(NoMemory);

/// An empty list with room for so many elements of operands.
///
/// # Errors
/// [`NoMemory`].
pub fn room<T>(elements: usize) -> Result<Vec<T>, NoMemory> {
    let mut list = Vec::new();
    let bytes = elements.saturating_mul(size_of::<T>());
    list.try_reserve_exact(elements).map_err(|_| NoMemory { bytes })?;
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

impl<T: TensorElement> HostBuffer<T> {
    /// `elements` zeros.
    ///
    /// # Errors
    /// [`NoMemory`].
    pub fn new(elements: usize) -> Result<Self, NoMemory> {
        let count = elements.saturating_mul(size_of::<T>()).div_ceil(size_of::<u128>());
        let mut blocks = room(count)?;
        blocks.resize(count, 0);
        Ok(Self { blocks, elements, element: PhantomData })
    }

    /// How many elements.
    pub const fn len(&self) -> usize {
        self.elements
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.elements == 0
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
        assert_eq!(
            error.to_string(),
            format!(
                "{} bytes of memory cannot be had: the limit is `ulimit -v`, the container's or \
                 the machine's",
                1_u64 << 61
            )
        );
        assert!(HostBuffer::<bf16>::new(usize::MAX).is_err());
    }
}
