//! The harness on a GPU agrees with the harness on the host, and the baseline computes what it is
//! timed for. A harness that checks nothing would pass everything else.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

mod gpu_support;

use flux_bench::{
    Buffer, EpilogueSpec, Fill, Gemm, GemmOperands, GemmShape, MadeBy, OperandSet, Operands,
    RankContext, Violation, cublas_available, epilogues_with_bias, fill_operand, operand_value,
    verify_on_host, w_window, x_window,
};
use flux_core::plan::Plan;
use flux_core::{DType, Numerics, OpKind, Problem, Rank, Scales, TileShape, WorldSize};
use flux_kernels::{Element, F8E4M3, Operand};
use flux_transport::{Communicator, Options, Select, World};
use gpu_support::gpus;
use gpu_support::skipped::skip;
use half::{bf16, f16};

/// A rank alone on GPU 0, where there is one that the kernels run on.
fn ctx(test: &str) -> Option<RankContext> {
    gpus(test)?;
    Some(
        RankContext::new(
            Communicator::connect_blocking(&World::single(), Options::from(Select::NvLink))
                .unwrap(),
        )
        .unwrap(),
    )
}

const FILLS: [Fill; 2] = [Fill::Uniform, Fill::SmallInts];

/// m, n and k with tails of the kernels' 64 x 64 x 16 tiles.
fn problem<T: Element>(op: OpKind) -> Problem {
    Problem::new(op, 72, 136, 200, T::DTYPE, WorldSize::new(1).unwrap()).unwrap()
}

/// Columns of y: half as many as of w where these are gates and ups.
fn columns(operands: &Operands) -> u32 {
    operands.problem.n() / (1 + u32::from(operands.epilogue.gates.is_some()))
}

/// The right output, computed on the host.
fn right<T: Element>(operands: &Operands) -> Vec<T> {
    let p = &operands.problem;
    let at = |seed, row, col| {
        f64::from(T::from_f32(operand_value(operands.fill, seed, row, col)).to_f32())
    };
    let dot = |row, col| {
        (0..p.k()).map(|k| at(operands.seed_x, row, k) * at(operands.seed_w, col, k)).sum::<f64>()
    };
    let has = |operand| operands.epilogue.operands.has(operand);
    let bias = |col| if has(Operand::Bias) { at(operands.seed_bias, 0, col) } else { 0.0 };
    let residual = |row, col| {
        if has(Operand::Residual) { at(operands.seed_residual, row, col) } else { 0.0 }
    };
    let sum = |row, of_w, col| (dot(row, of_w) + bias(of_w) + residual(row, col)) as f32;
    let activated = |sum| operands.epilogue.activation.apply(sum);
    let finished = |row, col| match operands.epilogue.gates {
        None => activated(sum(row, col, col)),
        Some(layout) => {
            let (gate, up) = layout.rows_of(col, p.n());
            activated(sum(row, gate, col)) * sum(row, up, col)
        }
    };
    (0..p.m())
        .flat_map(|row| (0..columns(operands)).map(move |col| (row, col)))
        .map(|(row, col)| T::from_f32(finished(row, col)))
        .collect()
}

fn set<T: Element>(ctx: &RankContext, operands: Operands) -> OperandSet<T> {
    let mut set = ctx.operand_set_with(&operands.problem, operands.epilogue).unwrap();
    ctx.fill(&mut set, operands).unwrap();
    set
}

fn fills_alike<T: Element>(ctx: &RankContext) {
    for fill in FILLS {
        let operands = Operands::new(problem::<T>(OpKind::AllGatherGemm), 11, 5, fill);
        let set = set::<T>(ctx, operands);
        let parts = [
            (&set.x, x_window(&operands.problem, Rank::new(0)), operands.seed_x),
            (&set.weights[0].w, w_window(&operands.problem, Rank::new(0)), operands.seed_w),
        ];
        for (buffer, window, seed) in parts {
            let mut host = vec![T::from_f32(0.0); buffer.len()];
            fill_operand(&mut host, window, seed, fill);
            assert!(ctx.download(buffer).unwrap() == host, "{fill:?} {} {window:?}", T::DTYPE);
        }
    }
}

/// A plan per shard.
fn plan() -> Plan {
    Plan::of(TileShape::new(128, 128, 64))
}

#[test]
fn the_device_generates_the_same_data() {
    let Some(ctx) = ctx("the_device_generates_the_same_data") else { return };
    fills_alike::<bf16>(&ctx);
    fills_alike::<f16>(&ctx);
}

/// All that a set with scales holds, but what lies between the scales of a row and the next.
fn scaled(ctx: &RankContext, operands: Operands) -> (Vec<Vec<F8E4M3>>, Vec<Vec<f32>>) {
    let problem = &operands.problem;
    let mut set = ctx.operand_set::<F8E4M3, bf16>(problem).unwrap();
    ctx.fill(&mut set, operands).unwrap();
    let (gathers, k) = (problem.op().gathers(), problem.k() as usize);
    let count = if gathers { problem.numerics().scales.of_row(problem.k()) as usize } else { 0 };
    let row = if gathers { problem.gathered_columns() as usize } else { k };
    let x = ctx.download(&set.x).unwrap();
    let x = x.chunks(row).flat_map(|row| row[..k + 4 * count].iter().copied()).collect();
    let scales = set.scale_x.iter().chain(&set.scales_w);
    (
        vec![x, ctx.download(&set.weights[0].w).unwrap()],
        scales.map(|scales| ctx.download(scales).unwrap()).collect(),
    )
}

#[test]
fn the_device_generates_the_same_codes_and_scales() {
    let Some(device) = ctx("the_device_generates_the_same_codes_and_scales") else { return };
    let host = Communicator::connect_blocking(&World::single(), Options::from(Select::Host));
    let host = RankContext::new(host.unwrap()).unwrap();
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        for (scales, fill) in
            Scales::OF_QUANTIZED.into_iter().flat_map(|of| FILLS.map(|fill| (of, fill)))
        {
            let numerics = Numerics::e4m3(scales, DType::Bf16);
            let problem =
                Problem::new(op, 72, 256, 640, numerics, WorldSize::new(1).unwrap()).unwrap();
            let operands = Operands::new(problem, 11, 8, fill);
            assert!(scaled(&device, operands) == scaled(&host, operands), "{problem}, {fill:?}");
        }
    }
}

fn verifies_alike<T: Element>(ctx: &RankContext, op: OpKind, epilogue: EpilogueSpec) {
    for fill in FILLS {
        let operands = Operands::new(problem::<T>(op), 11, 6, fill).with_epilogue(epilogue);
        let mut set = set::<T>(ctx, operands);
        let y = right::<T>(&operands);
        let made_by = MadeBy { flattened: false, unfused: false, nodes: ctx.comm().nodes() };
        ctx.upload(&mut set.weights[0].y, &y).unwrap();
        let (device, host) = (
            ctx.verify(&set, &plan()).unwrap(),
            verify_on_host::<T, T>(&operands, Rank::new(0), &y, made_by),
        );
        assert!(device.ok() && host.ok(), "{device} / {host}");
        // The device's is a float.
        assert!(
            (device.max_error - host.max_error).abs() <= 1e-6 * host.max_reference,
            "{device:?} / {host:?}"
        );
        // Not a number, infinite, and wrong by eight roundings of the largest element.
        let bound = 8.0 * T::DTYPE.unit_roundoff() * device.max_reference;
        for wrong in [f32::NAN, f32::INFINITY, bound as f32] {
            let last = y.len() - 1;
            let mut spoilt = y.clone();
            spoilt[last] = T::from_f32(spoilt[last].to_f32() + wrong);
            ctx.upload(&mut set.weights[0].y, &spoilt).unwrap();
            let verdict = ctx.verify(&set, &plan()).unwrap();
            assert_eq!(verdict.violations, 1, "{fill:?} + {wrong}: {verdict}");
            assert_eq!(
                verdict.first,
                Some(Violation { rank: 0, weight: 0, row: 71, col: columns(&operands) - 1 })
            );
        }
        ctx.poison(&mut set.weights[0].y).unwrap();
        assert_eq!(
            ctx.verify(&set, &plan()).unwrap().violations,
            y.len() as u64,
            "poison is wrong everywhere"
        );
    }
}

#[test]
fn the_device_finds_what_is_wrong() {
    let Some(ctx) = ctx("the_device_finds_what_is_wrong") else { return };
    for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
        // Normalised rows are another buffer.
        let epilogues = std::iter::once(EpilogueSpec::default())
            .chain(epilogues_with_bias(op))
            .filter(|epilogue| epilogue.rms_norm.is_none());
        for epilogue in epilogues {
            verifies_alike::<bf16>(&ctx, op, epilogue);
            verifies_alike::<f16>(&ctx, op, epilogue);
        }
    }
}

#[test]
fn every_candidate_of_the_baseline_gemm_is_right() {
    let Some(ctx) = ctx("every_candidate_of_the_baseline_gemm_is_right") else { return };
    if let Err(why) = cublas_available() {
        return skip("every_candidate_of_the_baseline_gemm_is_right", &why);
    }
    let gpu = ctx.gpu().unwrap();
    for fill in FILLS {
        let operands = Operands::new(problem::<bf16>(OpKind::AllGatherGemm), 11, 7, fill);
        let mut set = set::<bf16>(&ctx, operands);
        let mut gemm =
            Gemm::new(gpu.device(), GemmShape { m: 72, n: 136, k: 200 }, DType::Bf16.into())
                .unwrap();
        assert!(gemm.candidates() > 0);
        for candidate in 0..gemm.candidates() {
            gemm.choose(candidate);
            ctx.poison_results(&mut set).unwrap();
            let weight = &set.weights[0];
            let [x, w, y] = [&set.x, &weight.w, &weight.y].map(|buffer| match buffer {
                Buffer::Cuda { block, .. } => block.address(),
                Buffer::Host(_) => panic!("host memory on a device's ctx"),
            });
            // SAFETY: operands of the GEMM's shape, on the rank's one stream.
            unsafe {
                gemm.launch(GemmOperands { x, w, y, scales: None }, gpu.raw_stream()).unwrap();
            };
            let verdict = ctx.verify(&set, &plan()).unwrap();
            assert!(verdict.ok(), "candidate {candidate}, {fill:?}: {verdict}");
        }
    }
}
