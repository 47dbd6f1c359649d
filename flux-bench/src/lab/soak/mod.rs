//! `flux-bench lab soak`: hard shapes on integers, with poisoned memory, delayed ranks and repeated
//! runs.
//!
//! Invariant: a case passes only if every checked output was exact, or within its derived bound.
//!
//! The phases of a case:
//!
//! - **apart**: outputs and data regions are filled with NaN before each call, so nothing is right
//!   by an earlier call's result;
//! - **in a row**: calls follow each other with new data, and one rank after another is delayed;
//! - **again**: the same random data with other delays must give the same bits;
//! - **rows**: each call has other rows than the one before.
//!
//! `--random` runs random cases in place of the matrix.

mod cases;
mod phases;
mod random;

pub(super) use cases::{SoakCase, matrix};

use crate::harness::{Defect, RankContext, ops_on, ranks};
use crate::plan::Overrides;
use crate::{launch, limits, machine, out, shapes};
use anyhow::ensure;
use flux_core::Problem;
use flux_kernels::with_elements;
use flux_transport::{Communicator, Options, Select, World};
use phases::{SoakResult, SoakRun};
use std::time::Instant;

/// Arguments of `flux-bench lab soak`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Ranks; as many as GPUs times --ranks-per-gpu, or 8 on the host, where left out
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    pub tp: Option<u32>,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Calls in a row at each shape
    #[arg(long, default_value_t = 64, value_parser = limits::calls())]
    pub calls: u64,
    /// Few calls, and no shape of a whole model
    #[arg(long, conflicts_with = "calls")]
    pub quick: bool,
    /// Ranks as processes, one each, instead of threads of this one
    #[arg(long)]
    pub processes: bool,
    /// Ranks on each GPU: as threads they divide it, as processes they take turns
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = limits::ranks_per_gpu())]
    pub ranks_per_gpu: u32,
    /// Nodes that the ranks are dealt to, for transports auto, host and mixed
    #[arg(long, value_name = "NODES")]
    pub nodes: Option<u32>,
    /// Only the cases whose names contain this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Random shapes and plans for so long, in place of the matrix
    #[arg(
        long,
        value_name = "MINUTES",
        value_parser = limits::length("minutes", 10_000.0),
        conflicts_with_all = ["calls", "quick", "only"],
    )]
    pub random: Option<f64>,
    /// The one random case of this number
    #[arg(
        long,
        value_name = "NUMBER",
        requires = "seed",
        conflicts_with_all = ["calls", "quick", "only", "random"],
    )]
    pub case: Option<u64>,
    /// Seed of data, delays and random cases; where left out 1, and for random cases the clock's
    #[arg(long)]
    pub seed: Option<u64>,
    #[command(flatten)]
    defect: Defect,
}

/// What only GPUs have would change nothing on the host.
fn check(args: &Args, on_gpus: bool) -> anyhow::Result<()> {
    ensure!(
        on_gpus || args.ranks_per_gpu == 1,
        "--ranks-per-gpu is for GPUs, and changes nothing on the host: leave it out"
    );
    Ok(())
}

/// Runs the matrix and says whether all of it passed. Inside a launch this process is one rank.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    let launched = launch::as_rank(|world| {
        launch::agree(args.tp, world)?;
        check(args, machine::uses_gpus(args.transport)?)?;
        // A launcher would end rank 0 amid its output when another rank fails.
        Ok(soak_rank(args, world)? || world.rank().get() > 0)
    })?;
    if let Some(passed) = launched {
        return Ok(passed);
    }
    let on_gpus = machine::uses_gpus(args.transport)?;
    check(args, on_gpus)?;
    let tp = args.tp.unwrap_or(if on_gpus { machine::gpu_count() * args.ranks_per_gpu } else { 8 });
    shapes::world(tp)?;
    if args.processes {
        return launch::again(tp, None, args.ranks_per_gpu > 1);
    }
    let passed = ranks::on_threads(World::local(tp)?, |world| soak_rank(args, world))?;
    Ok(passed.into_iter().all(|p| p))
}

/// One rank's part; every rank learns whether all ranks passed.
fn soak_rank(args: &Args, world: &World) -> anyhow::Result<bool> {
    let options = Options {
        nodes: args.nodes,
        ..machine::options(args.transport, world.local_rank(), args.ranks_per_gpu)
    };
    let comm = Communicator::connect_blocking(world, options)?;
    let ctx = RankContext::new(comm)?;
    let at_once = machine::at_once(world.launch(), args.ranks_per_gpu);
    if args.random.is_some() || args.case.is_some() {
        return random::soak_rank(args, &ctx, at_once);
    }
    let comm = ctx.comm();
    let first = comm.rank().get() == 0;
    let cases = matrix(ops_on(comm), comm.world_size(), !args.quick && ctx.gpu().is_some())?;
    let wanted: Vec<&SoakCase> = cases
        .iter()
        .filter(|c| args.only.as_deref().is_none_or(|only| c.name.contains(only)))
        .collect();
    ensure!(
        !wanted.is_empty(),
        "no case has {:?} in its name",
        args.only.as_deref().unwrap_or_default()
    );
    if first {
        out::line(&format_args!("{}\n{} cases", comm.explain(), wanted.len()));
    }
    let workers = ctx
        .gpu()
        .filter(|_| at_once > 1)
        .map(|gpu| machine::ctas(comm, gpu.device().info().sms / at_once));
    let mut passed = true;
    for case in wanted {
        let start = Instant::now();
        let few = args.quick || case.heavy;
        let run = SoakRun {
            execution: Overrides { workers, ..Overrides::default() },
            epilogue: case.epilogue,
            apart: if few { 3 } else { 8 },
            in_a_row: if few { args.calls.min(16) } else { args.calls },
            seed: args.seed.unwrap_or(1),
            defect: args.defect,
        };
        let all = soaked(&ctx, &case.problem, &run)?;
        passed &= all.passed();
        if first {
            let word = if all.passed() { "passed" } else { "FAILED" };
            out::line(&format_args!(
                "{word}  {:<54} {all}, {:.1} s",
                case.name,
                start.elapsed().as_secs_f64()
            ));
        }
    }
    Ok(passed)
}

/// What all ranks find of a problem, on every rank.
fn soaked(ctx: &RankContext, problem: &Problem, run: &SoakRun) -> anyhow::Result<SoakResult> {
    let numerics = problem.numerics();
    let mine = with_elements!(numerics, X, Y, phases::soak::<X, Y>(ctx, problem, run))?;
    let comm = ctx.comm();
    let all = comm.exchange(&serde_json::to_vec(&mine)?)?;
    let mut sum = mine;
    for (rank, bytes) in all.iter().enumerate() {
        if rank != comm.rank().index() {
            sum = sum.merge(serde_json::from_slice(bytes)?);
        }
    }
    Ok(sum)
}
