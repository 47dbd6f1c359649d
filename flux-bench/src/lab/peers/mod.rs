//! `flux-bench lab peers`: what a user would pick instead, timed on the same host, with the same shapes
//! and by the same method as the fused ops.
//!
//! The peers are PyTorch's: `torch.mm` alone, NCCL and `torch.mm` in turn, and the fused ops of its
//! symmetric memory ("async-TP").

mod child;
#[cfg(test)]
mod tests;

use crate::atomic_file;
use crate::launch;
use crate::limits;
use crate::machine;
use crate::out;
use crate::report::{Origin, PEERS_SCHEMA, PeersReport, Ranks, peers_table};
use crate::shapes::{self, Model, parse_dtype, parse_op};
use anyhow::{Context, ensure};
use child::{Case, Job};
use flux_core::{DType, OpKind};
use std::ffi::OsString;
use std::path::PathBuf;
use std::slice::from_ref;
use std::time::Duration;

/// Arguments of `flux-bench lab peers`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Global rows
    #[arg(long, value_delimiter = ',', value_name = "M,...", default_value = "64,512,1024,2048,4096,8192")]
    pub ms: Vec<usize>,
    /// Layers: gpt3, llama70b, or a fraction of one as in gpt3/16
    #[arg(long, value_delimiter = ',', value_name = "MODEL,...", default_value = "gpt3,llama70b")]
    pub shapes: Vec<Model>,
    /// Ranks; as many as there are GPUs where it is left out
    #[arg(long, value_name = "RANKS")]
    pub tp: Option<u32>,
    /// Ops
    #[arg(long, value_delimiter = ',', value_name = "OP,...", default_value = "ag_gemm,gemm_rs", value_parser = parse_op)]
    pub ops: Vec<OpKind>,
    /// Element type: bf16 or fp16
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = parse_dtype)]
    pub dtype: DType,
    /// Rounds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=limits::SAMPLES))]
    pub samples: u32,
    /// Seconds after which the peers are ended, and the run has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=limits::SECONDS))]
    pub limit: u64,
    /// The Python that has PyTorch
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub python: OsString,
}

/// Times the peers, prints the table, writes the file, and says whether every row was verified.
///
/// # Errors
/// No GPUs, Python or PyTorch, a shape that the ranks cannot split, or a child that failed or ran
/// past its limit.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    launch::refuse("peers")?;
    if let Some(path) = &args.json {
        atomic_file::check(path)?;
    }
    flux_transport::internal::cuda::available().context("the peers run on GPUs")?;
    let gpus = machine::gpu_count();
    let tp = args.tp.unwrap_or(gpus);
    let job = job(args, tp)?;
    ensure!(tp <= gpus, "--tp {tp} needs as many GPUs, and this process sees {gpus}");
    let (versions, rows) = child::run(&args.python, &job, Duration::from_secs(args.limit))?;
    let machine = machine::describe(true, tp, Ranks::Threads);
    let report = PeersReport { schema: PEERS_SCHEMA, origin: Origin::of(&machine), nccl: versions.nccl, torch: versions.torch, rows };
    out::print(&peers_table(&report));
    if let Some(path) = &args.json {
        report.write(path)?;
        out::line(&format_args!("\nwritten to {}", path.display()));
    }
    Ok(report.verified())
}

/// What the script is asked for; only problems that flux takes too.
fn job(args: &Args, tp: u32) -> anyhow::Result<Job> {
    let world = shapes::world(tp)?;
    let mut cases = Vec::new();
    for model in &args.shapes {
        for &op in &args.ops {
            let layers = shapes::layers(from_ref(model), &[op], &args.ms, args.dtype, world)?;
            let ms = layers.iter().map(|layer| layer.problem.m()).collect();
            let (n, k) = model.extents(op);
            cases.push(Case { op: op.name(), model: model.name().to_owned(), n: n as u32, k: k as u32, ms });
        }
    }
    Ok(Job { tp, dtype: args.dtype.name(), samples: args.samples, cases })
}
