//! The time line as trace events, which Perfetto and Chrome's viewer open.
//!
//! Invariant: a rank is a process, and a CTA three threads, one a role, as spans of one thread must
//! nest. A worker on the host is a thread there, too. Times are microseconds since the rank's first
//! worker began.

use super::Traced;
use super::summary::kind;
use flux_core::Problem;
use flux_core::program::{Sink, WorkItem};
use flux_ops::{ItemStamps, TimedItem, Timeline};
use serde::Serialize;
use serde_json::{Value, json};

/// A file's content.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<Value>,
    display_time_unit: &'static str,
    other_data: Value,
}

/// Roles of a CTA, in the order of their threads.
const ROLES: [&str; 3] = ["producer", "consumers", "storer"];
const PRODUCER: usize = 0;
const CONSUMERS: usize = 1;
const STORER: usize = 2;

/// The events of all ranks.
pub(crate) fn events(problem: &Problem, ranks: &[Traced]) -> Trace {
    let mut all = Vec::new();
    for traced in ranks {
        let timeline = &traced.timeline;
        Writer { timeline, start: timeline.start_ns(), events: &mut all }.rank(traced.on_gpu);
    }
    let plans: Vec<&str> = ranks.iter().map(|traced| traced.words.as_str()).collect();
    let call_us: Vec<f64> = ranks.iter().map(|traced| traced.call_ms * 1e3).collect();
    let other_data = json!({
        "problem": problem.to_string(), "plans": plans, "call_us": call_us,
        "commit": crate::report::commit(),
    });
    Trace { events: all, display_time_unit: "ns", other_data }
}

struct Writer<'a> {
    timeline: &'a Timeline,
    start: u64,
    events: &'a mut Vec<Value>,
}

impl Writer<'_> {
    fn rank(&mut self, on_gpu: bool) {
        let rank = self.timeline.rank.get();
        self.metadata("process_name", 0, &json!({ "name": format!("rank {rank}") }));
        self.metadata("process_sort_index", 0, &json!({ "sort_index": rank }));
        for (cta, worker) in self.timeline.workers.iter().enumerate() {
            if !on_gpu {
                self.metadata("thread_name", cta, &json!({ "name": format!("worker {cta}") }));
                self.span(cta, "worker", worker.entered, worker.left, &json!({}));
                self.turns(cta);
                continue;
            }
            for (role, name) in ROLES.into_iter().enumerate() {
                let name = format!("CTA {cta:03} {name} (SM {})", worker.multiprocessor);
                let number = thread(cta, role);
                self.metadata("thread_name", number, &json!({ "name": name }));
                self.metadata("thread_sort_index", number, &json!({ "sort_index": number }));
            }
            self.span(thread(cta, PRODUCER), "CTA", worker.entered, worker.left, &json!({}));
            self.items(cta);
        }
    }

    /// The items of a thread on the host, whose phases follow one another.
    fn turns(&mut self, worker: usize) {
        for (i, TimedItem { item, times: t }) in items_of(self.timeline, worker) {
            let (args, awaited) = (args(i, item), t.multiplied.max(t.partials_there));
            self.span(worker, "await rows", t.opened, t.rows_there, &args);
            self.span(worker, "load", t.rows_there, t.loaded, &args);
            self.span(worker, "multiply", t.loaded, t.multiplied, &args);
            self.span(worker, "await partials", t.multiplied, awaited, &args);
            self.span(worker, "add partials", awaited, t.summed, &args);
            self.span(worker, "write", t.summed, t.written, &args);
            self.span(worker, "signal", t.written, t.sent, &args);
        }
    }

    /// The items of one CTA, in turn.
    fn items(&mut self, cta: usize) {
        let (mut consumers_free, mut storer_free) = (0, 0);
        for (i, TimedItem { item, times: t }) in items_of(self.timeline, cta) {
            let args = args(i, item);
            if item.sink == Sink::ReduceRows {
                // The consumers' alone: the producer passes by.
                self.span(thread(cta, CONSUMERS), "add rows", t.partials_there, t.written, &args);
                consumers_free = t.written;
                continue;
            }
            self.producer(cta, t, &args);
            // There is no stamp of the first stage: consumers begin when they are free and rows are
            // there. The storer takes its next item while the last write completes.
            let (consumers, begun) = (thread(cta, CONSUMERS), consumers_free.max(t.rows_there));
            self.span(consumers, "multiply", begun, t.multiplied, &args);
            self.span(consumers, "add partials", t.multiplied, t.summed, &args);
            self.span(consumers, "write", t.summed, t.written, &args);
            self.span(thread(cta, STORER), kind(item), storer_free.max(t.written), t.sent, &args);
            (consumers_free, storer_free) = (t.written, t.sent);
        }
    }

    fn producer(&mut self, cta: usize, t: &ItemStamps, args: &Value) {
        let thread = thread(cta, PRODUCER);
        self.span(thread, "await rows", t.opened, t.rows_there, args);
        self.span(thread, "load", t.rows_there, t.loaded, args);
        if t.partials_there != 0 {
            self.span(thread, "await partials", t.loaded, t.partials_there, args);
        }
    }

    /// A span, unless it took no time.
    fn span(&mut self, thread: usize, name: &str, from: u64, to: u64, args: &Value) {
        if to <= from {
            return;
        }
        let us = |ns: u64| ns as f64 / 1e3;
        let (ts, dur) = (us(from.saturating_sub(self.start)), us(to.saturating_sub(from)));
        let pid = self.timeline.rank.get();
        self.events.push(json!({
            "name": name, "ph": "X", "pid": pid, "tid": thread, "ts": ts, "dur": dur, "args": args,
        }));
    }

    fn metadata(&mut self, name: &str, thread: usize, args: &Value) {
        let pid = self.timeline.rank.get();
        self.events.push(json!({
            "name": name, "ph": "M", "pid": pid, "tid": thread, "args": args,
        }));
    }
}

/// The items of one worker, with their numbers.
fn items_of(timeline: &Timeline, worker: usize) -> impl Iterator<Item = (usize, &TimedItem)> {
    timeline.items.iter().enumerate().skip(worker).step_by(timeline.workers.len())
}

fn args(number: usize, item: &WorkItem) -> Value {
    json!({
        "item": number, "kind": kind(item), "row": item.row, "col": item.col,
        "a shard": item.a_outer, "y shard": item.out_outer, "owner": item.dest,
        "partials": item.partials,
    })
}

fn thread(cta: usize, role: usize) -> usize {
    cta * ROLES.len() + role
}
