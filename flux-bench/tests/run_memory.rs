//! `flux-bench run` with an output that is large against the memory: little more than the output is
//! needed, and less gives an error.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;
use std::process::{Command, Output};

const MIB: usize = 1 << 20;
/// Columns of `x` and `w`: rows of 16 bytes on each of two ranks.
const K: usize = 16;
const RANKS: usize = 2;

/// Writes `x` [m, K] and `w` [n, K] of ones.
fn input(path: &Path, m: usize, n: usize) {
    let ones = |rows: usize| bf16::ONE.to_le_bytes().repeat(rows * K);
    let (x, w) = (ones(m), ones(n));
    let tensors = [("x", (m, &x)), ("w", (n, &w))]
        .map(|(name, (rows, bytes))| (name, TensorView::new(Dtype::BF16, vec![rows, K], bytes)));
    std::fs::write(
        path,
        safetensors::serialize(tensors.map(|(name, tensor)| (name, tensor.unwrap())), None)
            .unwrap(),
    )
    .unwrap();
}

/// Runs the op with so much address space.
fn run(folder: &Path, op: &str, limit: usize) -> Output {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", r#"ulimit -v "$0" && exec "$@""#])
        .arg((limit / 1024).to_string())
        .arg(env!("CARGO_BIN_EXE_flux-bench"));
    shell
        .args([
            "run",
            op,
            "--transport",
            "host",
            "--input",
            "in.st",
            "--output",
            "out.st",
            "--ranks",
        ])
        .arg(RANKS.to_string());
    // Each arena of the allocator would reserve 64 MiB of address space.
    shell.env("MALLOC_ARENA_MAX", "1").current_dir(folder).output().unwrap()
}

/// The address space that a run of a few rows needs, to `step`.
fn least(op: &str, step: usize) -> usize {
    let folder = tempfile::tempdir().unwrap();
    input(&folder.path().join("in.st"), 16, 64);
    let (mut too_little, mut enough) = (0, 4096 * MIB);
    while enough - too_little > step {
        let limit = usize::midpoint(too_little, enough);
        let success = run(folder.path(), op, limit).status.success();
        *if success { &mut enough } else { &mut too_little } = limit;
    }
    enough
}

#[test]
fn an_output_needs_its_own_size_beside_the_workspace_and_with_less_there_is_an_error() {
    // Half an output is an order more than runs differ by.
    let (m, n) = (8192, 4096);
    let output = m * n * size_of::<bf16>();
    // Two buffers of partial sums, from every other rank, of an owner's rows.
    let workspace = 2 * (RANKS - 1) * output;
    for (op, needed) in [("ag-gemm", output), ("gemm-rs", output + workspace)] {
        let folder = tempfile::tempdir().unwrap();
        input(&folder.path().join("in.st"), m, n);
        let (base, step) = (least(op, 2 * MIB), output / 2);
        for more in (step..).step_by(step) {
            let done = run(folder.path(), op, base + more);
            let said = String::from_utf8_lossy(&done.stderr);
            let names: Vec<_> = std::fs::read_dir(&folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect();
            if done.status.success() {
                let file = std::fs::read(folder.path().join("out.st")).unwrap();
                let tensors = SafeTensors::deserialize(&file).unwrap();
                let y = tensors.tensor("y").unwrap();
                let whole = y
                    .data()
                    .chunks_exact(2)
                    .all(|element| element == bf16::from_f32(K as f32).to_le_bytes());
                assert!(whole && y.shape() == [m, n] && names.len() == 2, "{op}, {more} more");
                break;
            }
            assert!(
                more < needed + output / 2,
                "{op} does not run with {} MiB more: {said}",
                more / MIB
            );
            assert_eq!(
                (done.status.code(), names.len()),
                (Some(1), 1),
                "{op}, {more} more: {said}"
            );
            assert!(
                !said.contains("memory allocation of") && !said.contains("panicked"),
                "{op}, {more} more: {said}"
            );
        }
    }
}
