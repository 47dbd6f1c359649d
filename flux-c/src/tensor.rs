//! Operands as C describes them.

use crate::error::Error;
use crate::handle::{Structure, given};
use crate::options::ELEMENTS;
use flux_ops::binding::words;
use flux_ops::{DType, ElementType, Layout, Location, Operand, RawTensor};
use std::ffi::c_void;

/// A row-major matrix of the caller's. A vector is one row.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flux_tensor {
    /// Address of the first element: a multiple of 16, of FLUX_FP32 of 4. NULL is possible without
    /// rows.
    pub data: *mut c_void,
    /// Rows.
    pub rows: usize,
    /// Columns: consecutive elements of a row.
    pub cols: usize,
    /// Elements from a row to the next, in bytes a multiple of 16, of FLUX_FP32 of 4; 0 for `cols`.
    pub row_stride: usize,
    /// A flux_dtype.
    pub dtype: i32,
}

/// The operands of one call on one rank. NULL for those that the op was created without. Memory
/// between rows is not touched, and outputs share no memory with other operands.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flux_operands {
    /// sizeof(flux_operands).
    pub size: usize,
    /// Input: see flux_op_kind.
    pub x: *const flux_tensor,
    /// Weight: see flux_op_kind. Of an op with several weights `w`, `scale_w`, `bias` and `y` are
    /// arrays, with an element for each weight.
    pub w: *const flux_tensor,
    /// With scales: of FLUX_FP32, see flux_scales. Of FLUX_ALL_GATHER_GEMM scales of rows and of
    /// blocks lie behind the `k` elements of each row of `x`, which travel with them. Each row has
    /// memory up to a multiple of 128 bytes, all of which is read.
    pub scale_x: *const flux_tensor,
    /// With scales: of FLUX_FP32, see flux_scales.
    pub scale_w: *const flux_tensor,
    /// With FLUX_OP_BIAS: one row, a value for each column of `y`; with gates `n_r` values, one for
    /// each of this rank's rows of the weight `[n, k]`.
    pub bias: *const flux_tensor,
    /// With FLUX_OP_RESIDUAL: of the shape of `y`, and it may be the memory of `y`.
    pub residual: *const flux_tensor,
    /// With FLUX_OP_RMS_NORM: one row, a factor for each column of `y`.
    pub gain: *const flux_tensor,
    /// With norm_scales of FLUX_SCALES_TENSOR: the scale of `y_norm`, [1, 1] of FLUX_FP32.
    pub norm_scale: *const flux_tensor,
    /// The result, which is overwritten: see flux_op_kind.
    pub y: *const flux_tensor,
    /// With FLUX_OP_RMS_NORM: the normalised rows, of the shape of `y`; overwritten. With
    /// norm_scales of rows or blocks the scales lie behind the `n` codes of each row, which has a
    /// column for each byte of both, up to a multiple of 128.
    pub y_norm: *const flux_tensor,
    /// With norm_scales of rows or blocks: where they go, in place of behind the rows of `y_norm`;
    /// or NULL. Of FLUX_FP32, overwritten: [1, rows] or [n/128, rows], with a column where there
    /// are no rows.
    pub y_norm_scale: *const flux_tensor,
    /// Of FLUX_ALL_GATHER_GEMM: where all rows of `x` go, [m, k], overwritten; or NULL.
    pub x_full: *const flux_tensor,
    /// Elements of `w`, `scale_w`, `bias` and `y`: those of the op's columns. 0 for one.
    pub weight_count: usize,
    /// 1 where the weights are there before the work ahead of the call on its stream begins, else 0.
    /// On Hopper the call then loads the first of them while the kernel ahead ends. Whoever changes
    /// weights waits for the device before the next call of this kind.
    pub constant_weights: usize,
}

// SAFETY: sizes and pointers.
unsafe impl Structure for flux_operands {
    const NAME: &'static str = "operands";
}

impl flux_operands {
    /// The field of an operand.
    pub(crate) const fn tensor(&self, operand: Operand) -> *const flux_tensor {
        match operand {
            Operand::X => self.x,
            Operand::W => self.w,
            Operand::ScaleX => self.scale_x,
            Operand::ScaleW => self.scale_w,
            Operand::Bias => self.bias,
            Operand::Residual => self.residual,
            Operand::Gain => self.gain,
            Operand::Y => self.y,
            Operand::NormScale => self.norm_scale,
            Operand::YNorm => self.y_norm,
            Operand::YNormScale => self.y_norm_scale,
            Operand::XFull => self.x_full,
        }
    }
}

/// The element type with this number, of memory.
fn element(name: &str, number: i32) -> Result<ElementType, Error> {
    let known = ELEMENTS.into_iter().find(|&(known, _)| known as i32 == number);
    known.map(|(_, element)| element).ok_or_else(|| {
        let known = words::list(ELEMENTS.map(|(known, _)| format!("{known:?}")), "or");
        Error::argument(format!("{name} = {number} is no flux_dtype: give {known}"))
    })
}

/// The element type with this number, of matrices.
pub(crate) fn dtype(name: &str, number: i32) -> Result<DType, Error> {
    match element(name, number)? {
        ElementType::Matrix(dtype) => Ok(dtype),
        ElementType::F32 => {
            let matrices = ELEMENTS.into_iter().filter(|(_, of)| *of != ElementType::F32);
            let known = words::list(matrices.map(|(known, _)| format!("{known:?}")), "or");
            Err(Error::argument(format!(
                "{name} is FLUX_FP32, of which no op multiplies operands: give {known}"
            )))
        }
    }
}

/// Describes an operand for flux-ops.
///
/// # Safety
/// `tensor` is NULL or a tensor of the caller's.
pub(crate) unsafe fn operand(
    name: &str,
    tensor: *const flux_tensor,
    location: Location,
) -> Result<RawTensor, Error> {
    given(&format!("operands.{name}"), tensor)?;
    // SAFETY: as the caller vouches; any bits are a tensor, which C code may not have aligned.
    described(&format!("operands.{name}->dtype"), unsafe { tensor.read_unaligned() }, location)
}

/// As [`operand`], of a weight: one of as many elements of an array as there are weights.
///
/// # Safety
/// `tensors` is NULL or an array of the caller's with these elements.
pub(crate) unsafe fn of_weight(
    name: &str,
    tensors: *const flux_tensor,
    weight: usize,
    weights: usize,
    location: Location,
) -> Result<RawTensor, Error> {
    if weights == 1 {
        // SAFETY: as the caller vouches.
        return unsafe { operand(name, tensors, location) };
    }
    given(&format!("operands.{name}"), tensors)?;
    // SAFETY: the caller vouches for this element; any bits are a tensor.
    let tensor = unsafe { tensors.add(weight).read_unaligned() };
    described(&format!("operands.{name}[{weight}].dtype"), tensor, location)
}

fn described(
    dtype_name: &str,
    tensor: flux_tensor,
    location: Location,
) -> Result<RawTensor, Error> {
    let flux_tensor { data, rows, cols, row_stride, dtype: number } = tensor;
    let dtype = element(dtype_name, number)?;
    // Of one row the stride says nothing, but how much room for scales is behind it.
    let has_scales = matches!(dtype, ElementType::Matrix(of) if of.is_quantized());
    let says_nothing = rows <= 1 && !has_scales;
    let row_stride = if row_stride == 0 || says_nothing { cols } else { row_stride };
    let layout = Layout::strided(rows, cols, row_stride);
    Ok(RawTensor {
        address: data.expose_provenance() as u64,
        dtype,
        location,
        layout,
        available: layout.span(),
    })
}
