//! `flux-bench run` on files of the form of public checkpoints in 8 bits, beside fp64.

use flux_core::{DType, Numerics, OpKind, Problem, Rank, Scales, WorldSize};
use flux_kernels::F8E4M3;
use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;
use std::process::{Command, Output};

const M: usize = 12;
const N: usize = 256;
const K: usize = 512;
const BLOCK: usize = 128;

/// A number in -1 to 1 by its place.
fn random(seed: u64, at: usize) -> f32 {
    let mut z = seed ^ (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z >> 40) as f32) / (1 << 23) as f32 - 1.0
}

/// A matrix of a file.
struct Tensor {
    name: &'static str,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    fn codes(name: &'static str, [rows, cols]: [usize; 2], codes: &[F8E4M3]) -> Self {
        let bytes = codes.iter().map(F8E4M3::to_bits).collect();
        Self { name, dtype: Dtype::F8_E4M3, shape: vec![rows, cols], bytes }
    }

    fn bf16(name: &'static str, shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        Self { name, dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
    }

    fn f32(name: &'static str, shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { name, dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }
}

fn write(folder: &Path, tensors: &[Tensor]) {
    let views = tensors
        .iter()
        .map(|of| (of.name, TensorView::new(of.dtype, of.shape.clone(), &of.bytes).unwrap()));
    std::fs::write(folder.join("in"), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn run(folder: &Path, op: OpKind, ranks: u32, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .current_dir(folder)
        .args(["run", op.name(), "--transport", "host", "--input", "in", "--output", "out"])
        .args(["--ranks", &ranks.to_string()])
        .args(more)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Codes of a matrix, dequantised by the scale of each element.
fn dequantised(codes: &[F8E4M3], cols: usize, scale: impl Fn(usize, usize) -> f32) -> Vec<f64> {
    let value = |(at, code): (usize, &F8E4M3)| {
        f64::from(code.to_f32()) * f64::from(scale(at / cols, at % cols))
    };
    codes.iter().enumerate().map(value).collect()
}

/// What a server makes of rows of 16 bits: codes, and the scale of each group of columns.
fn quantised(x: &[f32], group: usize) -> (Vec<F8E4M3>, Vec<f32>) {
    let groups = x.chunks(group);
    let scales: Vec<f32> = groups
        .clone()
        .map(|group| group.iter().fold(0.0_f32, |most, v| most.max(v.abs())) / 448.0)
        .collect();
    let of = |(group, scale): (&[f32], &f32)| {
        let inverse = scale.recip();
        group.iter().map(move |v| F8E4M3::from_f32(v * inverse)).collect::<Vec<_>>()
    };
    (groups.zip(&scales).flat_map(of).collect(), scales)
}

/// The output is the product of the dequantised operands, within the roundings of a sum of fp32 and
/// of results and partial sums in bf16.
fn assert_product(folder: &Path, op: OpKind, ranks: u32, x: &[f64], w: &[f64], what: &str) {
    let world = WorldSize::new(ranks).unwrap();
    let numerics = Numerics::e4m3(Scales::Block, DType::Bf16);
    let problem = Problem::new(op, M, N, K, numerics, world).unwrap();
    let inner = |rank| problem.inner(Rank::new(rank));
    let sources = if op.gathers() { 1 } else { ranks };
    let parts: Vec<_> =
        (0..sources).map(|rank| inner(rank).start as usize..inner(rank).end as usize).collect();
    let file = std::fs::read(folder.join("out")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let y = tensors.tensor("y").unwrap();
    assert_eq!((y.shape(), y.dtype()), ([M, N].as_slice(), Dtype::BF16), "{what}");
    let u = DType::Bf16.unit_roundoff();
    for (at, bytes) in y.data().chunks_exact(2).enumerate() {
        let found = f64::from(bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32());
        let (row, col) = (&x[at / N * K..][..K], &w[at % N * K..][..K]);
        let (mut exact, mut magnitudes, mut sent) = (0.0, 0.0, 0.0);
        for part in &parts {
            let products = row[part.clone()].iter().zip(&col[part.clone()]).map(|(x, w)| x * w);
            let sum: f64 = products.clone().sum();
            magnitudes += products.map(f64::abs).sum::<f64>();
            exact += sum;
            sent += if ranks > 1 && !op.gathers() { sum.abs() } else { 0.0 };
        }
        let inner = (K as f64 + 4.0) * 2_f64.powi(-24) * magnitudes + u * sent;
        let bound = inner + u * (exact.abs() + inner);
        assert!((found - exact).abs() <= bound, "{what}, {at}: {found}, not {exact} +- {bound}");
    }
}

fn weight() -> Vec<F8E4M3> {
    (0..N * K).map(|at| F8E4M3::from_f32(448.0 * random(1, at))).collect()
}

fn rows() -> Vec<f32> {
    (0..M * K).map(|at| bf16::from_f32(random(2, at)).to_f32()).collect()
}

/// Scales that are no powers of two, and exact in bf16.
fn scales(seed: u64, count: usize) -> Vec<f32> {
    (0..count).map(|at| bf16::from_f32(0.01 + 0.005 * random(seed, at)).to_f32()).collect()
}

#[test]
fn rows_of_16_bits_are_quantised_as_a_server_does_it() {
    let (w, x) = (weight(), rows());
    let (of_one, of_rows, of_blocks) =
        (scales(3, 1), scales(4, N), scales(5, N / BLOCK * (K / BLOCK)));
    let block = |row: usize, col: usize| of_blocks[row / BLOCK * (K / BLOCK) + col / BLOCK];
    let given = 1.0 / 300.0;
    let static_codes: Vec<_> = x.iter().map(|v| F8E4M3::from_f32(v * (1.0_f32 / given))).collect();
    let (row_codes, row_scales) = quantised(&x, K);
    let (block_codes, block_scales) = quantised(&x, BLOCK);
    let of_static = dequantised(&static_codes, K, |_, _| given);
    let of_row = dequantised(&row_codes, K, |row, _| row_scales[row]);
    let of_block =
        dequantised(&block_codes, K, |row, col| block_scales[row * (K / BLOCK) + col / BLOCK]);
    let cases = [
        // A scale of a tensor, static: its name and shape as in per-tensor checkpoints.
        (
            Tensor::f32("weight_scale", &[], &of_one),
            Some(given),
            &of_static,
            dequantised(&w, K, |_, _| of_one[0]),
        ),
        // Of rows, in the type of a checkpoint's other tensors, with scales of each token.
        (
            Tensor::bf16("weight_scale", &[N, 1], &of_rows),
            None,
            &of_row,
            dequantised(&w, K, |row, _| of_rows[row]),
        ),
        (
            Tensor::f32("weight_scale", &[N], &of_rows),
            Some(given),
            &of_static,
            dequantised(&w, K, |row, _| of_rows[row]),
        ),
        (
            Tensor::f32("weight_scale", &[1], &of_one),
            None,
            &of_row,
            dequantised(&w, K, |_, _| of_one[0]),
        ),
        (
            Tensor::f32("weight_scale_inv", &[N / BLOCK, K / BLOCK], &of_blocks),
            None,
            &of_block,
            dequantised(&w, K, block),
        ),
        (
            Tensor::bf16("weight_scale_inv", &[N / BLOCK, K / BLOCK], &of_blocks),
            Some(given),
            &of_static,
            dequantised(&w, K, block),
        ),
    ];
    for (scale, given, x_exact, w_exact) in cases {
        let folder = tempfile::tempdir().unwrap();
        let what = format!("{} {:?}, given {given:?}", scale.name, scale.shape);
        let mut tensors =
            vec![Tensor::bf16("x", &[M, K], &x), Tensor::codes("w", [N, K], &w), scale];
        tensors.extend(given.map(|scale| Tensor::f32("input_scale", &[], &[scale])));
        write(folder.path(), &tensors);
        for (op, ranks) in OpKind::ALL.into_iter().zip([2, 2, 1]) {
            let done = run(folder.path(), op, ranks, &[]);
            assert!(
                done.status.success() && !said(&done).contains("not used"),
                "{what}: {}",
                said(&done)
            );
            assert_product(folder.path(), op, ranks, x_exact, &w_exact, &format!("{what}, {op}"));
        }
    }
}

#[test]
fn rows_of_codes_come_with_scales_of_any_form_that_an_op_has() {
    let w = weight();
    let x: Vec<F8E4M3> = (0..M * K).map(|at| F8E4M3::from_f32(300.0 * random(7, at))).collect();
    let (one, of_rows, of_blocks) = (scales(8, 1), scales(9, M), scales(10, M * (K / BLOCK)));
    let of_w = scales(11, N / BLOCK * (K / BLOCK));
    let w_block = dequantised(&w, K, |row, col| of_w[row / BLOCK * (K / BLOCK) + col / BLOCK]);
    let w_one = dequantised(&w, K, |_, _| one[0]);
    let x_block = dequantised(&x, K, |row, col| of_blocks[row * (K / BLOCK) + col / BLOCK]);
    let x_row = dequantised(&x, K, |row, _| of_rows[row]);
    let blocks_of_w = || Tensor::f32("weight_scale_inv", &[N / BLOCK, K / BLOCK], &of_w);
    let one_of_w = || Tensor::f32("weight_scale", &[1], &one);
    let blocks_of_x = || Tensor::f32("input_scale", &[M, K / BLOCK], &of_blocks);
    let rows_of_x = || Tensor::f32("input_scale", &[M, 1], &of_rows);
    for (of_x, of_w, x_exact, w_exact) in [
        (blocks_of_x(), blocks_of_w(), &x_block, &w_block),
        (rows_of_x(), blocks_of_w(), &x_row, &w_block),
        (rows_of_x(), one_of_w(), &x_row, &w_one),
        (blocks_of_x(), one_of_w(), &x_block, &w_one),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let what = format!("{:?} with {:?}", of_x.shape, of_w.shape);
        let [x, w] = [Tensor::codes("x", [M, K], &x), Tensor::codes("w", [N, K], &w)];
        write(folder.path(), &[x, w, of_x, of_w]);
        for op in OpKind::ALL {
            let done = run(folder.path(), op, 2, &[]);
            assert!(done.status.success(), "{what}: {}", said(&done));
            assert_product(folder.path(), op, 2, x_exact, w_exact, &format!("{what}, {op}"));
        }
    }
}

#[test]
fn scales_that_are_missing_or_do_not_fit_are_named() {
    let (w, x) = (weight(), rows());
    let of_x = || Tensor::bf16("x", &[M, K], &x);
    let codes = || Tensor::codes("x", [M, K], &w[..M * K]);
    let of_w = || Tensor::codes("w", [N, K], &w);
    let scale = |name, shape: &[usize]| {
        Tensor::f32(name, shape, &vec![1.0; shape.iter().product::<usize>()])
    };
    let blocks = || scale("weight_scale_inv", &[N / BLOCK, K / BLOCK]);
    for (tensors, why) in [
        (vec![of_x(), of_w()], "in has no tensor \"weight_scale\""),
        (vec![codes(), of_w(), blocks()], "in has no tensor \"input_scale\""),
        (vec![of_x(), of_w(), blocks(), scale("weight_scale", &[1])], "w has one of them"),
        (
            vec![of_x(), of_w(), scale("weight_scale", &[M])],
            "\"weight_scale\" has the shape [12]: [256, 1] is needed, one for each row of w, or one",
        ),
        (
            vec![of_x(), of_w(), scale("weight_scale_inv", &[K / BLOCK, N / BLOCK])],
            "\"weight_scale_inv\" has the shape [4, 2]: [2, 4] is needed, one for each 128 x 128",
        ),
        (
            vec![of_x(), of_w(), blocks(), scale("input_scale", &[M])],
            "\"input_scale\" has the shape [12]: [1] is needed, one for all of x",
        ),
        (
            vec![
                codes(),
                of_w(),
                scale("weight_scale", &[N]),
                scale("input_scale", &[M, K / BLOCK]),
            ],
            "weight_scale has one of each row of w, and input_scale one of each 1 x 128",
        ),
        (
            vec![codes(), Tensor::bf16("w", &[M, K], &x), scale("weight_scale", &[1])],
            "tensor \"w\" holds bf16, x e4m3: BF16 or F16 is needed",
        ),
        (
            vec![of_x(), of_w(), Tensor::codes("weight_scale", [N, 1], &w[..N])],
            "\"weight_scale\" holds F8_E4M3: F32, BF16 or F16 is needed",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &tensors);
        let refused = run(folder.path(), OpKind::AllGatherGemm, 2, &[]);
        assert_eq!(refused.status.code(), Some(1), "{why}");
        assert!(said(&refused).contains(why), "{why}: {}", said(&refused));
        assert!(!folder.path().join("out").exists(), "{why}");
    }
}

#[test]
fn gates_and_ups_have_the_scales_of_their_rows_on_every_rank() {
    let (w, x, of_rows) = (weight(), rows(), scales(12, N));
    let folder = tempfile::tempdir().unwrap();
    let scale = Tensor::f32("weight_scale", &[N, 1], &of_rows);
    write(folder.path(), &[Tensor::bf16("x", &[M, K], &x), Tensor::codes("w", [N, K], &w), scale]);
    for gates in ["swiglu", "swiglu_interleaved"] {
        let y = |ranks| {
            let done = run(folder.path(), OpKind::AllGatherGemm, ranks, &["--activation", gates]);
            assert!(done.status.success(), "{}", said(&done));
            let file = std::fs::read(folder.path().join("out")).unwrap();
            let tensors = SafeTensors::deserialize(&file).unwrap();
            let y = tensors.tensor("y").unwrap();
            assert_eq!(y.shape(), [M, N / 2]);
            let pairs = y.data().chunks_exact(2);
            pairs.map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect::<Vec<_>>()
        };
        let largest = y(1).into_iter().fold(0.0_f32, |most, v| most.max(v.abs()));
        for (at, (alone, shared)) in y(1).into_iter().zip(y(4)).enumerate() {
            // A rounding, where sums differ by their order.
            let bound = (alone.abs() + largest / 1024.0) / 128.0;
            assert!((alone - shared).abs() <= bound, "{gates}, {at}: {alone}, and {shared}");
        }
    }
}
