//! `flux-bench lab core`: the fused kernel as a GEMM, beside the best cuBLASLt algorithm, on one GPU.
//!
//! Invariant: what is compared computes with one kernel on the same operands, at the shape that one
//! rank of a larger world has, in the same rounds; a row is verified only if every output of the
//! kernel was checked as a whole against the fp64 reference.
//!
//! Four contenders take turns in each round:
//!
//! | time | what runs |
//! |---|---|
//! | T_gemm | cuBLASLt at the rank's local shape: `m x n/tp x k` (AllGather-GEMM), `m x n x k/tp` (GEMM-ReduceScatter) |
//! | T_core | the kernel on the same shape as a world of 1: no peer, no border of a shard; tile, splits and raster of the world of tp |
//! | T_order | rank 0's tile program of the world of tp without its waits for peers |
//! | T_flags | rank 0's tile program of the world of tp, every signal of a peer raised before the call |
//!
//! T_core waits for no signal but those of tiles that are shared. T_order and T_flags include the
//! order of shards and bands, reading peers' rows from the gather buffer (AllGather-GEMM), sending
//! partial tiles for peers into memory of this GPU at the op's own pace, raising their signals,
//! reading and adding the peers' partial tiles (GEMM-ReduceScatter), and the close of the call.
//! They include no link, no push of rows to peers and no copy that raises signals. So
//! `T_flags / T_order - 1` is what looking at raised signals costs, and `T_flags / T_core - 1` what
//! the whole tile program costs a GEMM whose data are there.

mod contender;
mod contenders;
mod mock_peers;
mod replay;
mod report;
#[cfg(test)]
mod tests;

pub use report::CoreReport;
use report::{CoreRow, SCHEMA, table};

use crate::atomic_file;
use crate::harness::PlannedLayer;
use crate::harness::gpu::Gpu;
use crate::launch;
use crate::limits;
use crate::machine;
use crate::out;
use crate::plan::PlanArgs;
use crate::report as bench_report;
use crate::shapes::{self, Layer, LayerArgs};
use anyhow::{Context, ensure};

use contenders::KernelContenders;
use flux_core::machine::Machine;
use flux_transport::internal::cuda::{self, CudaDevice};
use std::path::PathBuf;

/// Arguments of `flux-bench lab core`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Ranks of the world whose rank 0 is measured, on one GPU whatever there is; at least 2
    #[arg(long, value_name = "RANKS", default_value_t = 8)]
    pub tp: u32,
    #[command(flatten)]
    pub plan: PlanArgs,
    /// Rounds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=limits::SAMPLES))]
    pub samples: u32,
}

/// Measures every shape on the first GPU, prints the table, writes the file, and says whether every
/// row was verified.
///
/// # Errors
/// No GPU, a shape that the ranks cannot split, or a call that did not end as it should.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    launch::refuse("core")?;
    // Bad shapes are refused on a machine without GPUs too.
    layers(args)?;
    if let Some(path) = &args.json {
        atomic_file::check(path)?;
    }
    cuda::available().context("core measures the kernel on a GPU")?;
    let gpu = Gpu::open(&CudaDevice::open(0)?)?;
    let info = gpu.device().info();
    let cases = cases(args, Machine::of_gpu(&info.name, info.sms))?;
    let rows =
        cases.iter().map(|case| row(&gpu, case, args).with_context(|| case.problem.to_string())).collect::<anyhow::Result<Vec<_>>>()?;
    let machine = machine::describe(true, 1, bench_report::Ranks::Threads);
    let report = CoreReport { schema: SCHEMA, origin: bench_report::Origin::of(&machine).with_libraries(), rows };
    bench_report::deliver(&table(&report), args.json.as_deref(), &report)?;
    Ok(report.verified())
}

fn row(gpu: &Gpu, case: &PlannedLayer, args: &Args) -> anyhow::Result<CoreRow> {
    out::note(&format!("core: {}", case.problem));
    let mut contenders = KernelContenders::new(gpu, case)?;
    let exact = contenders.verify_exact()?;
    let times = contenders.measure(args.samples)?;
    let verdict = exact.merge(contenders.verify_random()?);
    if !verdict.ok() {
        out::note(&format!("{}: {verdict}", case.problem));
    }
    Ok(CoreRow::new(case, contenders.plan(), times, verdict, args.samples))
}

fn layers(args: &Args) -> anyhow::Result<Vec<Layer>> {
    ensure!(args.tp > 1, "--tp {}: a world of one rank has no signals: ask for at least 2", args.tp);
    args.layers.layers(shapes::world(args.tp)?, true, &[1024, 2048, 4096, 8192])
}

fn cases(args: &Args, machine: Machine) -> anyhow::Result<Vec<PlannedLayer>> {
    layers(args)?.into_iter().map(|layer| PlannedLayer::new(layer, args.plan, machine)).collect()
}
