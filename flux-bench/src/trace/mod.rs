//! The time line of one fused call: for people, as a page or a picture, and for a trace viewer.
//!
//! Invariant: the call is warm, on operand sets in rotation, with the ranks lined up before it, and
//! its result was verified.

mod chrome;
mod summary;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use chrome::events;
pub(crate) use summary::summary;

use crate::bench::{self, gpu_contenders::SETS};
use crate::harness::{Fill, Operands, PlannedLayer, RankContext, build, ranks};
use crate::page::Drawings;
use crate::plan::{OverrideArgs, Overrides, PlanArgs};
use crate::shapes::{self, Layer, Shape, TypeArgs};
use crate::timeline::{self, Call};
use crate::{atomic_file, end, launch, limits, machine, out, simulate};
use anyhow::{Context, ensure};
use flux_core::machine::Machine;
use flux_core::plan::Plan;
use flux_core::{OpKind, Problem};
use flux_cuda::DeviceBlock;
use flux_kernels::{Element, with_elements};
use flux_ops::Timeline;
use flux_transport::internal::nccl::{Comm, UniqueId};
use flux_transport::{Select, World};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Arguments of `flux-bench trace`.
#[derive(Debug, clap::Args)]
#[command(group(
    clap::ArgGroup::new("shown")
        .args(["output", "summary", "html", "svg"])
        .required(true)
        .multiple(true)
))]
pub(crate) struct Args {
    /// The op: ag_gemm, gemm_rs or gemm_ar
    #[arg(long, alias = "op", value_name = "OP", value_parser = shapes::parse_op)]
    pub ops: OpKind,
    /// The layer: a name, HIDDENxFFN or OP:n=N,k=K, as in llama3-8b.qkv; where left out gpt3, and
    /// on the host a sixteenth of it
    #[arg(long, alias = "shape", value_name = "SHAPE")]
    pub shapes: Option<Shape>,
    /// Global rows
    #[arg(long, alias = "m", value_name = "M")]
    pub ms: usize,
    #[command(flatten)]
    pub(crate) types: TypeArgs,
    /// Ranks; as many as GPUs, or 2 on the host, where left out
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    pub tp: Option<u32>,
    /// auto, host, nvlink, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Calls; the last one is shown
    #[arg(long, default_value_t = 20, value_parser = limits::samples())]
    pub calls: u32,
    /// Write the time line to this file, as trace events in JSON
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) drawings: Drawings,
    /// Draw below it the same call with the same plan, simulated on this machine; h200 where none
    /// is named. `simulate --html` needs no call
    #[arg(
        long,
        value_name = "MACHINE",
        num_args = 0..=1,
        default_missing_value = "h200",
        requires = "drawn",
        value_parser = simulate::machine,
    )]
    pub simulated: Option<Machine>,
    /// Print when the waves of tiles came past each phase
    #[arg(long)]
    pub summary: bool,
    /// Changes to the plan
    #[command(flatten)]
    pub execution: OverrideArgs,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Traced {
    pub timeline: Timeline,
    /// How long the call took, in milliseconds: between two events on the stream, or by the host's
    /// clock.
    pub call_ms: f64,
    /// Whether the rank works on a GPU.
    pub on_gpu: bool,
    /// The plan.
    pub plan: Plan,
    /// Plan and execution, in words.
    pub words: String,
}

/// Holds the stream while the host enqueues the call.
const SPIN: Duration = Duration::from_micros(500);

/// Records the call, prints the summary, writes the files.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    launch::refuse("trace")?;
    if let Some(path) = &args.output {
        atomic_file::check(path)?;
    }
    args.drawings.check()?;
    let on_gpus = machine::uses_gpus(args.transport)?;
    let tp = args.tp.unwrap_or(if on_gpus { machine::gpu_count() } else { 2 });
    let layer = layer(args, tp, on_gpus)?;
    let problem = layer.problem;
    let id =
        on_gpus.then(|| UniqueId::new().context("lining the ranks up needs NCCL")).transpose()?;
    let record = with_elements!(problem.numerics(), X, Y, record::<X, Y>);
    let body = |local: &World| {
        Ok(record(local, &problem, args, id)
            .unwrap_or_else(|error| end::give_up(local.rank(), &error)))
    };
    let ranks = ranks::on_threads(World::local(tp)?, body)?;
    if args.summary {
        out::print(&summary(&problem, &ranks));
    }
    if let Some(path) = &args.output {
        let trace = events(&problem, &ranks);
        atomic_file::write(path, |w| Ok(serde_json::to_writer(w, &trace)?))?;
        out::line(&format_args!("written to {}", path.display()));
    }
    if args.drawings.is_empty() {
        return Ok(());
    }
    let mut calls = vec![drawn(&problem, &ranks)?];
    if let (Some(machine), Some(first)) = (&args.simulated, ranks.first()) {
        let plan = PlanArgs { plan: Some(first.plan), candidate: None };
        calls.push(simulate::timeline(&PlannedLayer::new(layer, plan, *machine)?, machine)?);
    }
    args.drawings.write(&calls)
}

/// What is drawn of a traced call.
fn drawn(problem: &Problem, ranks: &[Traced]) -> anyhow::Result<Call> {
    let workers = |traced: &Traced| timeline::workers(&traced.timeline, traced.on_gpu);
    let times: Vec<String> =
        ranks.iter().map(|traced| format!("{:.1}", traced.call_ms * 1e3)).collect();
    let mut about = vec![format!("measured: the call took {} us", times.join(", "))];
    about.extend(
        ranks.first().into_iter().flat_map(|first| first.words.split("; ")).map(str::to_owned),
    );
    Ok(Call {
        title: problem.to_string(),
        about,
        ranks: ranks.iter().map(workers).collect::<anyhow::Result<_>>()?,
    })
}

/// The layer that is asked for, of `tp` ranks.
fn layer(args: &Args, tp: u32, on_gpus: bool) -> anyhow::Result<Layer> {
    let world = shapes::world(tp)?;
    let usual = || if on_gpus { "gpt3" } else { "gpt3/16" }.parse();
    let shape: Shape = args.shapes.clone().map_or_else(usual, Ok)?;
    let (n, k) =
        shape.extents(args.ops).with_context(|| format!("{shape} has no {}", args.ops.name()))?;
    let problem = Problem::new(args.ops, args.ms, n, k, args.types.numerics()?, world)?;
    Ok(Layer { name: shape.name().to_owned(), problem })
}

fn record<X: Element, Y: Element>(
    local: &World,
    problem: &Problem,
    args: &Args,
    id: Option<UniqueId>,
) -> anyhow::Result<Traced> {
    let ctx = RankContext::connect(local, args.transport)?;
    let line = LineUp::new(&ctx, problem, id)?;
    let overrides = Overrides { trace: true, ..args.execution.on(ctx.comm(), problem)? };
    let op = build(problem, ctx.comm(), overrides)?;
    let mut sets =
        (0..SETS).map(|_| ctx.operand_set::<X, Y>(problem)).collect::<anyhow::Result<Vec<_>>>()?;
    for (call, set) in sets.iter_mut().enumerate() {
        ctx.fill(set, Operands::new(*problem, bench::SEED, call as u64, Fill::Uniform))?;
        ctx.poison_results(set)?;
    }
    let mut last_call = || -> anyhow::Result<f64> {
        let mut call_ms = 0.0;
        let calls = args.calls as usize;
        for call in 0..calls {
            // A set that still holds an earlier result would pass. The poison is early enough to
            // leave L2.
            if call + SETS == calls {
                ctx.poison_results(&mut sets[call % SETS])?;
            }
            call_ms = line.time(&ctx, || ctx.forward(&op, &mut sets[call % SETS]))?;
        }
        ctx.sync(&op)?;
        Ok(call_ms)
    };
    // Here, before any memory is freed.
    let call_ms = last_call().unwrap_or_else(|error| end::give_up(local.rank(), &error));
    let timeline = op.timeline(ctx.stream())?;
    let plan = op.plan(op.max_m())?;
    let verdict = ctx.verify(&sets[(args.calls as usize - 1) % SETS], &plan)?;
    ensure!(verdict.ok(), "the call's result is wrong: {verdict}");
    let words = format!("{plan}; {}", op.execution(op.max_m())?);
    Ok(Traced { timeline, call_ms, on_gpu: ctx.gpu().is_some(), plan, words })
}

/// Lets all ranks begin a call at once.
enum LineUp {
    /// On their streams, by a collective of one word.
    Streams(Comm, DeviceBlock),
    /// By the communicator's barrier.
    Host,
}

impl LineUp {
    fn new(ctx: &RankContext, problem: &Problem, id: Option<UniqueId>) -> anyhow::Result<Self> {
        let (Some(id), Some(gpu)) = (id, ctx.gpu()) else { return Ok(Self::Host) };
        let (rank, world) = (ctx.rank().get(), problem.world().get());
        let nccl = Comm::join(gpu.device(), id, rank, world, Duration::from_mins(1))?;
        let word = gpu.alloc(4)?;
        gpu.upload(&word, &[0; 4])?;
        Ok(Self::Streams(nccl, word))
    }

    /// Makes a call, and returns its milliseconds.
    fn time(
        &self,
        ctx: &RankContext,
        call: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        match self {
            Self::Streams(nccl, word) => {
                let gpu = ctx.expect_gpu()?;
                gpu.line_up(nccl, word, SPIN)?;
                gpu.time(call)
            }
            Self::Host => {
                ctx.comm().barrier()?;
                let begin = Instant::now();
                call()?;
                Ok(begin.elapsed().as_secs_f64() * 1e3)
            }
        }
    }
}
