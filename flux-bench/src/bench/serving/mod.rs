//! Calls as a serving engine makes them: other rows in each, the op beside the serial path.
//!
//! Invariant: every call's output is poisoned before it and checked after it, at elements of the
//! call's own choice on every rank. Checks are outside of the timed spans.

mod memory;
mod trace;

pub(crate) use trace::{Source, Trace, rows};

use super::measure::{AnyRows, Contender, lasts};
use super::{BenchCase, SEED, WARM_UP};
use crate::harness::{
    Defect, Fill, OperandSet, Operands, RankContext, Span, Verdict, data, percentile, told,
    y_window,
};
use crate::out;
use crate::report::{Head, HostTime, ServingRow};
use anyhow::Context;
use flux_core::{Problem, Rank};
use flux_kernels::Element;
use flux_ops::FusedLinear;
use flux_transport::Communicator;
use memory::Moment;
use std::collections::BTreeSet;

/// Elements of each call that a rank checks at positions by the seed, beside the last of all.
const CHECKED: u64 = 3;
/// The generator's number beside those of operands, delays and rows.
const STREAM: u32 = 41;

/// One contender's calls so far, on this rank.
struct Calls {
    spans: Vec<Span>,
    /// The host's part.
    host: Vec<Span>,
}

impl Calls {
    fn of(count: usize) -> Self {
        Self { spans: Vec::with_capacity(count), host: Vec::with_capacity(count) }
    }

    /// All calls together in milliseconds, and the slowest host's time of one. Collective.
    fn sums(&self, comm: &Communicator) -> anyhow::Result<(f64, HostTime)> {
        let mut host: Vec<f64> = lasts(comm, &self.host)?.into_iter().map(|ms| ms * 1e3).collect();
        host.sort_by(f64::total_cmp);
        let at = |percent| percentile(&host, percent).context("no calls");
        Ok((lasts(comm, &self.spans)?.iter().sum(), HostTime { p50: at(50)?, p99: at(99)? }))
    }
}

/// Makes the calls of `trace` by op and serial path, after some that do not count, and calls `tick`
/// after each that does. Collective.
pub(super) fn serve(
    contenders: &mut dyn AnyRows,
    ctx: &RankContext,
    case: &BenchCase,
    trace: &Trace,
    defect: Defect,
    tick: &dyn Fn(),
) -> anyhow::Result<ServingRow> {
    let (comm, count) = (ctx.comm(), trace.calls());
    let mut calls = [Calls::of(count), Calls::of(count)];
    let (mut verdict, mut checked, mut late) = (Verdict::default(), 0, 0);
    let (mut before, mut amid) = (Moment::default(), Moment::default());
    // Weights stay, as a model's do.
    let seed_w = Operands::new(case.problem, SEED, 0, Fill::Uniform).seed_w;
    for (number, &m) in trace.rows.iter().cycle().take(WARM_UP).chain(&trace.rows).enumerate() {
        if number == WARM_UP {
            before = Moment::now(ctx)?;
        }
        // Kernels are loaded at their first use.
        if number == WARM_UP + count / 2 {
            amid = Moment::now(ctx)?;
        }
        let problem = case.problem.with_m(m)?;
        contenders.take(Operands {
            seed_w,
            ..Operands::new(problem, SEED, number as u64, Fill::Uniform)
        })?;
        let mut turns = [Contender::Op, Contender::Serial];
        turns.rotate_left(number % 2);
        for contender in turns {
            let what = || format!("{contender:?} of {problem}, call {number}");
            if contender == Contender::Op {
                contenders.poison()?;
            }
            let sample = contenders.sample(contender, number).with_context(what)?;
            if contender == Contender::Op {
                let at = positions(&problem, ctx.rank(), number as u64);
                verdict = verdict.merge(contenders.verify_at(&at, defect).with_context(what)?);
                checked += at.len() as u64;
                late += u32::from(sample.late && number >= WARM_UP);
            }
            if number >= WARM_UP {
                let calls = &mut calls[usize::from(contender == Contender::Serial)];
                let host = sample
                    .enqueued
                    .map_or(sample.span.end - sample.span.start, |took| took.as_secs_f64() * 1e3);
                calls.spans.push(sample.span);
                calls.host.push(Span { start: 0.0, end: host });
            }
        }
        if number >= WARM_UP {
            tick();
        }
    }
    let memory = memory::worst(ctx, [before, amid, Moment::now(ctx)?])?;
    let verdict = verdict.of_all_ranks(comm)?;
    if !verdict.ok() && ctx.rank().get() == 0 {
        out::note(&format!("{} with rows of {}: {verdict}", case.problem, trace.name));
    }
    let [op, serial] = [calls[0].sums(comm)?, calls[1].sums(comm)?];
    Ok(ServingRow {
        head: Head::new(&case.model, &case.problem),
        trace: trace.name.clone(),
        calls: count as u64,
        rows: trace.rows.iter().map(|&m| u64::from(m)).sum(),
        different_rows: trace.rows.iter().collect::<BTreeSet<_>>().len() as u64,
        total_op_ms: op.0,
        total_serial_ms: serial.0,
        host_us: op.1,
        host_serial_us: serial.1,
        late: told(comm, u64::from(late))?.into_iter().sum(),
        memory,
        checked: told(comm, checked)?.into_iter().sum(),
        max_rel_err: verdict.max_rel_err(),
        verified: verdict.ok(),
    })
}

/// Rows and columns of `rank`'s output that a call is checked at; none where it has no rows.
fn positions(problem: &Problem, rank: Rank, call: u64) -> Vec<(u32, u32)> {
    let window = y_window(problem, rank);
    if window.rows == 0 {
        return Vec::new();
    }
    let drawn = (0..CHECKED).map(|number| {
        let random = data::seed(SEED + u64::from(rank.get()), STREAM, call * CHECKED + number);
        (((random >> 32) % u64::from(window.rows)) as u32, (random % u64::from(window.cols)) as u32)
    });
    drawn.chain([(window.rows - 1, window.cols - 1)]).collect()
}

/// Checks the op's output in a set at these rows and columns, once the stream has come past it.
pub(super) fn verify_at<X: Element, Y: Element>(
    ctx: &RankContext,
    op: &FusedLinear,
    set: &mut OperandSet<X, Y>,
    at: &[(u32, u32)],
    defect: Defect,
) -> anyhow::Result<Verdict> {
    ctx.sync(op)?;
    defect.apply(ctx, set)?;
    let held = set.holds.context("the operands must be filled first")?;
    ctx.verify_at(set, &op.plan(held.problem.m() as usize)?, at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{DType, OpKind, WorldSize};

    #[test]
    fn positions_are_within_the_ranks_output_and_differ_from_call_to_call() {
        let problem = Problem::new(
            OpKind::GemmReduceScatter,
            3,
            64,
            64,
            DType::Bf16,
            WorldSize::new(2).unwrap(),
        )
        .unwrap();
        let at = |m, rank, call| positions(&problem.with_m(m).unwrap(), Rank::new(rank), call);
        for (m, rank, rows) in [(3, 0, 2), (3, 1, 1), (1, 0, 1)] {
            for call in 0..50 {
                let found = at(m, rank, call);
                assert_eq!((found.len(), found[3]), (4, (rows - 1, 63)));
                assert!(found.iter().all(|&(row, col)| row < rows && col < 64), "{found:?}");
            }
        }
        assert_eq!(at(1, 1, 0), [], "it has no rows");
        assert!(at(3, 0, 1) != at(3, 0, 2) && at(3, 0, 1) == at(3, 0, 1));
    }
}
