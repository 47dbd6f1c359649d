//! Operands as Python describes them.
//!
//! Invariant: a description that passes has at most two dimensions and contiguous rows; flux-ops
//! checks the rest.

use crate::error::Error;
use flux_ops::binding::NamedActivation;
use flux_ops::{DType, Layout, Location, MAX_WEIGHTS, RawTensor, WeightLayout};

/// Extents of a tensor of at most two dimensions; a vector is one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    pub(crate) dim: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// In elements.
    pub(crate) strides: [i64; 2],
}

/// Describes an operand for flux-ops.
pub(crate) fn operand(
    name: &'static str,
    address: u64,
    dtype: DType,
    location: Location,
    dims: &Dims,
) -> Result<RawTensor, Error> {
    let Dims { dim, rows, cols, strides: [row_stride, col_stride] } = *dims;
    let wanted = if name == "gain" || name.starts_with("bias") { 1 } else { 2 };
    if dim != wanted {
        return Err(Error::operand(format!(
            "{name} has {dim} dimensions, and {wanted} are needed"
        )));
    }
    // Without rows a stride says nothing.
    if rows > 0 && cols > 1 && col_stride != 1 {
        return Err(Error::operand(format!(
            "{name} is [{rows}, {cols}] with a stride of {col_stride} between the elements of a \
             row, and 1 is needed: call .contiguous()"
        )));
    }
    // Of one row the stride says nothing.
    let row_stride = if rows > 1 { usize::try_from(row_stride).unwrap_or(0) } else { cols };
    let layout = Layout::strided(rows, cols, row_stride);
    Ok(RawTensor { address, dtype, location, layout, available: layout.span() })
}

/// Describes a weight, `[n, k]`: stored so, or as `[k, n]`, of which it is the transposed view.
pub(crate) fn weight(
    name: &'static str,
    address: u64,
    dtype: DType,
    location: Location,
    dims: &Dims,
) -> Result<Weight, Error> {
    let Dims { dim, rows, cols, strides: [row_stride, col_stride] } = *dims;
    let is_transposed = dim == 2 && rows > 1 && cols > 1 && row_stride == 1 && col_stride != 1;
    let (stored, layout) = if is_transposed {
        (Dims { dim, rows: cols, cols: rows, strides: [col_stride, row_stride] }, WeightLayout::Kn)
    } else {
        (*dims, WeightLayout::Nk)
    };
    Ok(Weight {
        stored: operand(name, address, dtype, location, &stored)?,
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

/// Names of a weight, its bias and its result: those of one, or of the weight `index` of several.
pub(crate) fn names(index: usize, weights: usize) -> [&'static str; 3] {
    const SEVERAL: [[&str; 3]; MAX_WEIGHTS] = [
        ["weight[0]", "bias[0]", "out[0]"],
        ["weight[1]", "bias[1]", "out[1]"],
        ["weight[2]", "bias[2]", "out[2]"],
        ["weight[3]", "bias[3]", "out[3]"],
    ];
    SEVERAL.get(index).filter(|_| weights > 1).copied().unwrap_or(["weight", "bias", "out"])
}

/// The activation with this number.
pub(crate) fn activation(number: u64) -> Result<NamedActivation, Error> {
    let known = usize::try_from(number).ok().and_then(NamedActivation::numbered);
    known.ok_or_else(|| {
        Error::operand(format!("activation = {number}: there are {}", NamedActivation::ALL.len()))
    })
}
