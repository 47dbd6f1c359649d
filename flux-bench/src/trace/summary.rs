//! The time line as a table: the waves of tiles and their phases.
//!
//! Invariant: every item is in the row of its wave and its sink; times are microseconds since the
//! rank's first worker began.

use super::Traced;
use flux_core::Problem;
use flux_core::program::{RowSource, Sink, WorkItem};
use flux_ops::{ItemStamps, TimedItem, Timeline, WorkerStamps};
use std::collections::BTreeMap;
use std::fmt::Write as _;

type Phase = (&'static str, fn(&ItemStamps) -> u64);
type WorkerPhase = (&'static str, fn(&WorkerStamps) -> u64);

/// Phases of an item of AllGather-GEMM.
const AG_PHASES: [Phase; 6] = [
    ("opened", |t| t.opened),
    ("rows there", |t| t.rows_there),
    ("loaded", |t| t.loaded),
    ("multiplied", |t| t.multiplied),
    ("written", |t| t.written),
    ("stored", |t| t.sent),
];
/// Phases of an item of a sum over the ranks.
const SUM_PHASES: [Phase; 6] = [
    ("opened", |t| t.opened),
    ("loaded", |t| t.loaded),
    ("multiplied", |t| t.multiplied),
    ("partials there", |t| t.partials_there),
    ("summed", |t| t.summed),
    // Nobody sends rows that are added.
    ("stored", |t| t.sent.max(t.written)),
];

/// Phases of a worker's mover and producer, where the kernel pushes or awaits rows.
const WORKER_PHASES: [WorkerPhase; 4] = [
    ("push begun", |w| w.push_begun),
    ("first chunk delivered", |w| w.first_delivered),
    ("last chunk delivered", |w| w.last_delivered),
    ("first rows there", |w| w.first_rows),
];

/// A table for each rank.
pub(crate) fn summary(problem: &Problem, ranks: &[Traced]) -> String {
    let phases = if problem.op().gathers() { &AG_PHASES } else { &SUM_PHASES };
    let mut text = format!(
        "{problem}\nus since the rank's first worker began: first / median / last of the wave's \
         tiles\n"
    );
    if let Some(first) = ranks.first() {
        let _infallible = writeln!(text, "{}", first.words);
    }
    for traced in ranks {
        rank(&mut text, traced, phases);
    }
    text
}

fn rank(text: &mut String, traced: &Traced, phases: &[Phase]) {
    let Timeline { rank, workers, .. } = &traced.timeline;
    let start = traced.timeline.start_ns();
    let us = |ns: u64| ns.saturating_sub(start) as f64 / 1e3;
    let entered = workers.iter().map(|w| w.entered).max().unwrap_or(start);
    let left = spread(&mut workers.iter().map(|w| w.left).collect::<Vec<_>>(), us);
    let _infallible = writeln!(
        text,
        "\nrank {rank}: {} workers, last began {:.1}, left {left}; call {:.1} by {}",
        workers.len(),
        us(entered),
        traced.call_ms * 1e3,
        if traced.on_gpu { "events" } else { "the host's clock" },
    );
    for (name, of) in WORKER_PHASES {
        let mut times: Vec<u64> = workers.iter().map(of).filter(|&ns| ns != 0).collect();
        let count = times.len();
        if count > 0 {
            let _infallible =
                writeln!(text, "{name}: {} on {count} workers", spread(&mut times, us));
        }
    }
    let _infallible = write!(text, "{:<17} {:>5}", "wave", "tiles");
    for (name, _) in phases {
        let _infallible = write!(text, " {name:>20}");
    }
    text.push('\n');
    for ((wave, kind), items) in rows(&traced.timeline) {
        let _infallible = write!(text, "{:<17} {:>5}", format!("{wave} {kind}"), items.len());
        for (_, at) in phases {
            let mut times: Vec<u64> = items.iter().map(at).collect();
            // A phase that no item of the row has.
            let cell =
                if times.iter().all(|&t| t == 0) { "-".to_owned() } else { spread(&mut times, us) };
            let _infallible = write!(text, " {cell:>20}");
        }
        text.push('\n');
    }
}

/// Items by wave and by sink.
fn rows(timeline: &Timeline) -> BTreeMap<(usize, &'static str), Vec<ItemStamps>> {
    let mut rows = BTreeMap::<_, Vec<_>>::new();
    let workers = timeline.workers.len().max(1);
    for (i, TimedItem { item, times }) in timeline.items.iter().enumerate() {
        rows.entry((i / workers, kind(item))).or_default().push(*times);
    }
    rows
}

/// An item's sink, and for stored tiles whose rows it read.
pub(super) fn kind(item: &WorkItem) -> &'static str {
    match (item.sink, item.a_source) {
        (Sink::Send, _) => "send",
        (Sink::Reduce, _) => "reduce",
        (Sink::Store, RowSource::Gather) => "store gathered",
        (Sink::Store, RowSource::Caller) => "store own",
        (Sink::Partial, _) => "partial",
        (Sink::Scatter, _) => "scatter",
        (Sink::ReduceRows, _) => "reduce rows",
        (Sink::Copy, _) => "copy",
    }
}

fn spread(times: &mut [u64], us: impl Fn(u64) -> f64) -> String {
    times.sort_unstable();
    match times {
        [] => "-".to_owned(),
        [first, ..] => format!(
            "{:.1}/{:.1}/{:.1}",
            us(*first),
            us(times[times.len() / 2]),
            us(times[times.len() - 1])
        ),
    }
}
