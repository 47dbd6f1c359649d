//! Operands as Python describes them.
//!
//! Invariant: a description that passes has at most two dimensions and contiguous rows; flux-ops
//! checks the rest.

use crate::error::Error;
use flux_ops::binding::NamedActivation;
use flux_ops::{
    DType, ElementType, Layout, Location, MAX_WEIGHTS, Numerics, Operand, Presence, RawTensor,
    Scales, WeightLayout,
};

/// The library of a caller's tensors, whose words errors use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Library {
    Torch,
    NumPy,
}

impl Library {
    /// How to make a dense tensor of one with other strides.
    const fn dense(self) -> &'static str {
        match self {
            Self::Torch => ".contiguous()",
            Self::NumPy => "numpy.ascontiguousarray",
        }
    }

    /// How to make a tensor of a view that is dense.
    const fn copy(self) -> &'static str {
        match self {
            Self::Torch => ".clone()",
            Self::NumPy => ".copy()",
        }
    }
}

/// Extents of a tensor of at most two dimensions; a vector is one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) dim: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// In elements.
    pub(crate) strides: [i64; 2],
    pub(crate) library: Library,
}

/// Describes an operand for flux-ops.
pub(crate) fn operand(
    kind: Operand,
    name: &'static str,
    address: u64,
    dtype: ElementType,
    location: Location,
    dims: &Dims,
) -> Result<RawTensor, Error> {
    let Dims { dim, rows, cols, strides: [row_stride, col_stride], library } = *dims;
    let wanted = if kind.extent().is_vector() { 1 } else { 2 };
    if dim != wanted {
        return Err(Error::operand(format!(
            "{name} has {dim} dimensions, and {wanted} are needed"
        )));
    }
    // Of an empty tensor, one row or one column a stride says nothing.
    let empty = rows == 0 || cols == 0;
    let strides =
        [(row_stride, rows), (col_stride, cols)].map(|(stride, extent)| (stride, extent > 1));
    let any =
        |wrong: fn(i64) -> bool| strides.iter().any(|&(stride, counts)| counts && wrong(stride));
    let (dense, copy) = (library.dense(), library.copy());
    let refused =
        |words: String| Err(Error::operand(format!("{name} is [{rows}, {cols}] {words}")));
    if !empty && any(|stride| stride == 0) {
        return refused(format!("whose elements repeat, as of an expanded tensor: call {dense}"));
    }
    if !empty && any(|stride| stride < 0) {
        return refused(format!("with negative strides, as of a reversed array: call {dense}"));
    }
    if !empty && cols > 1 && col_stride != 1 {
        return refused(format!(
            "with a stride of {col_stride} between the elements of a row, and 1 is needed: call \
             {dense}"
        ));
    }
    // Rows are read by vectors of 16 bytes, scales one by one.
    let (alignment, multiple) = match dtype {
        ElementType::Matrix(_) => (16, dtype.per_vector()),
        ElementType::F32 => (4, 1),
    };
    if !empty && !address.is_multiple_of(alignment) {
        return refused(format!(
            "and begins off a {alignment}-byte border, as a slice of a buffer may: call {copy}"
        ));
    }
    let padded = cols.is_multiple_of(multiple as usize) && row_stride % i64::from(multiple) != 0;
    if !empty && rows > 1 && padded {
        return refused(format!(
            "with rows {row_stride} elements apart, and multiples of {multiple} are needed: call \
             {copy}"
        ));
    }
    // Of one row the stride says nothing.
    let row_stride = if rows > 1 { usize::try_from(row_stride).unwrap_or(0) } else { cols };
    let layout = Layout::strided(rows, cols, row_stride);
    Ok(RawTensor { address, dtype, location, layout, available: layout.span() })
}

/// The form of scales with this number.
pub(crate) fn scales(number: u64) -> Result<Scales, Error> {
    let known = usize::try_from(number).ok().and_then(|at| Scales::ALL.get(at).copied());
    known.ok_or_else(|| {
        Error::operand(format!("scales = {number}: there are {} forms", Scales::ALL.len()))
    })
}

/// The element types of an op, whose output has another type than 8-bit operands alone.
pub(crate) fn numerics(operand: DType, scales: Scales, output: DType) -> Numerics {
    if operand.is_quantized() { Numerics::scaled(operand, scales, output) } else { operand.into() }
}

/// Rows that carry their scales: the `k` elements of each, and the scales behind them.
pub(crate) fn rows_and_scales(
    x: RawTensor,
    k: usize,
    numerics: Numerics,
) -> Result<(RawTensor, RawTensor), Error> {
    let RawTensor { address, layout, .. } = x;
    let wide = u32::try_from(k).unwrap_or(u32::MAX);
    let (count, bytes) = (numerics.scales.of_row(wide), numerics.scales.bytes_behind_row(wide));
    if layout.cols != k.saturating_add(bytes as usize) {
        return Err(Error::operand(format!(
            "x has rows of {} bytes, and {k} elements with {} scales behind them have {bytes} more",
            layout.cols, numerics.scales
        )));
    }
    let of_x = Layout::strided(layout.rows, k, layout.row_stride);
    let of_scales = Layout::strided(layout.rows, count as usize, layout.row_stride / 4);
    let scale = RawTensor {
        address: address + k as u64,
        dtype: ElementType::F32,
        layout: of_scales,
        available: of_scales.span(),
        ..x
    };
    Ok((RawTensor { layout: of_x, available: of_x.span(), ..x }, scale))
}

/// Describes a weight, `[n, k]`: stored so, or as `[k, n]`, of which it is the transposed view.
pub(crate) fn weight(
    name: &'static str,
    address: u64,
    dtype: ElementType,
    location: Location,
    dims: &Dims,
) -> Result<Weight, Error> {
    let Dims { dim, rows, cols, strides: [row_stride, col_stride], library } = *dims;
    let is_transposed = dim == 2 && rows > 1 && cols > 1 && row_stride == 1 && col_stride != 1;
    let (stored, layout) = if is_transposed {
        (
            Dims { dim, rows: cols, cols: rows, strides: [col_stride, row_stride], library },
            WeightLayout::Kn,
        )
    } else {
        (*dims, WeightLayout::Nk)
    };
    Ok(Weight {
        stored: operand(Operand::W, name, address, dtype, location, &stored)?,
        layout,
        extents: [rows, cols],
    })
}

/// A weight of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight {
    /// As it lies in memory.
    pub(crate) stored: RawTensor,
    pub(crate) layout: WeightLayout,
    /// Rows and columns of `[n, k]`, of this rank.
    pub(crate) extents: [usize; 2],
}

/// The name of an operand in Python: of a call with one weight, or of the weight `index` of several.
pub(crate) fn name(operand: Operand, index: usize, weights: usize) -> &'static str {
    const WEIGHTS: [&str; MAX_WEIGHTS] = ["weight[0]", "weight[1]", "weight[2]", "weight[3]"];
    const SCALES: [&str; MAX_WEIGHTS] = ["scale_b[0]", "scale_b[1]", "scale_b[2]", "scale_b[3]"];
    const RESULTS: [&str; MAX_WEIGHTS] = ["out[0]", "out[1]", "out[2]", "out[3]"];
    match (operand, weights > 1) {
        (Operand::W, false) => "weight",
        (Operand::W, true) => WEIGHTS[index],
        (Operand::ScaleX, _) => "scale_a",
        (Operand::ScaleW, false) => "scale_b",
        (Operand::ScaleW, true) => SCALES[index],
        (Operand::Y, false) => "out",
        (Operand::Y, true) => RESULTS[index],
        (other, false) => other.name(0),
        (other, true) => other.counted_name(index),
    }
}

/// The operands that a call may bring beside `x` and weights, in the order of arguments.
pub(crate) fn further_inputs() -> impl Iterator<Item = Operand> {
    let is_further =
        |operand: &Operand| operand.presence() != Presence::Always && !operand.is_output();
    Operand::ALL.into_iter().filter(is_further)
}

/// The activation with this number.
pub(crate) fn activation(number: u64) -> Result<NamedActivation, Error> {
    let known = usize::try_from(number).ok().and_then(NamedActivation::numbered);
    known.ok_or_else(|| {
        Error::operand(format!("activation = {number}: there are {}", NamedActivation::ALL.len()))
    })
}
