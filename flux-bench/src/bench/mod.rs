//! The benchmark: the ops, verified and measured beside their baselines.
//!
//! Invariant: a row's times and verification come from the same process, ops and buffers. An
//! unverified row fails the run.

mod estimate;
pub(crate) mod gpu_contenders;
mod gpu_serial;
mod host_contenders;
mod measure;
mod nccl_peers;
mod rank;
mod serial;
pub(crate) mod serving;
mod shared_files;
pub(crate) mod sustained;
mod watchdog;

use measure::{Contenders, measure};
pub(crate) use measure::{WARM_UP, in_round};
use sustained::sustain;

use crate::harness::epilogue::{of_op, problem_with, suffix};
use crate::harness::{Defect, EpilogueArgs, EpilogueSpec, ranks};
use crate::plan::OverrideArgs;
use crate::report::{self, Head, Origin, Placement, Report, Row, ServingReport, ServingRow};
use crate::shapes::{self, Layer, LayerArgs, parse_partials};
use crate::{launch, limits, machine};
use anyhow::{Context, ensure};
use flux_core::{Numerics, Partials, Problem, WorldSize};
use flux_ops::{Activation, Operand};
use flux_transport::{Select, TransportKind, World};
use std::path::PathBuf;

/// Arguments of `flux-bench bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file, as JSON; `-` is the standard output, and the table then goes
    /// to the standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Ranks; as many as GPUs, or 8 on the host, where left out. A launch sets their number
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    pub tp: Option<u32>,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Rounds; 30 on GPUs and 10 on the host where it is left out
    #[arg(long, visible_alias = "rounds", value_parser = limits::samples())]
    pub samples: Option<u32>,
    /// Then call op, GEMM and serial path back to back for so long each, at every one of --ms, or
    /// at the largest where that is left out
    #[arg(long, value_name = "SECONDS", value_parser = limits::length("seconds", 3600.0))]
    pub sustained: Option<f64>,
    /// Call op and serial path with the rows that a file lists, one number a line, in place of
    /// rounds. `mix` has the rows of a serving engine's steps. Of gemm_ar where --ops is left out
    #[arg(
        long,
        value_name = "FILE|mix",
        value_parser = serving::rows,
        conflicts_with_all = [
            "ms", "samples", "sustained", "bias", "residual", "activation", "norm",
        ],
    )]
    pub trace_m: Option<serving::Source>,
    /// Calls of --trace-m, which begins again at its end; 20000 on GPUs and 64 on the host where
    /// left out
    #[arg(long, requires = "trace_m", value_parser = limits::calls())]
    pub calls: Option<u64>,
    /// Ranks as processes of this machine, one each, instead of threads of this one
    #[arg(long)]
    pub processes: bool,
    /// Have the processes take themselves for ranks of so many hosts, as `launch --hosts` does
    #[arg(long, value_name = "HOSTS", requires = "processes")]
    pub hosts: Option<u32>,
    #[command(flatten)]
    added: Added,
    #[command(flatten)]
    epilogue: EpilogueArgs,
    /// Type in which ranks send partial sums: dtype, that of the results, or f32. Of gemm_rs and
    /// gemm_ar
    #[arg(long, value_name = "TYPE", default_value = "dtype", value_parser = parse_partials)]
    pub partials: Partials,
    /// Start a run on the host that is expected to take more than an hour
    #[arg(long)]
    pub yes: bool,
    /// Changes to the plan
    #[command(flatten)]
    execution: OverrideArgs,
    #[command(flatten)]
    defect: Defect,
}

/// What is added to the sums.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Added {
    /// Add a bias to the sums. This, residual, activation and norm are parts of the op; behind the
    /// serial path one kernel computes all of them, or its GEMM those of ag_gemm on the host
    #[arg(long)]
    bias: bool,
    /// Add a residual to the sums. Of gemm_rs and gemm_ar
    #[arg(long)]
    residual: bool,
}

/// One row to be measured.
#[derive(Clone, Debug)]
struct BenchCase {
    model: String,
    problem: Problem,
    epilogue: EpilogueSpec,
    /// Seconds for which each contender is also called back to back.
    sustained: Option<f64>,
}

impl BenchCase {
    fn head(&self) -> Head {
        Head::new(&self.model, &self.problem)
    }
}

/// What is to be measured, the same on every rank.
#[derive(Debug)]
struct BenchJob<'a> {
    args: &'a Args,
    on_gpus: bool,
    world: WorldSize,
    numerics: Numerics,
    cases: Vec<BenchCase>,
    samples: u32,
    /// Rows of calls, in place of rounds.
    rows: Option<serving::Trace>,
}

/// What all ranks know at the end.
#[derive(Clone, Debug)]
struct BenchResult {
    transport: TransportKind,
    placement: Placement,
    rows: Measurement,
}

/// A row for each case.
#[derive(Clone, Debug)]
enum Measurement {
    Rounds(Vec<Row>),
    Serving(Vec<ServingRow>),
}

/// Runs the benchmark, prints the table, writes the file, and says whether all rows verified.
/// Inside a launch this process is one rank, and rank 0 prints and writes.
pub(crate) fn run(args: &Args) -> anyhow::Result<bool> {
    nccl_peers::take(args.transport)?;
    if let Some(right) = launch::as_rank(|world| launched(args, world))? {
        return Ok(right);
    }
    check(args)?;
    let on_gpus = machine::uses_gpus(args.transport)?;
    let job = BenchJob::new(
        args,
        on_gpus,
        args.tp.unwrap_or(if on_gpus { machine::gpu_count() } else { 8 }),
    )?;
    estimate::allow(&job, args.yes)?;
    if args.processes {
        return launch::again(job.world.get(), args.hosts, false);
    }
    let found = ranks::on_threads(World::local(job.world.get())?, |world| rank::run(&job, world))?;
    tell(&job, found.into_iter().next().context("no ranks")?)
}

fn launched(args: &Args, world: &World) -> anyhow::Result<bool> {
    let (first, ranks) = (world.rank().get() == 0, world.size().get());
    if first {
        check(args)?;
    }
    launch::agree(args.tp, world)?;
    let job = BenchJob::new(args, machine::uses_gpus(args.transport)?, ranks)?;
    if first {
        estimate::allow(&job, args.yes)?;
    }
    let found = rank::run(&job, world)?;
    // A launcher would end rank 0 amid its output when another rank fails.
    if first { tell(&job, found) } else { Ok(true) }
}

/// Before minutes are spent on what cannot be written.
fn check(args: &Args) -> anyhow::Result<()> {
    report::check_json(args.json.as_deref())
}

fn tell(job: &BenchJob<'_>, found: BenchResult) -> anyhow::Result<bool> {
    let (placement, transport) = (found.placement, found.transport.to_string());
    let origin = Origin::of(job.on_gpus, job.world.get(), placement.ranks).with_libraries();
    let (nccl, json) = (origin.nccl(), job.args.json.as_deref());
    match found.rows {
        Measurement::Rounds(rows) => {
            let report =
                Report { schema: report::SCHEMA, origin, transport, placement, nccl, rows };
            // The rows are there already.
            report::deliver(&report::sustained_table(&report.rows), json, &report)?;
            Ok(report.verified())
        }
        Measurement::Serving(serving) => {
            let report = ServingReport {
                schema: report::SERVING_SCHEMA,
                origin,
                transport,
                placement,
                nccl,
                serving,
            };
            report::deliver(&report.table(), json, &report)?;
            report.memory_has_stayed()?;
            Ok(report.verified())
        }
    }
}

impl<'a> BenchJob<'a> {
    fn new(args: &'a Args, on_gpus: bool, ranks: u32) -> anyhow::Result<Self> {
        let world = shapes::world(ranks)?;
        let rows = args
            .trace_m
            .as_ref()
            .map(|source| source.trace(args.calls.unwrap_or(if on_gpus { 20_000 } else { 64 })));
        let cases = cases(args, world, on_gpus, rows.as_ref())?;
        let samples = args.samples.unwrap_or(if on_gpus { 30 } else { 10 });
        let numerics = args.layers.types.numerics()?;
        Ok(Self { args, on_gpus, world, numerics, cases, samples, rows })
    }
}

fn cases(
    args: &Args,
    world: WorldSize,
    on_gpus: bool,
    rows: Option<&serving::Trace>,
) -> anyhow::Result<Vec<BenchCase>> {
    let layers = match rows {
        // The serial path's collectives have equal shards.
        Some(rows) => {
            args.layers.layers_of(world, on_gpus, rows.most().next_multiple_of(world.index()))?
        }
        None => args.layers.layers(world, on_gpus, &[512, 1024, 2048, 4096, 8192])?,
    };
    let layers = shapes::with_partials(layers, args.partials)?;
    let asked = args.epilogue.spec(args.added.bias, args.added.residual);
    let given = [
        ("--residual", true, asked.operands.has(Operand::Residual)),
        ("--norm", true, asked.rms_norm.is_some()),
        ("--activation", false, asked.activation != Activation::None),
    ];
    for (option, of_sums, given) in given {
        let ops = if of_sums { "gemm_rs and gemm_ar" } else { "ag_gemm" };
        ensure!(
            !given || layers.iter().any(|layer| layer.problem.op().reduces() == of_sums),
            "{option} is of {ops}: name it with --ops"
        );
    }
    let most =
        layers.iter().map(|layer| layer.problem.m()).max().filter(|_| args.layers.ms.is_none());
    let case = |Layer { name, problem }: Layer| {
        let epilogue = of_op(asked, problem.op());
        let problem = problem_with(epilogue, problem).with_context(|| name.clone())?;
        let sustained = args.sustained.filter(|_| most.is_none_or(|most| problem.m() == most));
        Ok(BenchCase { model: name + &suffix(epilogue), problem, epilogue, sustained })
    };
    layers.into_iter().map(case).collect()
}

pub(crate) const SEED: u64 = 0x5EED_F10C_u64;
