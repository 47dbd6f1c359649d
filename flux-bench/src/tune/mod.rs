//! `flux-bench tune`: measured plans for layers, into the user's plan table.
//!
//! Invariant: a row is in the table before the next is begun. An interrupt loses no finished row,
//! and a second run goes on behind the last.

mod rank;

use crate::harness::ranks;
use crate::shapes::{self, Layer, LayerArgs, parse_partials};
use crate::{launch, machine, out};
use anyhow::Context;
use flux_core::{Numerics, Partials, WorldSize};
use flux_ops::explain_plan_table;
use flux_transport::{Select, World};
use rank::TuneSummary;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `flux-bench tune`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    layers: LayerArgs,
    /// Ranks; as many as there are GPUs, or 2 on the host, where it is left out. A launch has as
    /// many as were launched
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    tp: Option<u32>,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    transport: Select,
    /// Plans by the cost model that are timed beside the present one
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    candidates: u8,
    /// Timed calls of each plan; 20 on GPUs and 5 on the host where it is left out
    #[arg(long, visible_alias = "rounds", value_parser = clap::value_parser!(u16).range(3..=1000))]
    samples: Option<u16>,
    /// Time after which no further plan is begun, as in 120s or 10m
    #[arg(long, default_value = "10m", value_name = "TIME", value_parser = budget)]
    budget: Duration,
    /// Time only plans by which a row's bits do not depend on the rows beside it, for such ops
    #[arg(long)]
    batch_invariant: bool,
    /// Type in which ranks send partial sums: dtype, that of the results, or f32. Of gemm_rs and
    /// gemm_ar
    #[arg(long, value_name = "TYPE", default_value = "dtype", value_parser = parse_partials)]
    partials: Partials,
    /// The plan table, in place of the user's
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Time rows again that the table has for this device and driver
    #[arg(long)]
    again: bool,
    /// Ranks as processes of this machine, one each, instead of threads of this one
    #[arg(long)]
    processes: bool,
}

/// What is to be tuned, the same on every rank.
struct TuneJob<'a> {
    args: &'a Args,
    world: WorldSize,
    numerics: Numerics,
    layers: Vec<Layer>,
    /// Timed calls of each plan.
    rounds: usize,
}

/// A time from a second to a day.
fn budget(word: &str) -> Result<Duration, String> {
    let limits = Duration::from_secs(1)..=Duration::from_hours(24);
    humantime::parse_duration(word)
        .ok()
        .filter(|time| limits.contains(time))
        .ok_or_else(|| format!("{word:?} is no time as in 120s or 10m, up to 24h"))
}

/// Tunes, prints each row and a summary, and says whether every row that was begun has a plan.
/// Inside a launch this process is one of the ranks, and rank 0 prints.
pub(crate) fn run(args: &Args) -> anyhow::Result<bool> {
    if let Some(right) = launch::as_rank(|world| launched(args, world))? {
        return Ok(right);
    }
    let on_gpus = machine::uses_gpus(args.transport)?;
    let job = TuneJob::new(
        args,
        on_gpus,
        args.tp.unwrap_or(if on_gpus { machine::gpu_count() } else { 2 }),
    )?;
    if args.processes {
        return launch::again(job.world.get(), None, false);
    }
    let summaries =
        ranks::on_threads(World::local(job.world.get())?, |world| rank::run(&job, world))?;
    Ok(tell(&job, &summaries.into_iter().next().context("no ranks")?))
}

/// One rank of a launch.
fn launched(args: &Args, world: &World) -> anyhow::Result<bool> {
    launch::agree(args.tp, world)?;
    let job = TuneJob::new(args, machine::uses_gpus(args.transport)?, world.size().get())?;
    let summary = rank::run(&job, world)?;
    Ok(if world.rank().get() == 0 { tell(&job, &summary) } else { true })
}

fn tell(job: &TuneJob<'_>, summary: &TuneSummary) -> bool {
    let compute = (summary.device != "host")
        .then(|| flux_cuda::device_info(0).ok())
        .flatten()
        .map(|info| info.compute);
    out::line(&format_args!(
        "\n{summary}\nplan table: {}",
        explain_plan_table(job.args.table.as_deref(), &summary.device, compute)
    ));
    summary.failed == 0
}

impl<'a> TuneJob<'a> {
    fn new(args: &'a Args, on_gpus: bool, ranks: u32) -> anyhow::Result<Self> {
        let world = shapes::world(ranks)?;
        let layers =
            args.layers.layers(world, on_gpus, &[64, 128, 256, 512, 1024, 2048, 4096, 8192])?;
        let layers = shapes::with_partials(layers, args.partials)?;
        let rounds = args.samples.unwrap_or(if on_gpus { 20 } else { 5 }).into();
        Ok(Self { args, world, numerics: args.layers.types.numerics()?, layers, rounds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_have_units_and_end() {
        let seconds = |word: &str| budget(word).map(|budget| budget.as_secs()).ok();
        assert_eq!(
            ["120s", "10m", "1h 30m", "24h"].map(seconds),
            [Some(120), Some(600), Some(5400), Some(86_400)]
        );
        assert_eq!(
            [
                "",
                "0s",
                "90",
                "2days",
                "m",
                "-1s",
                "25h",
                "99999999999999999999s",
                "9999999999999999h"
            ]
            .map(seconds),
            [None; 9]
        );
    }
}
