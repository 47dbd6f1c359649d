//! Operands: borrowed views of row-major matrices in host or device memory.
//!
//! Invariant: the layout of a view fits the memory that it borrows; its first element and rows lie
//! on 16-byte borders. Each call checks how views fit the op: shape, location, stream, overlap.

mod error;
mod layout;
#[cfg(test)]
mod tests;

pub use error::TensorError;
pub use layout::Layout;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use flux_core::{ElementType, Scales};
use flux_kernels::{QuantizedElement, TensorElement};
use std::fmt;
use std::marker::PhantomData;

/// Where a view's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// Memory of this process.
    Host,
    /// Memory of the CUDA device with this ordinal in this process.
    Cuda(u32),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host memory"),
            Self::Cuda(ordinal) => write!(f, "CUDA device {ordinal}"),
        }
    }
}

/// Another framework's description of a tensor, for [`TensorRef::from_raw`] and
/// [`TensorMut::from_raw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// Address of the first element.
    pub address: u64,
    /// Element type.
    pub dtype: ElementType,
    /// Where the memory is.
    pub location: Location,
    /// Extents, in elements.
    pub layout: Layout,
    /// Elements that may be accessed from `address` on.
    pub available: usize,
}

/// What a call needs to know of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) address: u64,
    pub(crate) layout: Layout,
    pub(crate) dtype: ElementType,
    pub(crate) location: Location,
    /// Handle of the stream on which earlier uses were awaited, where the memory tracks its uses.
    pub(crate) ordered_on: Option<usize>,
    /// Whether the location is the caller's claim alone.
    pub(crate) claimed: bool,
    /// Bytes of the memory from the address on, where it is borrowed as a whole.
    pub(crate) borrowed_bytes: Option<u64>,
}

impl View {
    pub(crate) fn from_raw(raw: RawTensor) -> Result<Self, TensorError> {
        let RawTensor { address, dtype, location, layout, available } = raw;
        layout.check(dtype, address, available)?;
        let (ordered_on, borrowed_bytes) = (None, None);
        let view =
            Self { address, layout, dtype, location, ordered_on, claimed: true, borrowed_bytes };
        let bytes = view.span_bytes();
        match address.checked_add(bytes) {
            Some(_) => Ok(view),
            None => Err(TensorError::BeyondAddresses { address, bytes }),
        }
    }

    fn host<T: TensorElement>(
        first: *const T,
        available: usize,
        layout: Layout,
    ) -> Result<Self, TensorError> {
        // Exposed: an executor makes slices from the address again.
        let (address, dtype) = (first.expose_provenance() as u64, T::TYPE);
        layout.check(dtype, address, available)?;
        let borrowed_bytes = Some((available * size_of::<T>()) as u64);
        let (location, ordered_on) = (Location::Host, None);
        Ok(Self { address, layout, dtype, location, ordered_on, claimed: false, borrowed_bytes })
    }

    fn cuda<T: TensorElement>(
        address: u64,
        available: usize,
        owner: &CudaStream,
        stream: &CudaStream,
        layout: Layout,
    ) -> Result<Self, TensorError> {
        let dtype = T::TYPE;
        layout.check(dtype, address, available)?;
        let location = Location::Cuda(u32::try_from(owner.context().ordinal()).unwrap_or(u32::MAX));
        let ordered_on = Some(stream.cu_stream().addr());
        let borrowed_bytes = Some((available * size_of::<T>()) as u64);
        Ok(Self { address, layout, dtype, location, ordered_on, claimed: false, borrowed_bytes })
    }

    /// Bytes from a row to the next.
    pub(crate) const fn row_bytes(&self) -> u64 {
        (self.layout.row_stride * self.dtype.bytes()) as u64
    }

    /// Bytes from the first element to behind the last.
    const fn span_bytes(&self) -> u64 {
        (self.layout.span() * self.dtype.bytes()) as u64
    }

    /// Addresses from the first element to behind the last.
    pub(crate) const fn bytes(&self) -> std::ops::Range<u64> {
        self.address..self.address + self.span_bytes()
    }
}

/// A description of memory with elements of another type than `T` is no view of it.
fn from_raw<T: TensorElement>(raw: RawTensor) -> Result<View, TensorError> {
    if raw.dtype == T::TYPE {
        View::from_raw(raw)
    } else {
        Err(TensorError::DType { expected: T::TYPE, found: raw.dtype })
    }
}

/// A matrix that a call reads: `[rows, cols]`, row-major, each row contiguous.
///
/// ```
/// use flux_ops::{Layout, TensorRef};
/// use half::bf16;
/// let memory = vec![bf16::ONE; 4 * 72];
/// let dense = TensorRef::host(&memory, (4, 72))?;
/// let left_part = TensorRef::host(&memory, Layout::strided(4, 64, 72))?;
/// assert_eq!((dense.layout().cols, left_part.layout().cols), (72, 64));
/// # Ok::<(), flux_ops::TensorError>(())
/// ```
#[derive(Debug)]
pub struct TensorRef<'a, T> {
    view: View,
    // Dropped with the view, after the call: records the use in the event that guards the memory.
    _used: Option<SyncOnDrop<'a>>,
    memory: PhantomData<&'a [T]>,
}

/// A matrix that a call writes: `[rows, cols]`, row-major, each row contiguous. Elements between
/// rows are left alone.
#[derive(Debug)]
pub struct TensorMut<'a, T> {
    view: View,
    // As in `TensorRef`.
    _used: Option<SyncOnDrop<'a>>,
    memory: PhantomData<&'a mut [T]>,
}

impl<'a, T: TensorElement> TensorRef<'a, T> {
    /// A view of host memory.
    ///
    /// # Errors
    /// [`TensorError`]: an empty layout, a row stride that is too short or no multiple of 16 bytes,
    /// too little memory, or an address that is no multiple of 16.
    pub fn host(memory: &'a [T], layout: impl Into<Layout>) -> Result<Self, TensorError> {
        let view = View::host(memory.as_ptr(), memory.len(), layout.into())?;
        Ok(Self { view, _used: None, memory: PhantomData })
    }

    /// A view of device memory that cudarc owns, read on `stream`, which must be the stream of the
    /// call.
    ///
    /// Where cudarc tracks uses, `stream` waits here for writes on other streams, and the view's
    /// end records the read. Memory of a captured graph must be allocated with tracking off.
    ///
    /// # Errors
    /// As [`host`](Self::host).
    pub fn cuda<S: DevicePtr<T>>(
        memory: &'a S,
        layout: impl Into<Layout>,
        stream: &'a CudaStream,
    ) -> Result<Self, TensorError> {
        let (address, used) = memory.device_ptr(stream);
        let view = View::cuda::<T>(address, memory.len(), memory.stream(), stream, layout.into())?;
        Ok(Self { view, _used: Some(used), memory: PhantomData })
    }

    /// A view of memory that another framework owns.
    ///
    /// # Safety
    /// `raw.available` elements from `raw.address` on are readable at `raw.location`, and nothing
    /// writes them, until the call that uses the view has finished on its stream.
    ///
    /// # Errors
    /// As [`host`](Self::host), and memory of another element type.
    pub unsafe fn from_raw(raw: RawTensor) -> Result<Self, TensorError> {
        Ok(Self { view: from_raw::<T>(raw)?, _used: None, memory: PhantomData })
    }
}

impl<'a, X: QuantizedElement> TensorRef<'a, X> {
    /// Of rows with their scales behind them, of as many bytes as
    /// [`Problem::gathered_columns`](flux_core::Problem::gathered_columns) counts: the `k` elements
    /// of each row, and the scales. An AllGather-GEMM takes rows like this, as they travel
    /// together.
    ///
    /// ```
    /// use flux_ops::{F8E4M3, Scales, TensorRef};
    /// let (rows, k) = (4, 64);
    /// // A scale of four bytes, and what fills a cache line.
    /// let memory = vec![F8E4M3::from_bits(0); rows * 128];
    /// let (x, scale) = TensorRef::host(&memory, (rows, 128))?.with_scales(k, Scales::Row)?;
    /// assert_eq!((x.layout().cols, scale.layout().cols), (64, 1));
    /// assert_eq!((x.layout().row_stride, scale.layout().row_stride), (128, 32));
    /// # Ok::<(), flux_ops::TensorError>(())
    /// ```
    ///
    /// # Errors
    /// [`TensorError::NoScales`]: rows that are shorter than `k` elements and what is behind them
    /// ([`Scales::bytes_behind_row`]).
    pub fn with_scales(
        self,
        k: usize,
        scales: Scales,
    ) -> Result<(Self, TensorRef<'a, f32>), TensorError> {
        let Self { view, _used: used, memory } = self;
        let Layout { rows, cols, row_stride } = view.layout;
        let wide = u32::try_from(k).unwrap_or(u32::MAX);
        let count = scales.of_row(wide) as usize;
        let needed = k.saturating_add(scales.bytes_behind_row(wide) as usize);
        if count == 0 || cols < needed || !k.is_multiple_of(size_of::<f32>()) {
            return Err(TensorError::NoScales { cols, k, needed, scales });
        }
        let x = View { layout: Layout::strided(rows, k, row_stride), ..view };
        let scale = View {
            address: view.address + k as u64,
            layout: Layout::strided(rows, count, row_stride / size_of::<f32>()),
            dtype: ElementType::F32,
            borrowed_bytes: view.borrowed_bytes.map(|bytes| bytes.saturating_sub(k as u64)),
            ..view
        };
        let scale = TensorRef { view: scale, _used: None, memory: PhantomData };
        Ok((Self { view: x, _used: used, memory }, scale))
    }
}

impl<'a, T: TensorElement> TensorMut<'a, T> {
    /// A view of host memory.
    ///
    /// # Errors
    /// As [`TensorRef::host`].
    pub fn host(memory: &'a mut [T], layout: impl Into<Layout>) -> Result<Self, TensorError> {
        let view = View::host(memory.as_mut_ptr(), memory.len(), layout.into())?;
        Ok(Self { view, _used: None, memory: PhantomData })
    }

    /// A view of device memory that cudarc owns, written on `stream`; see [`TensorRef::cuda`].
    ///
    /// # Errors
    /// As [`TensorRef::cuda`].
    pub fn cuda<S: DevicePtrMut<T>>(
        memory: &'a mut S,
        layout: impl Into<Layout>,
        stream: &'a CudaStream,
    ) -> Result<Self, TensorError> {
        let (available, owner) = (memory.len(), std::sync::Arc::clone(memory.stream()));
        let (address, used) = memory.device_ptr_mut(stream);
        let view = View::cuda::<T>(address, available, &owner, stream, layout.into())?;
        Ok(Self { view, _used: Some(used), memory: PhantomData })
    }

    /// A view of memory that another framework owns.
    ///
    /// # Safety
    /// `raw.available` elements from `raw.address` on are writable at `raw.location`, and nothing
    /// else accesses them, until the call that uses the view has finished on its stream.
    ///
    /// # Errors
    /// As [`TensorRef::from_raw`].
    pub unsafe fn from_raw(raw: RawTensor) -> Result<Self, TensorError> {
        Ok(Self { view: from_raw::<T>(raw)?, _used: None, memory: PhantomData })
    }
}

impl<T> TensorRef<'_, T> {
    /// Extents, in elements.
    pub const fn layout(&self) -> Layout {
        self.view.layout
    }
    /// Where the memory is.
    pub const fn location(&self) -> Location {
        self.view.location
    }
    pub(crate) const fn view(&self) -> View {
        self.view
    }
}

impl<T> TensorMut<'_, T> {
    /// Extents, in elements.
    pub const fn layout(&self) -> Layout {
        self.view.layout
    }
    /// Where the memory is.
    pub const fn location(&self) -> Location {
        self.view.location
    }
    pub(crate) const fn view(&self) -> View {
        self.view
    }
}
