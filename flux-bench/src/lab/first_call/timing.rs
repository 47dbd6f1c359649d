//! The first call and those after it, in this process.
//!
//! Invariant: each call follows a rest, starts at an instant that the ranks agree on, and is timed
//! between two events. NVLink sleeps after 50 ms without traffic (`nvidia-smi nvlink -gLowPwrInfo`,
//! H200).

use super::FirstCallRow;
use crate::harness::{
    Defect, Fill, OperandSet, Operands, RankContext, Span, Times, build, ranks, told,
};
use crate::plan::Overrides;
use crate::report::Head;
use anyhow::{Context, ensure};
use flux_core::Problem;
use flux_kernels::Element;
use flux_ops::FusedLinear;
use flux_transport::{Select, World};
use std::time::{Duration, Instant};

/// From the ranks' agreement to the call: time to enqueue a call that has nothing to load.
const LEAD: Duration = Duration::from_micros(300);
/// Rest before each call, with the streams held, so that clocks are those of a machine at work.
const REST: Duration = Duration::from_millis(100);
/// Calls after the first that are thrown away, and those that are kept.
const SETTLING: usize = 2;
const WARM: usize = 9;

/// What a call took: on the rank's stream, and on the host until it was enqueued. Milliseconds.
#[derive(Clone, Copy)]
struct Call {
    time: f64,
    enqueue: f64,
}

/// Builds the op and times it.
pub(super) fn first_call<T: Element>(
    model: &str,
    problem: &Problem,
    transport: Select,
    defect: Defect,
) -> anyhow::Result<FirstCallRow> {
    let origin = Instant::now();
    let body = |world: &World| {
        let ctx = RankContext::connect(world, transport)?;
        let mut set = ctx.operand_set::<T, T>(problem)?;
        ctx.fill(&mut set, Operands::new(*problem, 1, 0, Fill::Uniform))?;
        ctx.poison_results(&mut set)?;
        let op = build(problem, ctx.comm(), Overrides::default())?;
        let mut calls = Vec::new();
        for number in 0..=SETTLING + WARM {
            if ctx.gpu().is_some() {
                ctx.delay(REST)?;
            }
            calls.push(call(&ctx, &op, &mut set, origin)?);
            // The check after the first call disturbs nothing that counts.
            if number == 0 || number == SETTLING + WARM {
                defect.apply(&ctx, &mut set)?;
                let verdict = ctx.verify(&set, &op.plan(op.max_m())?)?;
                ensure!(verdict.ok(), "the result of call {number} is wrong: {verdict}");
                ctx.poison_results(&mut set)?;
            }
        }
        anyhow::Ok(calls)
    };
    let ranks = ranks::on_threads(World::local(problem.world().get())?, body)?;

    let longest =
        |of: fn(&Call) -> f64| ranks.iter().map(|calls| of(&calls[0])).fold(0.0, f64::max);
    let warm = |of: fn(&Call) -> f64| {
        let spans = |calls: &Vec<Call>| {
            calls[1 + SETTLING..].iter().map(|c| Span { start: 0.0, end: of(c) }).collect()
        };
        Times::of_slowest(&ranks.iter().map(spans).collect::<Vec<_>>()).context("no calls")
    };
    Ok(FirstCallRow {
        head: Head::new(model, problem),
        first_call_ms: longest(|c| c.time),
        warm_ms: warm(|c| c.time)?,
        first_enqueue_ms: longest(|c| c.enqueue),
        warm_enqueue_ms: warm(|c| c.enqueue)?,
    })
}

/// One call, ranks lined up.
fn call<T: Element>(
    ctx: &RankContext,
    op: &FusedLinear,
    set: &mut OperandSet<T>,
    origin: Instant,
) -> anyhow::Result<Call> {
    ctx.sync(op)?;
    ctx.comm().barrier()?;
    // Ranks are threads: they read one clock. Everybody waits for the last one's word.
    let now = told(ctx.comm(), origin.elapsed().as_nanos() as u64)?;
    let agreed = now.into_iter().max().context("no ranks")?;
    let start = Duration::from_nanos(agreed) + LEAD;
    ctx.delay(start.saturating_sub(origin.elapsed()))?;

    let mut enqueue = 0.0;
    let mut forward = || {
        let begun = Instant::now();
        ctx.forward(op, set)?;
        enqueue = begun.elapsed().as_secs_f64() * 1e3;
        Ok(())
    };
    let time = if let Some(gpu) = ctx.gpu() {
        gpu.time(forward)?
    } else {
        forward()?;
        enqueue
    };
    ctx.sync(op)?;
    Ok(Call { time, enqueue })
}
