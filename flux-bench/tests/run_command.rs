//! `flux-bench run`: real operands give the right output file, and every failure gives a sentence, an exit status and no file.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with an input of small integers, whose product is exact in either type.
struct Case {
    folder: tempfile::TempDir,
    expected: Vec<f32>,
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
    fn new(dtype: Dtype) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (x, w) = (bytes(dtype, M), bytes(dtype, N));
        let tensors = [("x", TensorView::new(dtype, vec![M, K], &x).unwrap()), ("w", TensorView::new(dtype, vec![N, K], &w).unwrap())];
        std::fs::write(folder.path().join("in.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
        let dot = |row, col| (0..K).map(|k| element(row, k) * element(col, k)).sum();
        let expected = (0..M).flat_map(|row| (0..N).map(move |col| dot(row, col))).collect();
        Self { folder, expected }
    }

    fn input(&self) -> PathBuf {
        self.folder.path().join("in.safetensors")
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("out.safetensors")
    }

    fn words(&self, op: &str, ranks: &str, output: &Path) -> Vec<String> {
        let (input, output) = (self.input().display().to_string(), output.display().to_string());
        ["run", op, "--ranks", ranks, "--transport", "host", "--input", &input, "--output", &output].map(str::to_owned).to_vec()
    }

    fn run(&self, op: &str, ranks: &str) -> Output {
        program().args(self.words(op, ranks, &self.output())).output().unwrap()
    }

    /// The run fails, says `what`, and leaves nothing but the input and `also`.
    fn refused(&self, output: &Output, what: &str, also: &[&str]) {
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(what), "{error}");
        let mut names: Vec<String> =
            std::fs::read_dir(self.folder.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        let mut wanted: Vec<&str> = also.iter().copied().chain(["in.safetensors"]).collect();
        wanted.sort_unstable();
        assert_eq!(names, wanted);
    }
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_flux-bench"))
}

#[test]
fn both_ops_write_the_whole_product_in_both_types() {
    for (dtype, op, ranks) in [(Dtype::BF16, "ag-gemm", "4"), (Dtype::F16, "gemm-rs", "8"), (Dtype::F16, "ag-gemm", "1")] {
        let case = Case::new(dtype);
        let done = case.run(op, ranks);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let file = std::fs::read(case.output()).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let y = tensors.tensor("y").unwrap();
        assert_eq!((y.shape(), y.dtype()), ([M, N].as_slice(), dtype));
        let pairs = y.data().chunks_exact(2).map(|b| [b[0], b[1]]);
        let values: Vec<f32> = match dtype {
            Dtype::BF16 => pairs.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            _ => pairs.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        };
        assert_eq!(values, case.expected, "{op} on {ranks} ranks");
    }
}

#[test]
fn a_truncated_file_is_refused() {
    let case = Case::new(Dtype::BF16);
    let whole = std::fs::read(case.input()).unwrap();
    std::fs::write(case.input(), &whole[..whole.len() - 2]).unwrap();
    case.refused(&case.run("ag-gemm", "2"), "is not a whole safetensors file", &[]);
}

#[test]
fn an_input_that_is_missing_is_named() {
    let case = Case::new(Dtype::BF16);
    let mut words = case.words("ag-gemm", "2", &case.output());
    words[7] = case.folder.path().join("none.safetensors").display().to_string();
    case.refused(&program().args(words).output().unwrap(), "none.safetensors cannot be read: No such file", &[]);
}

#[test]
fn a_world_that_does_not_divide_the_operands_is_refused() {
    let case = Case::new(Dtype::BF16);
    case.refused(&case.run("ag-gemm", "16"), "m = 24 is not divisible by the world size 16: pad m to 32", &[]);
    case.refused(&case.run("gemm-rs", "3"), "k = 128 is not divisible by the world size 3", &[]);
    case.refused(&case.run("ag-gemm", "17"), "--ranks 17 is outside 1 to 16", &[]);
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_the_work() {
    let case = Case::new(Dtype::BF16);
    let folder = program().args(case.words("ag-gemm", "2", case.folder.path())).output().unwrap();
    case.refused(&folder, "is not a regular file", &[]);
    let missing = program().args(case.words("ag-gemm", "2", &case.folder.path().join("no/y.safetensors"))).output().unwrap();
    case.refused(&missing, "a file cannot be created in", &[]);
}

/// A limit on the size of files, with its signal ignored, makes writes fail half way, as a full disk does.
#[test]
fn a_disk_that_fills_up_leaves_the_old_output_alone() {
    let case = Case::new(Dtype::BF16);
    std::fs::write(case.output(), "old").unwrap();
    let words = case.words("ag-gemm", "2", &case.output());
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"trap "" XFSZ; ulimit -f 1; exec "$@""#, "sh", env!("CARGO_BIN_EXE_flux-bench")]).args(words);
    case.refused(&shell.output().unwrap(), "was not written", &["out.safetensors"]);
    assert_eq!(std::fs::read(case.output()).unwrap(), b"old");
}
