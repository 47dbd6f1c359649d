//! An input file whose product is known, and what its output must be.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::PathBuf;

/// A folder with an input of small integers, whose product is exact in either type.
pub(crate) struct Case {
    pub(crate) folder: tempfile::TempDir,
    expected: Vec<f32>,
    /// Columns of `y`.
    cols: usize,
    dtype: Dtype,
}

const M: usize = 24;
const N: usize = 64;
const K: usize = 128;

/// The element of `x` or `w` at a position: -1, 0 or 1.
fn element(row: usize, col: usize) -> f32 {
    ((row * 7 + col * 3 + row * col) % 3) as f32 - 1.0
}

fn bytes_of(dtype: Dtype, value: f32) -> [u8; 2] {
    match dtype {
        Dtype::BF16 => bf16::from_f32(value).to_le_bytes(),
        Dtype::F16 => f16::from_f32(value).to_le_bytes(),
        other => panic!("{other:?}"),
    }
}

fn bytes(dtype: Dtype, rows: usize) -> Vec<u8> {
    (0..rows)
        .flat_map(|row| (0..K).flat_map(move |col| bytes_of(dtype, element(row, col))))
        .collect()
}

/// The element of the bias of a column of `y`.
fn bias(col: usize) -> f32 {
    (col % 5) as f32 - 2.0
}

/// The element of a norm's gain.
fn gain(col: usize) -> f32 {
    (col % 3) as f32 - 0.5
}

impl Case {
    pub(crate) fn new(dtype: Dtype) -> Self {
        Self::written(dtype, &[])
    }

    /// With a bias, and a tensor that nothing uses.
    pub(crate) fn with_bias(dtype: Dtype) -> Self {
        let bias: Vec<u8> = (0..N).flat_map(|col| bytes_of(dtype, bias(col))).collect();
        let more =
            ["bias", "scale"].map(|name| (name, TensorView::new(dtype, vec![N], &bias).unwrap()));
        let mut case = Self::written(dtype, &more);
        for (at, value) in case.expected.iter_mut().enumerate() {
            *value += self::bias(at % N);
        }
        case
    }

    /// With a residual and a gain.
    pub(crate) fn with_residual(dtype: Dtype) -> Self {
        let bytes = |count: usize, value: fn(usize) -> f32| -> Vec<u8> {
            (0..count).flat_map(|at| bytes_of(dtype, value(at))).collect()
        };
        let (residual, gain) = (bytes(M * N, bias), bytes(N, gain));
        let more = [("residual", vec![M, N], &residual), ("gain", vec![N], &gain)];
        let more =
            more.map(|(name, shape, bytes)| (name, TensorView::new(dtype, shape, bytes).unwrap()));
        let mut case = Self::written(dtype, &more);
        for (at, value) in case.expected.iter_mut().enumerate() {
            *value += bias(at);
        }
        case
    }

    /// Whose product has gates, halves of its columns or every other, that are rectified.
    pub(crate) fn gated(mut self, interleaved: bool) -> Self {
        self.cols = N / 2;
        let gated = |row: &[f32]| {
            let row = row.to_vec();
            (0..N / 2).map(move |col| {
                let (gate, up) =
                    if interleaved { (2 * col, 2 * col + 1) } else { (col, N / 2 + col) };
                row[gate].max(0.0) * row[up]
            })
        };
        let rounded = |value| bf16::from_f32(value).to_f32();
        self.expected = self.expected.chunks(N).flat_map(gated).map(rounded).collect();
        self
    }

    /// Whose product is to have nothing below 0.
    pub(crate) fn rectified(mut self) -> Self {
        self.expected.iter_mut().for_each(|value| *value = value.max(0.0));
        self
    }

    fn written(dtype: Dtype, more: &[(&str, TensorView<'_>)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (x, w) = (bytes(dtype, M), bytes(dtype, N));
        let tensors = [
            ("x", TensorView::new(dtype, vec![M, K], &x).unwrap()),
            ("w", TensorView::new(dtype, vec![N, K], &w).unwrap()),
        ];
        let tensors = tensors.iter().chain(more).map(|(name, tensor)| (*name, tensor));
        std::fs::write(
            folder.path().join("in.safetensors"),
            safetensors::serialize(tensors, None).unwrap(),
        )
        .unwrap();
        let dot = |row, col| (0..K).map(|k| element(row, k) * element(col, k)).sum();
        let expected = (0..M).flat_map(|row| (0..N).map(move |col| dot(row, col))).collect();
        Self { folder, expected, cols: N, dtype }
    }

    pub(crate) fn input(&self) -> PathBuf {
        self.folder.path().join("in.safetensors")
    }

    pub(crate) fn output(&self) -> PathBuf {
        self.folder.path().join("out.safetensors")
    }

    /// The output holds the whole product, exactly.
    pub(crate) fn assert_product(&self, what: &str) {
        assert_eq!(self.output_of("y"), self.expected, "{what}");
    }

    /// The output holds its rows over their mean size, times the gain, within a rounding of bf16.
    pub(crate) fn assert_norm(&self, eps: f32) {
        let rows = self.expected.chunks(N).flat_map(|row| {
            let size = (row.iter().map(|y| y * y).sum::<f32>() / N as f32 + eps).sqrt();
            row.iter().enumerate().map(move |(col, y)| y / size * gain(col))
        });
        for (found, expected) in self.output_of("y_norm").into_iter().zip(rows) {
            assert!((found - expected).abs() <= expected.abs() / 128.0, "{found}, not {expected}");
        }
    }

    fn output_of(&self, name: &str) -> Vec<f32> {
        let file = std::fs::read(self.output()).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!((tensor.shape(), tensor.dtype()), ([M, self.cols].as_slice(), self.dtype));
        let pairs = tensor.data().chunks_exact(2).map(|b| [b[0], b[1]]);
        match self.dtype {
            Dtype::BF16 => pairs.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            _ => pairs.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        }
    }
}
