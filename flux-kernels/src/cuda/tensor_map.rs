//! Tensor maps of the operands, for bulk loads and stores.
//!
//! Invariant: rows are cut into boxes of 128, 64, 32 or 16 bytes, swizzled but for the last.
//! Elements beyond an extent read as zero and are never written.

use super::error::LaunchError;
use crate::variant::Variant;
use cudarc::driver::sys::{
    self, CUresult, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill,
    CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};
use flux_core::DType;

/// Bytes of a box along the inner dimension, swizzled over all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BoxWidth {
    /// Eight rows meet different banks without a swizzle.
    Chunk = 16,
    Least = 32,
    Narrow = 64,
    Wide = 128,
}

impl BoxWidth {
    /// In which a kernel stores to `y`.
    pub(super) fn of(variant: Variant) -> Self {
        match variant.out_box().row_bytes {
            128 => Self::Wide,
            64 => Self::Narrow,
            32 => Self::Least,
            _ => Self::Chunk,
        }
    }

    const fn swizzle(self) -> CUtensorMapSwizzle {
        match self {
            Self::Chunk => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Self::Least => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Self::Narrow => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Self::Wide => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

/// An operand: outer dimensions, rows and columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct MappedOperand<'a> {
    /// Its name in errors.
    pub(super) name: &'static str,
    /// First element.
    pub(super) address: u64,
    /// Elements of a row.
    pub(super) cols: u32,
    /// Rows of one matrix.
    pub(super) rows: u32,
    /// Bytes between rows.
    pub(super) row_bytes: u64,
    /// The outer dimensions, from the inside.
    pub(super) outer: &'a [Outer],
    /// Rows of a box.
    pub(super) box_rows: u32,
    /// Width of a box.
    pub(super) box_width: BoxWidth,
    /// What a miss brings into L2.
    pub(super) fetch: Fetch,
}

/// An outer dimension.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outer {
    extent: u32,
    bytes: u64,
    boxed: u32,
}

impl Outer {
    /// `extent` matrices, `bytes` from one to the next, each with boxes of its own.
    pub(super) const fn new(extent: u32, bytes: u64) -> Self {
        Self { extent, bytes, boxed: 1 }
    }

    /// The same, with `boxed` of them in a box.
    pub(super) const fn boxed(self, boxed: u32) -> Self {
        Self { boxed, ..self }
    }
}

/// What a miss brings into L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetch {
    /// The line that is asked for, 128 bytes.
    Line,
    /// The line and its neighbour: the next step along a row.
    Pair,
}

impl Fetch {
    const fn promotion(self) -> CUtensorMapL2promotion {
        match self {
            Self::Line => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Self::Pair => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        }
    }
}

/// Most dimensions of a tensor map.
const MAX_RANK: usize = 5;

/// Encodes the map of a shape. Takes no driver lock and no device time.
pub(super) fn encode(dtype: DType, shape: &MappedOperand<'_>) -> Result<CUtensorMap, LaunchError> {
    let rank = 2 + shape.outer.len();
    debug_assert!(rank <= MAX_RANK, "{shape:?}");
    let mut dims = [1u64; MAX_RANK];
    let mut strides = [0u64; MAX_RANK - 1];
    let mut boxes = [1u32; MAX_RANK];
    (dims[0], dims[1]) = (u64::from(shape.cols), u64::from(shape.rows));
    (boxes[0], boxes[1]) = (shape.box_width as u32 / dtype.bytes() as u32, shape.box_rows);
    strides[0] = shape.row_bytes;
    for (i, &Outer { extent, bytes, boxed }) in shape.outer.iter().enumerate() {
        dims[2 + i] = u64::from(extent);
        strides[1 + i] = bytes;
        boxes[2 + i] = boxed;
    }
    let steps = [1u32; MAX_RANK];
    let kind = match dtype {
        DType::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::E4m3 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let mut map = CUtensorMap { opaque: [0; 16] };
    // SAFETY: all arrays have `rank` (strides: `rank - 1`) valid entries; the map is written, the
    // address only recorded.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            kind,
            rank as u32,
            shape.address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            shape.box_width.swizzle(),
            shape.fetch.promotion(),
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    if result == CUresult::CUDA_SUCCESS {
        return Ok(map);
    }
    Err(LaunchError::TensorMap {
        operand: shape.name,
        code: result as i32,
        address: shape.address,
        row_bytes: shape.row_bytes,
    })
}
