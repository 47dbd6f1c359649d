//! `flux-bench lab core`: the kernel as a GEMM beside cuBLASLt, on one GPU.
//!
//! Invariant: all contenders compute the same operands at one rank's shape, in the same rounds. A
//! row is verified only if every output was checked as a whole.
//!
//! | time | what runs |
//! |---|---|
//! | T_gemm | cuBLASLt's best algorithm at the rank's local shape, with scales of the same form |
//! | T_core | the kernel as a world of 1, with the plan's tile and split |
//! | T_order | rank 0's program of the world, without waits for peers |
//! | T_flags | rank 0's program of the world, every peer's signal raised before |
//! | T_sm80 | cuBLASLt's best with kernels of sm_80, beside the portable kernel on a later GPU |
//!
//! T_order and T_flags include the order of shards, reads of the gather buffer, sends of partial
//! tiles into this GPU's memory, and additions of the peers' partials. They include no link and no
//! mover. `T_flags / T_order - 1` is the cost of polling, `T_flags / T_core - 1` that of the whole
//! program.

mod contenders;
mod mock_peers;
mod operands;
mod replay;
mod report;
mod sm80_gemm;
#[cfg(test)]
mod tests;

pub use report::CoreReport;
pub(crate) use report::SCHEMA;
use report::{CoreRow, table};

use crate::harness::gpu::{Gpu, kernels};
use crate::harness::{Fill, PlannedLayer};
use crate::plan::PlanArgs;
use crate::report::{Origin, Ranks, check_json, deliver};
use crate::shapes::{self, Layer, LayerArgs};
use crate::{launch, limits, out};
use anyhow::{Context, ensure};

use contenders::KernelContenders;
use flux_core::machine::Machine;
use flux_cuda::CudaDevice;
use std::path::PathBuf;

/// Arguments of `flux-bench lab core`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file, as JSON; `-` is the standard output, and the table then goes
    /// to the standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Ranks of the world whose rank 0 is measured, on one GPU whatever there is; at least 2
    #[arg(long, visible_alias = "ranks", value_name = "RANKS", default_value_t = 8)]
    pub tp: u32,
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Rounds
    #[arg(long, visible_alias = "rounds", default_value_t = 30, value_parser = limits::samples())]
    pub samples: u32,
    /// Calls of a round, back to back on the stream. With more than one, T_order and T_flags include
    /// raising the later calls' signals
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=MOST_CALLS))]
    pub calls: u32,
    /// Load a call's first weights while the call ahead ends, as ops with constant weights do
    #[arg(long)]
    pub constant_weights: bool,
}

/// Most calls of a round: as many launches as a stream takes without making the host wait.
const MOST_CALLS: i64 = 512;

/// Measures every shape on the first GPU, prints the table, writes the file, and says whether all
/// rows verified.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    launch::refuse("core")?;
    // Bad shapes are refused on a machine without GPUs too.
    layers(args)?;
    check_json(args.json.as_deref())?;
    flux_cuda::available().context("core measures the kernel on a GPU")?;
    let gpu = Gpu::open(&CudaDevice::open(0)?)?;
    let info = gpu.device().info();
    let cases = cases(
        args,
        Machine::of_gpu(&info.name, info.sms).running(kernels::of_device(gpu.device())?.generation),
    )?;
    let rows = cases
        .iter()
        .map(|case| row(&gpu, case, args).with_context(|| case.problem.to_string()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let origin = Origin::of(true, 1, Ranks::Threads).with_libraries();
    let report = CoreReport { schema: SCHEMA, origin, rows };
    deliver(&table(&report), args.json.as_deref(), &report)?;
    Ok(report.verified())
}

fn row(gpu: &Gpu, case: &PlannedLayer, args: &Args) -> anyhow::Result<CoreRow> {
    out::note(&format!("core: {}", case.problem));
    let mut contenders = KernelContenders::new(gpu, case, args)?;
    let exact = contenders.verify(Fill::SmallInts)?.of_wrong_elements();
    let mut measured = contenders.measure(args.samples)?;
    let sm80_kernels = contenders.sm80_kernels()?;
    let verdict = exact.merge(contenders.verify(Fill::Uniform)?);
    let errors = contenders.rms_errors(&mut measured)?;
    if !verdict.ok() {
        out::note(&format!("{}: {verdict}", case.problem));
    }
    let mut row = CoreRow::new(case, contenders.plan(), measured, verdict, args.samples);
    row.sm80 = measured.sm80.zip(sm80_kernels).map(|(times, kernels)| row.sm80(times, kernels));
    row.no_gemm = contenders.no_gemm();
    if let Some(errors) = errors {
        [row.rms_err, row.gemm_rms_err] = errors;
    }
    Ok(row)
}

fn layers(args: &Args) -> anyhow::Result<Vec<Layer>> {
    ensure!(
        args.tp > 1,
        "--tp {}: a world of one rank has no signals: ask for at least 2",
        args.tp
    );
    let layers = args.layers.layers(shapes::world(args.tp)?, true, &[1024, 2048, 4096, 8192])?;
    shapes::ensure_equal_shards(&layers)?;
    Ok(layers)
}

fn cases(args: &Args, machine: Machine) -> anyhow::Result<Vec<PlannedLayer>> {
    layers(args)?.into_iter().map(|layer| PlannedLayer::new(layer, args.plan, machine)).collect()
}
