//! The time line of one fused call: for people, and as a file for a trace viewer.
//!
//! Invariant: the call is warm, on operand sets in rotation, with the ranks lined up before it, and
//! its result was verified.

mod chrome;
mod summary;
#[cfg(test)]
mod tests;

pub(crate) use chrome::events;
pub(crate) use summary::summary;

use crate::atomic_file;
use crate::bench::{self, gpu_contenders::SETS};
use crate::end;
use crate::harness::Fill;
use crate::harness::{Operands, RankContext, build_traced, ranks};
use crate::launch;
use crate::limits;
use crate::machine;
use crate::out;
use crate::plan::OverrideArgs;
use crate::shapes::{self, Shape};
use anyhow::{Context, ensure};
use flux_core::{DType, OpKind, Problem};
use flux_kernels::{Element, with_element};
use flux_ops::Timeline;
use flux_transport::internal::nccl::{Comm, UniqueId};
use flux_transport::{Communicator, Select, World};
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `flux-bench trace`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("shown").required(true).multiple(true)))]
pub(crate) struct Args {
    /// The op: ag_gemm, gemm_rs or gemm_ar
    #[arg(long, alias = "op", value_name = "OP", value_parser = shapes::parse_op)]
    pub ops: OpKind,
    /// The layer: a name, HIDDENxFFN or OP:n=N,k=K, as in llama3-8b.qkv
    #[arg(long, alias = "shape", value_name = "SHAPE", default_value = "gpt3")]
    pub shapes: Shape,
    /// Global rows
    #[arg(long, alias = "m", value_name = "M")]
    pub ms: usize,
    /// Element type: bf16 or fp16
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = shapes::parse_dtype)]
    pub dtype: DType,
    /// Ranks; as many as there are GPUs where it is left out
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    pub tp: Option<u32>,
    /// Calls; the last one is shown
    #[arg(
        long,
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(1..=limits::SAMPLES),
    )]
    pub calls: u32,
    /// Write the time line to this file, as trace events in JSON
    #[arg(long, value_name = "FILE", group = "shown")]
    pub output: Option<PathBuf>,
    /// Print when the waves of tiles came past each phase
    #[arg(long, group = "shown")]
    pub summary: bool,
    /// Changes to the plan
    #[command(flatten)]
    pub execution: OverrideArgs,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Traced {
    pub timeline: Timeline,
    /// How long the call took between two events on the stream, in milliseconds.
    pub event_ms: f64,
    /// Plan and execution, in words.
    pub plan: String,
}

/// Holds the stream while the host enqueues the call.
const SPIN: Duration = Duration::from_micros(500);

/// Records the call, prints the summary, writes the file.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    launch::refuse("trace")?;
    if let Some(path) = &args.output {
        atomic_file::check(path)?;
    }
    flux_cuda::available().context("time lines are recorded by the CUDA kernel")?;
    ensure!(
        machine::uses_gpus(Select::Auto)?,
        "time lines are recorded by the CUDA kernel, and FLUX_TRANSPORT asks for the host"
    );
    let tp = args.tp.unwrap_or_else(machine::gpu_count);
    let problem = problem(args, tp)?;
    let id = UniqueId::new().context("lining the ranks up needs NCCL")?;
    let record = with_element!(args.dtype, T, record::<T>);
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
    Ok(())
}

/// The problem that is asked for, of `tp` ranks.
fn problem(args: &Args, tp: u32) -> anyhow::Result<Problem> {
    let world = shapes::world(tp)?;
    let (n, k) = args
        .shapes
        .extents(args.ops)
        .with_context(|| format!("{} has no {}", args.shapes, args.ops.name()))?;
    Ok(Problem::new(args.ops, args.ms, n, k, args.dtype, world)?)
}

fn record<T: Element>(
    local: &World,
    problem: &Problem,
    args: &Args,
    id: UniqueId,
) -> anyhow::Result<Traced> {
    let comm = Communicator::connect_blocking(
        local,
        machine::options(Select::Auto, local.local_rank(), 1),
    )?;
    let ctx = RankContext::new(comm)?;
    let gpu = ctx.gpu().context("the communicator is not on a device")?;
    let nccl = Comm::join(
        gpu.device(),
        id,
        local.rank().get(),
        problem.world().get(),
        Duration::from_mins(1),
    )?;
    let op = build_traced(problem, ctx.comm(), args.execution.on(ctx.comm(), problem)?)?;
    let mut sets =
        (0..SETS).map(|_| ctx.operand_set::<T>(problem)).collect::<anyhow::Result<Vec<_>>>()?;
    for (call, set) in sets.iter_mut().enumerate() {
        ctx.fill(set, Operands::new(*problem, bench::SEED, call as u64, Fill::Uniform))?;
        ctx.poison_results(set)?;
    }
    let word = gpu.alloc(4)?;
    gpu.upload(&word, &[0; 4])?;
    let mut last_call = || -> anyhow::Result<f64> {
        let mut event_ms = 0.0;
        let calls = args.calls as usize;
        for call in 0..calls {
            // A set that still holds an earlier result would pass. The poison is early enough to
            // leave L2.
            if call + SETS == calls {
                ctx.poison_results(&mut sets[call % SETS])?;
            }
            gpu.line_up(&nccl, &word, SPIN)?;
            event_ms = gpu.time(|| ctx.forward(&op, &mut sets[call % SETS]))?;
        }
        ctx.sync(&op)?;
        Ok(event_ms)
    };
    // Here, before any memory is freed.
    let event_ms = last_call().unwrap_or_else(|error| end::give_up(local.rank(), &error));
    let timeline = op.timeline(ctx.stream())?;
    let verdict = ctx.verify(&sets[(args.calls as usize - 1) % SETS], &op.plan(op.max_m())?)?;
    ensure!(verdict.ok(), "the call's result is wrong: {verdict}");
    Ok(Traced {
        timeline,
        event_ms,
        plan: format!("{}; {}", op.plan(op.max_m())?, op.execution(op.max_m())?),
    })
}
