//! `flux-bench lab peers`: PyTorch on the same host and shapes, by the fused ops' method.
//!
//! The peers are `torch.mm` alone, of 8-bit operands `torch._scaled_mm`, NCCL and that in turn, and
//! PyTorch's fused ops on symmetric memory ("async-TP"). For `gemm_ar` they are its one-shot and
//! two-shot all-reduce after the GEMM, all as CUDA graphs up to 512 rows.

mod child;
#[cfg(test)]
mod tests;

use crate::report::{Origin, PEERS_SCHEMA, PeersReport, Ranks, check_json, deliver, peers_table};
use crate::shapes::{self, Layer, LayerArgs};
use crate::{launch, limits, machine};
use anyhow::{Context, ensure};
use child::{ScriptCase, ScriptJob};
use flux_core::{Rank, Scales};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `flux-bench lab peers`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file, as JSON; `-` is the standard output, and the table then goes
    /// to the standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Ranks; as many as there are GPUs where it is left out
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    pub tp: Option<u32>,
    /// Rounds
    #[arg(long, visible_alias = "rounds", default_value_t = 30, value_parser = limits::samples())]
    pub samples: u32,
    /// Seconds after which the peers are ended, and the run has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = limits::seconds(1))]
    pub limit: u64,
    /// Add a residual and normalise the rows behind each of them, by PyTorch's compiler. Of gemm_rs
    /// and gemm_ar
    #[arg(long)]
    pub norm: bool,
    /// The Python that has PyTorch
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub python: OsString,
}

/// Times the peers, prints the table, writes the file, and says whether all rows verified.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    launch::refuse("peers")?;
    check_json(args.json.as_deref())?;
    flux_cuda::available().context("the peers run on GPUs")?;
    let gpus = machine::gpu_count();
    let tp = args.tp.unwrap_or(gpus);
    let job = job(args, tp)?;
    ensure!(tp <= gpus, "--tp {tp} needs as many GPUs, and this process sees {gpus}");
    let (versions, rows) = child::run(&args.python, &job, Duration::from_secs(args.limit))?;
    let report = PeersReport {
        schema: PEERS_SCHEMA,
        origin: Origin::of(true, tp, Ranks::Threads),
        nccl: versions.nccl,
        torch: versions.torch,
        rows,
    };
    deliver(&peers_table(&report), args.json.as_deref(), &report)?;
    Ok(report.verified())
}

/// What the script is asked for; only problems that flux takes too.
fn job(args: &Args, tp: u32) -> anyhow::Result<ScriptJob> {
    let layers =
        args.layers.layers(shapes::world(tp)?, true, &[64, 512, 1024, 2048, 4096, 8192])?;
    let layers =
        if args.norm { shapes::with_suffix(layers, "--norm", "+residual+norm")? } else { layers };
    let numerics = args.layers.types.numerics()?;
    ensure!(
        matches!(numerics.scales, Scales::None | Scales::Tensor | Scales::Row),
        "PyTorch's fused ops have no scales of blocks: use --scales tensor or row"
    );
    // PyTorch's symmetric memory has equal parts.
    shapes::ensure_equal_shards(&layers)?;
    let [first, last] = [0, tp - 1].map(Rank::new);
    if let Some(Layer { name, problem }) =
        layers.iter().find(|layer| layer.problem.w_shape(first) != layer.problem.w_shape(last))
    {
        let (extent, value) =
            if problem.op().reduces() { ("k", problem.k()) } else { ("n", problem.n()) };
        anyhow::bail!(
            "{} of {name}: {extent} = {value} has no {tp} equal parts of groups of {}, which the \
             peers need",
            problem.op(),
            16 / numerics.operand.bytes()
        );
    }
    let of_one = layers.chunk_by(|a, b| (&a.name, a.problem.op()) == (&b.name, b.problem.op()));
    let case = |layers: &[Layer]| {
        let (name, problem) = (layers[0].name.clone(), &layers[0].problem);
        ScriptCase {
            op: problem.op().name(),
            model: name,
            n: problem.n(),
            k: problem.k(),
            ms: layers.iter().map(|layer| layer.problem.m()).collect(),
        }
    };
    let cases = of_one.map(case).collect();
    Ok(ScriptJob {
        tp,
        dtype: numerics.to_string(),
        output: numerics.output.name(),
        scales: numerics.scales.to_string(),
        fast_accumulation: numerics.fast_accumulation,
        samples: args.samples,
        norm: args.norm,
        cases,
    })
}
