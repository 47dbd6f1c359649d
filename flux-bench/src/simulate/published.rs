//! `flux-bench simulate --published`: what FLUX's authors published, beside the simulation of ours.
//!
//! Invariant: layers are GPT-3 175B's at TP 8, as there. Published figures are their kernels' on
//! their machines; nothing here was measured by us.

use super::row::{Simulation, millis};
use crate::plan::PlanArgs;
use crate::report::{aligned, ms};
use crate::shapes::{self, layers};
use flux_core::machine::Machine;
use flux_core::{DType, OpKind};

const TP: u32 = 8;
const OPS: [OpKind; 2] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter];
/// Rows of a figure of the paper.
const MS: [usize; 4] = [1024, 2048, 4096, 8192];

/// Milliseconds of GEMM, serial path and op at m = 4096: of A800 and H800 in the README of
/// github.com/bytedance/flux in July 2024, of L20 in its docs/performance.md of August 2025.
const TIMED: [(Machine, OpKind, [f64; 3]); 6] = [
    (Machine::A800, OPS[0], [2.438, 3.099, 2.469]),
    (Machine::A800, OPS[1], [2.453, 3.100, 2.508]),
    (Machine::H800, OPS[0], [0.846, 1.429, 0.957]),
    (Machine::H800, OPS[1], [0.818, 1.408, 0.932]),
    (Machine::L20, OPS[0], [5.316, 16.946, 5.903]),
    (Machine::L20, OPS[1], [5.389, 17.664, 5.730]),
];

/// Overlap efficiency of both ops for [`MS`]: the least, the most, the mean, in percent (arXiv
/// 2406.06858, evaluation of operations on 8 GPUs). The first mean may include fewer rows.
const STATED: [(Machine, [f64; 3]); 3] = [
    (Machine::A100_PCIE, [41.0, 57.0, 40.0]),
    (Machine::A100_SXM, [36.0, 96.0, 63.0]),
    (Machine::H800, [37.0, 93.0, 72.0]),
];

fn simulated(machine: &Machine, ops: &[OpKind], ms: &[usize]) -> anyhow::Result<Vec<Simulation>> {
    let layers = layers(&"gpt3".parse()?, ops, ms, DType::Bf16, shapes::world(TP)?)?;
    layers
        .into_iter()
        .map(|layer| Simulation::of_layer(layer, PlanArgs::default(), machine))
        .collect()
}

fn percent(value: f64) -> String {
    format!("{value:.1}")
}

fn timed() -> anyhow::Result<String> {
    let head = [
        "machine",
        "op",
        "m",
        "T_gemm ms",
        "simulated",
        "T_serial",
        "simulated",
        "T_op",
        "simulated",
        "E %",
        "simulated",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (machine, op, [gemm, serial, fused]) in TIMED {
        for row in simulated(&machine, &[op], &[4096])? {
            let times =
                [gemm, millis(row.gemm), serial, millis(row.serial), fused, millis(row.op)].map(ms);
            let efficiency =
                [100.0 * (1.0 - (fused - gemm) / (serial - gemm)), row.efficiency()].map(percent);
            let head = [machine.name.to_owned(), op.to_string(), row.head.m.to_string()];
            lines.push(head.into_iter().chain(times).chain(efficiency).collect());
        }
    }
    Ok(aligned(&lines))
}

fn stated() -> anyhow::Result<String> {
    let head = ["machine", "E % least", "simulated", "most", "simulated", "mean", "simulated"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (machine, published) in STATED {
        let found: Vec<f64> =
            simulated(&machine, &OPS, &MS)?.iter().map(Simulation::efficiency).collect();
        let [least, most] = [f64::min, f64::max]
            .map(|of: fn(f64, f64) -> f64| found.iter().copied().reduce(of).unwrap_or_default());
        let mean = found.iter().sum::<f64>() / found.len() as f64;
        let pairs = published
            .into_iter()
            .zip([least, most, mean])
            .flat_map(|pair| <[f64; 2]>::from(pair).map(percent));
        lines.push(std::iter::once(machine.name.to_owned()).chain(pairs).collect());
    }
    Ok(aligned(&lines))
}

/// Both tables as text.
///
/// # Errors
/// A layer without a plan.
pub fn published() -> anyhow::Result<String> {
    Ok(format!(
        "SIMULATED, not measured, beside what FLUX's authors published of their kernels \
         (flux_core::simulate)\n\
         gpt3 at TP {TP}; profiles follow from data sheets, and the portable kernel is taken to \
         reach its instructions' rate\n\
         simulated T_gemm is of our kernel, published T_gemm of a library; simulated T_serial adds \
         a collective at the links' rate\n\n\
         bytedance/flux, README of July 2024 and docs/performance.md of August 2025:\n\n{}\n\
         arXiv 2406.06858, both ops, m = 1024 to 8192:\n\n{}",
        timed()?,
        stated()?
    ))
}
