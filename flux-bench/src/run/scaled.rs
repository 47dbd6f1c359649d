//! Scales of 8-bit operands as files of public checkpoints name them.
//!
//! Invariant: scales are finer than the file's only where others are: one of a tensor is then the
//! scale of each row, or block.

use super::input::InputError;
use super::quantized::QuantizedX;
use crate::harness::data::Window;
use flux_core::numerics::SCALE_BLOCK;
use flux_core::{DType, Scales};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Of `w`: one, or one of each row.
pub(super) const WEIGHT_SCALE: &str = "weight_scale";
/// Of `w`: one of each 128 x 128.
pub(super) const WEIGHT_SCALE_INV: &str = "weight_scale_inv";
/// Of `x`: one, one of each row, or one of each 1 x 128.
pub(super) const INPUT_SCALE: &str = "input_scale";

const BLOCK: usize = SCALE_BLOCK as usize;

/// The scales of one operand, as a file has them.
#[derive(Debug)]
struct ScaleMatrix {
    values: Vec<f32>,
    form: Scales,
    /// Rows that share a scale of [`Scales::Block`], and scales of such rows.
    rows_each: usize,
    blocks: usize,
}

/// The scales of both.
#[derive(Debug)]
pub(super) struct ScalePair {
    form: Scales,
    x: ScaleMatrix,
    w: ScaleMatrix,
}

/// An operand's extents and its type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extents {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) dtype: DType,
}

impl ScaleMatrix {
    fn new(values: Vec<f32>, form: Scales, rows_each: usize, cols: usize) -> Self {
        Self { values, form, rows_each, blocks: cols.div_ceil(BLOCK) }
    }

    /// Of an element.
    fn at(&self, row: usize, col: usize) -> f32 {
        self.values[match self.form {
            Scales::None | Scales::Tensor => 0,
            Scales::Row => row,
            Scales::Block => row / self.rows_each * self.blocks + col / BLOCK,
        }]
    }

    /// Of windows of the operand, as an op with scales of this form takes them, row by row.
    fn of(&self, windows: impl IntoIterator<Item = Window>, form: Scales) -> Vec<f32> {
        let lines = |Window { row0, col0, rows, cols }: Window| {
            let (row_step, col_step) = match form {
                Scales::Block => (self.rows_each, BLOCK),
                _ => (1, cols as usize),
            };
            let [row0, col0] = [row0, col0].map(|first| first as usize);
            (row0..row0 + rows as usize).step_by(row_step).flat_map(move |row| {
                let cols = (col0..col0 + cols as usize).step_by(col_step);
                cols.map(move |col| self.at(row, col))
            })
        };
        if form == Scales::Tensor {
            return vec![self.values[0]];
        }
        windows.into_iter().flat_map(lines).collect()
    }
}

impl ScalePair {
    /// The scales of a file's `w` and of its `x`. Rows of `x` in 16 bits become an 8-bit operand, by
    /// the scale that the file has, or by scales of their own.
    pub(super) fn read(
        tensors: &SafeTensors<'_>,
        missing: impl Fn(&'static str) -> InputError,
        (x, bytes): (Extents, &[u8]),
        w: Extents,
    ) -> Result<(Self, Option<QuantizedX>), InputError> {
        let found = |name| tensors.tensor(name).ok().map(|tensor| (name, tensor));
        let of_w = match (found(WEIGHT_SCALE), found(WEIGHT_SCALE_INV)) {
            (Some(_), Some(_)) => return Err(InputError::TwoScales),
            (Some(whole), None) => {
                let of = "one for each row of w, or one for all";
                matrix(&whole, w, BLOCK, (&[Scales::Tensor, Scales::Row], of))?
            }
            (None, Some(blocks)) => {
                let of = "one for each 128 x 128 of w";
                matrix(&blocks, w, BLOCK, (&[Scales::Block], of))?
            }
            (None, None) => return Err(missing(WEIGHT_SCALE)),
        };
        let is_made = !x.dtype.is_quantized();
        let forms = if is_made {
            (&[Scales::Tensor][..], "one for all of x, which is quantised with it")
        } else {
            (&Scales::OF_QUANTIZED[..], "one for each 1 x 128 of x, for each row, or for all")
        };
        let given = found(INPUT_SCALE).map(|tensor| matrix(&tensor, x, 1, forms)).transpose()?;
        let (of_x, quantised) = match given {
            Some(given) if is_made => {
                let quantised = QuantizedX::new(bytes, x, Scales::Tensor, Some(given.values[0]))?;
                (given, Some(quantised))
            }
            Some(given) => (given, None),
            None if is_made => {
                let form = if of_w.form == Scales::Block { Scales::Block } else { Scales::Row };
                let quantised = QuantizedX::new(bytes, x, form, None)?;
                (ScaleMatrix::new(quantised.scales(x, form), form, 1, x.cols), Some(quantised))
            }
            None => return Err(missing(INPUT_SCALE)),
        };
        let form = match (of_x.form, of_w.form) {
            (Scales::Block, Scales::Row) => return Err(InputError::Forms),
            (Scales::Block, _) | (_, Scales::Block) => Scales::Block,
            (Scales::Tensor, Scales::Tensor) => Scales::Tensor,
            _ => Scales::Row,
        };
        Ok((Self { form, x: of_x, w: of_w }, quantised))
    }

    /// Of the op.
    pub(super) const fn form(&self) -> Scales {
        self.form
    }

    /// Those of a window of `x`.
    pub(super) fn of_x(&self, window: Window) -> Vec<f32> {
        self.x.of([window], self.form)
    }

    /// Those of windows of `w`.
    pub(super) fn of_w(&self, windows: impl IntoIterator<Item = Window>) -> Vec<f32> {
        self.w.of(windows, self.form)
    }
}

/// The scales of an operand, in one of these forms.
fn matrix(
    (name, tensor): &(&'static str, TensorView<'_>),
    Extents { rows, cols, .. }: Extents,
    rows_each: usize,
    (forms, of): (&[Scales], &'static str),
) -> Result<ScaleMatrix, InputError> {
    let shape = tensor.shape();
    let blocks = [rows.div_ceil(rows_each), cols.div_ceil(BLOCK)];
    let is = |form: &Scales| match form {
        Scales::None => false,
        Scales::Tensor => shape.iter().product::<usize>() == 1,
        Scales::Row => shape == [rows] || shape == [rows, 1],
        Scales::Block => shape == blocks,
    };
    let Some(&form) = forms.iter().find(|form| is(form)) else {
        let needed = match forms.last() {
            Some(Scales::Block) => blocks.to_vec(),
            Some(Scales::Row) => vec![rows, 1],
            _ => vec![1],
        };
        return Err(InputError::Shape { name, shape: shape.to_vec(), needed, of });
    };
    Ok(ScaleMatrix::new(values(name, tensor)?, form, rows_each, cols))
}

/// The values of scales, which are numbers of fp32 in any type.
fn values(name: &'static str, tensor: &TensorView<'_>) -> Result<Vec<f32>, InputError> {
    let data = tensor.data();
    let halves =
        |of: fn([u8; 2]) -> f32| data.as_chunks().0.iter().map(|&bytes| of(bytes)).collect();
    match tensor.dtype() {
        Dtype::F32 => {
            Ok(data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
        }
        Dtype::BF16 => Ok(halves(|bytes| bf16::from_le_bytes(bytes).to_f32())),
        Dtype::F16 => Ok(halves(|bytes| f16::from_le_bytes(bytes).to_f32())),
        other => Err(InputError::ScaleType { name, dtype: format!("{other:?}") }),
    }
}
