//! An input file whose product is known, and what its output must be.

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::PathBuf;

/// A folder with an input of small integers, whose product is exact in either type.
pub(crate) struct Case {
    pub(crate) folder: tempfile::TempDir,
    expected: Vec<f32>,
    dtype: Dtype,
}

const M: usize = 24;
const N: usize = 64;
const K: usize = 128;

/// The element of `x` or `w` at a position: -1, 0 or 1.
fn element(row: usize, col: usize) -> f32 {
    ((row * 7 + col * 3 + row * col) % 3) as f32 - 1.0
}

fn bytes(dtype: Dtype, rows: usize) -> Vec<u8> {
    let values = (0..rows).flat_map(|r| (0..K).map(move |c| element(r, c)));
    match dtype {
        Dtype::BF16 => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
        Dtype::F16 => values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
        other => panic!("{other:?}"),
    }
}

impl Case {
    pub(crate) fn new(dtype: Dtype) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (x, w) = (bytes(dtype, M), bytes(dtype, N));
        let tensors = [("x", TensorView::new(dtype, vec![M, K], &x).unwrap()), ("w", TensorView::new(dtype, vec![N, K], &w).unwrap())];
        std::fs::write(folder.path().join("in.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
        let dot = |row, col| (0..K).map(|k| element(row, k) * element(col, k)).sum();
        let expected = (0..M).flat_map(|row| (0..N).map(move |col| dot(row, col))).collect();
        Self { folder, expected, dtype }
    }

    pub(crate) fn input(&self) -> PathBuf {
        self.folder.path().join("in.safetensors")
    }

    pub(crate) fn output(&self) -> PathBuf {
        self.folder.path().join("out.safetensors")
    }

    /// The output holds the whole product, exactly.
    pub(crate) fn assert_product(&self, what: &str) {
        let file = std::fs::read(self.output()).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let y = tensors.tensor("y").unwrap();
        assert_eq!((y.shape(), y.dtype()), ([M, N].as_slice(), self.dtype));
        let pairs = y.data().chunks_exact(2).map(|b| [b[0], b[1]]);
        let values: Vec<f32> = match self.dtype {
            Dtype::BF16 => pairs.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            _ => pairs.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        };
        assert_eq!(values, self.expected, "{what}");
    }
}
