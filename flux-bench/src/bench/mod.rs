//! The benchmark: both ops, verified and measured beside their baselines.
//!
//! Invariant: a row's times and its verification come from the same process, ops and buffers; a row that did not verify is reported as such,
//! and fails the run.

pub(crate) mod gpu;
mod host;
mod measure;
mod sustained;

pub use measure::{Contender, Lane, WARM_UP, measure};
pub use sustained::sustain;

use crate::data::Fill;
use crate::machine;
use crate::op::FusedOp;
use crate::operands::Operands;
use crate::plan::Plan;
use crate::ranks;
use crate::reference::Verdict;
use crate::report::{self, Measured, Report, Row, Sustained, Verified};
use crate::shapes::{self, Layer, Model, parse_op};
use crate::site::Site;
use anyhow::{Context, ensure};
use flux_core::{OpKind, Problem, Rank, WorldSize};
use flux_transport::nccl::{Comm, UniqueId};
use flux_transport::{Communicator, Options, Select, TransportKind, World};
use half::bf16;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Arguments of `flux-bench bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Global rows; 512 to 8192 on GPUs and 512 on the host where it is left out
    #[arg(long, value_delimiter = ',', value_name = "M,...")]
    pub ms: Vec<usize>,
    /// Layers: gpt3, llama70b, or a fraction of one as in gpt3/16
    #[arg(long, value_delimiter = ',', value_name = "MODEL,...")]
    pub shapes: Vec<Model>,
    /// Ranks; as many as there are GPUs, or 8 on the host, where it is left out
    #[arg(long, value_name = "RANKS")]
    pub tp: Option<u32>,
    /// auto, host, nvlink, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Ops
    #[arg(long, value_delimiter = ',', value_name = "OP,...", default_value = "ag_gemm,gemm_rs", value_parser = parse_op)]
    pub ops: Vec<OpKind>,
    /// Rounds; 30 on GPUs and 10 on the host where it is left out
    #[arg(long)]
    pub samples: Option<usize>,
    /// After the rounds, call op, GEMM and serial path back to back for so long each: at every one of --ms, or at the largest where it is left out
    #[arg(long, value_name = "SECONDS", value_parser = sustained::seconds)]
    pub sustained: Option<f64>,
    /// Changes to the plan
    #[command(flatten)]
    pub plan: Plan,
}

/// One row to be measured.
#[derive(Clone, Debug)]
struct Case {
    model: String,
    problem: Problem,
    /// Seconds for which each contender is also called back to back.
    sustained: Option<f64>,
}

/// What one rank has to say of a case.
#[derive(Clone)]
struct Outcome {
    verdict: Verdict,
    measured: Measured,
    sustained: Option<Sustained>,
    plan: String,
}

/// Runs the benchmark, prints the table, writes the file, and says whether every row was verified.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    if let Some(path) = &args.json {
        crate::atomic_file::check(path)?;
    }
    let on_gpus = machine::uses_gpus(args.transport)?;
    let tp = match args.tp {
        Some(tp) => tp,
        None if on_gpus => machine::gpu_count(),
        None => 8,
    };
    let cases = cases(args, shapes::world(tp)?, on_gpus)?;
    let samples = args.samples.unwrap_or(if on_gpus { 30 } else { 10 });
    ensure!(samples > 0, "--samples must be at least 1");
    let (transport, rows) =
        if on_gpus { gpu_rows(&cases, args, samples)? } else { (TransportKind::Host, host_rows(&cases, args.plan, samples)?) };
    let machine = machine::describe(on_gpus, tp);
    let report = Report {
        schema: report::SCHEMA,
        device: machine.device,
        gpus: machine.gpus,
        transport: transport.to_string(),
        driver: machine.driver,
        cuda: machine.cuda,
        nccl: machine.nccl,
        commit: report::commit(),
        date: report::now(),
        command: report::command_line(),
        rows,
    };
    print!("{}", report::table(&report));
    if let Some(path) = &args.json {
        report.write(path)?;
        println!("\nwritten to {}", path.display());
    }
    Ok(report.verified())
}

fn cases(args: &Args, world: WorldSize, on_gpus: bool) -> anyhow::Result<Vec<Case>> {
    let default = |words: &[&str]| words.iter().map(|w| w.parse()).collect::<Result<Vec<Model>, _>>();
    let models = match (args.shapes.as_slice(), on_gpus) {
        ([], true) => default(&["gpt3", "llama70b"])?,
        // Shapes that two cores finish in seconds.
        ([], false) => default(&["gpt3/16", "llama70b/16"])?,
        (given, _) => given.to_vec(),
    };
    let ms = match (args.ms.as_slice(), on_gpus) {
        ([], true) => vec![512, 1024, 2048, 4096, 8192],
        ([], false) => vec![512],
        (given, _) => given.to_vec(),
    };
    let most = ms.iter().max().copied().filter(|_| args.ms.is_empty());
    let layers = shapes::layers(&models, &args.ops, &ms, world)?;
    let case = |Layer { model, problem }: Layer| {
        let sustained = args.sustained.filter(|_| most.is_none_or(|most| problem.m() as usize == most));
        Case { model: model.name().to_owned(), problem, sustained }
    };
    Ok(layers.into_iter().map(case).collect())
}

fn bar(rows: usize, samples: usize) -> ProgressBar {
    let style = "{bar:30} {pos:>4}/{len} rounds, {eta} left  {msg}";
    let bar = ProgressBar::new((rows * (WARM_UP + samples)) as u64);
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn host_rows(cases: &[Case], chosen: Plan, samples: usize) -> anyhow::Result<Vec<Row>> {
    let bar = bar(cases.len(), samples);
    let mut rows = Vec::new();
    for case in cases {
        bar.set_message(case.problem.to_string());
        let problem = case.problem;
        let shared = host::Shared::<bf16>::new(&problem);
        let workers = chosen.workers.unwrap_or(machine::cores() / problem.world().get()).max(1);
        let chosen = Plan { workers: Some(workers), ..chosen };
        let body = |world: &World| {
            let comm = Communicator::connect_blocking(world, Options::from(Select::Host))?;
            let site = Site::new(comm)?;
            let op = FusedOp::<bf16>::build(&problem, site.comm(), &chosen)?;
            let mut set = site.operand_set(&problem)?;
            let verdict = verify(&site, &op, &mut set)?;
            let mut lane = host::HostLane::new(&site, &op, &mut set, Arc::clone(&shared), workers)?;
            let tick = || {
                if site.rank().get() == 0 {
                    bar.inc(1);
                }
            };
            let measured = measure(&mut lane, site.comm(), samples, &tick)?;
            let sustained = case.sustained.map(|seconds| sustain(&mut lane, site.comm(), &measured, seconds)).transpose()?;
            drop(lane);
            Ok(Outcome { verdict: verdict.merge(verify(&site, &op, &mut set)?), measured, sustained, plan: plan(&op) })
        };
        rows.push(row(case, samples, ranks::on_threads(World::local(problem.world().get())?, body)?)?);
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// One communicator and one harness for all rows, as a program would have them; with the transport that was chosen.
fn gpu_rows(cases: &[Case], args: &Args, samples: usize) -> anyhow::Result<(TransportKind, Vec<Row>)> {
    let world = cases.first().context("there is nothing to measure")?.problem.world();
    let need = cases.iter().map(|c| gpu::device_bytes(&c.problem)).max().unwrap_or(0);
    tracing::debug!(bytes = need, "operands on each device");
    let id = UniqueId::new().context("the serial baseline needs NCCL")?;
    let bar = bar(cases.len(), samples);
    let body = |local: &World| {
        let comm = Communicator::connect_blocking(local, machine::options(args.transport, local.rank(), 1))?;
        let site = Site::new(comm)?;
        let device = site.gpu().context("the communicator is not on a device")?.device().clone();
        let nccl = Comm::join(&device, id, local.rank().get(), world.get(), Duration::from_mins(1))?;
        let mut rows = Vec::new();
        for case in cases {
            if site.rank().get() == 0 {
                bar.set_message(case.problem.to_string());
            }
            let op = FusedOp::<bf16>::build(&case.problem, site.comm(), &args.plan)?;
            let mut sets = (0..gpu::SETS).map(|_| site.operand_set(&case.problem)).collect::<anyhow::Result<Vec<_>>>()?;
            let verdict = verify(&site, &op, &mut sets[0])?;
            for (call, set) in sets.iter_mut().enumerate() {
                site.fill(set, Operands::new(case.problem, SEED, call as u64, Fill::Uniform))?;
            }
            let mut lane = gpu::GpuLane::new(&site, &nccl, &op, &mut sets)?;
            let tick = || {
                if site.rank().get() == 0 {
                    bar.inc(1);
                }
            };
            let measured = measure(&mut lane, site.comm(), samples, &tick)?;
            let sustained = case.sustained.map(|seconds| sustain(&mut lane, site.comm(), &measured, seconds)).transpose()?;
            drop(lane);
            rows.push(Outcome { verdict: verdict.merge(verify(&site, &op, &mut sets[0])?), measured, sustained, plan: plan(&op) });
        }
        Ok((site.comm().transport(), rows))
    };
    let by_rank = ranks::on_threads(World::local(world.get())?, |local| body(local).map_err(|e| give_up(local.rank(), &e)))?;
    bar.finish_and_clear();
    let transport = by_rank.first().context("no ranks")?.0;
    let of_case = |i: usize| by_rank.iter().map(|(_, rows)| rows[i].clone()).collect();
    let rows = cases.iter().enumerate().map(|(i, case)| row(case, samples, of_case(i)));
    Ok((transport, rows.collect::<anyhow::Result<_>>()?))
}

/// Ends the process: the other ranks may wait in a collective of NCCL for this one, and no error of ours ends that wait.
#[expect(clippy::exit, reason = "see above")]
pub(crate) fn give_up(rank: Rank, error: &anyhow::Error) -> anyhow::Error {
    eprintln!("flux-bench: rank {rank}: {error:#}");
    std::process::exit(1)
}

pub(crate) const SEED: u64 = 0x5EED_F10C_u64;

/// One call with integer data, which must be exact, and one with random data, which must be within the bound; both with the output poisoned.
fn verify(site: &Site, op: &FusedOp<bf16>, set: &mut crate::site::OperandSet<bf16>) -> anyhow::Result<Verdict> {
    let mut call = |fill| {
        site.fill(set, Operands::new(*op.problem(), SEED, 0, fill))?;
        site.poison(&mut set.y)?;
        site.forward(op, set)?;
        site.sync(op)?;
        site.verify(set, op.schedule().stack)
    };
    let exact = call(Fill::SmallInts)?;
    Ok(Verdict { violations: exact.violations, first: exact.first, ..Verdict::default() }.merge(call(Fill::Uniform)?))
}

fn plan(op: &FusedOp<bf16>) -> String {
    format!("{}, {}", op.schedule(), op.executor())
}

fn row(case: &Case, samples: usize, ranks: Vec<Outcome>) -> anyhow::Result<Row> {
    let verdict = ranks.iter().fold(Verdict::default(), |sum, rank| sum.merge(rank.verdict));
    if !verdict.ok() {
        eprintln!("{}: {verdict}", case.problem);
    }
    let Outcome { measured, sustained, plan, .. } = ranks.into_iter().next().context("no ranks")?;
    let verified = Verified { max_rel_err: verdict.max_rel_err(), ok: verdict.ok() };
    let row = Row::new(&case.model, &case.problem, plan, measured, verified, u32::try_from(samples)?);
    Ok(Row { sustained, ..row })
}
