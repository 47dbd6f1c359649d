//! `flux-bench lab soak --random`: random problems with random plans, until the time is up.
//!
//! Invariant: a failure is reported with the command that repeats it.

mod draw;
#[cfg(test)]
mod tests;

use super::phases::{SoakResult, SoakRun};
use super::{Args, soaked};
use crate::harness::gpu::kernels;
use crate::harness::{RankContext, told};
use crate::{machine, out};
use anyhow::Context;
use draw::{Legal, Processor, RandomCase};
use flux_transport::{Capabilities, Mover, PeerStores};
use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the first rank says how far it is.
const SAY: Duration = Duration::from_secs(10);

/// One rank's part: one case, or cases until the minutes have passed or one has failed. The kernels
/// of `at_once` ranks share a GPU. Collective.
pub(super) fn soak_rank(args: &Args, ctx: &RankContext, at_once: u32) -> anyhow::Result<bool> {
    let (comm, first) = (ctx.comm(), ctx.rank().get() == 0);
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_secs());
    let seed = agree(ctx, args.seed.unwrap_or_else(clock))?;
    let processor = match ctx.gpu() {
        None => Processor::Host,
        Some(gpu) => Processor::Gpu {
            ctas: machine::ctas(ctx.comm(), gpu.device().info().sms / at_once),
            generation: kernels::of_device(gpu.device())?.generation,
            alone: at_once == 1,
        },
    };
    let Capabilities { mover, peer_stores, .. } = comm.capabilities();
    let legal = match (comm.nodes().are_mixed(), mover) {
        (true, _) => Legal::Mixed,
        (false, Mover::Messages { .. }) => Legal::Messages,
        _ if peer_stores == PeerStores::All => Legal::All,
        _ => Legal::Staged,
    };
    let (start, mut said) = (Instant::now(), Instant::now());
    let limit = Duration::from_secs_f64(args.random.unwrap_or(0.0) * 60.0);
    if first {
        out::line(&format_args!("{}\nrandom cases of seed {seed}", comm.explain()));
    }
    let mut sum = SoakResult::default();
    for number in args.case.unwrap_or(0).. {
        let case = RandomCase::new(seed, number, comm.world_size(), processor, legal)?;
        let failed = || format!("{case}\nagain: {}", again(args, ctx, at_once, seed, number));
        tracing::debug!(rank = %ctx.rank(), "{case}");
        let run = SoakRun {
            execution: case.execution(ctx.rank(), processor),
            epilogue: case.epilogue,
            apart: 2,
            in_a_row: case.calls,
            seed: case.seed,
            defect: args.defect,
        };
        let all = soaked(ctx, &case.problem, &run).with_context(failed)?;
        if !all.passed() {
            if first {
                out::line(&format_args!("FAILED  {}\n{all}", failed()));
            }
            return Ok(false);
        }
        sum = sum.then(all);
        if first && (args.case.is_some() || said.elapsed() >= SAY) {
            said = Instant::now();
            out::line(&format_args!("passed  {case}"));
        }
        // The first rank's clock decides for all.
        if args.case.is_some() || agree(ctx, u64::from(start.elapsed() >= limit))? == 1 {
            if first {
                let cases = number + 1 - args.case.unwrap_or(0);
                out::line(&format_args!(
                    "passed  {cases} random cases of seed {seed}: {sum}, {:.1} s",
                    start.elapsed().as_secs_f64()
                ));
            }
            break;
        }
    }
    Ok(true)
}

/// The first rank's value, on every rank.
fn agree(ctx: &RankContext, mine: u64) -> anyhow::Result<u64> {
    told(ctx.comm(), mine)?.into_iter().next().context("no ranks")
}

/// The command that repeats a case, alone or after the cases before it.
fn again(args: &Args, ctx: &RankContext, at_once: u32, seed: u64, case: u64) -> String {
    let (ranks, transport) = (ctx.comm().world_size(), ctx.comm().transport());
    let mut command = format!(
        "flux-bench lab soak --seed {seed} --case {case} --tp {ranks} --transport {transport}"
    );
    if let Some(nodes) = args.nodes {
        let _infallible = write!(command, " --nodes {nodes}");
    }
    if args.ranks_per_gpu > 1 {
        let _infallible = write!(command, " --ranks-per-gpu {}", args.ranks_per_gpu);
    }
    // As threads they divide a GPU, and other plans are drawn.
    if at_once < args.ranks_per_gpu {
        command.push_str(" --processes");
    }
    format!("{command}; with the cases before it: --random MINUTES in target of --case {case}")
}
