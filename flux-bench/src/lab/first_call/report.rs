//! What first calls took.

use crate::atomic_file::{self, WriteError};
use crate::harness::Times;
use crate::report::{Head, Origin, ms};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::Path;

/// Version of the file's form.
pub(crate) const SCHEMA: u32 = 2;

/// First calls, with what is needed to judge and repeat them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstCallReport {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Where it was measured, and how it is repeated: `device` to `command`.
    #[serde(flatten)]
    pub origin: Origin,
    /// How many times as long as a warm call a first one may take, where that is judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// One per op and shape, each from a process of its own.
    pub rows: Vec<FirstCallRow>,
}

/// One op at one shape. Times are in milliseconds, of the slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstCallRow {
    /// What it is of: `op` to `dtype`.
    #[serde(flatten)]
    pub head: Head,
    /// The first call after the op was built.
    pub first_call_ms: f64,
    /// Later calls, timed alike: on GPUs after as long a rest.
    pub warm_ms: Times,
    /// Calls without a rest before them.
    pub busy_ms: Times,
    /// On the host, until the first call was enqueued.
    pub first_enqueue_ms: f64,
    /// The same of later calls.
    pub warm_enqueue_ms: Times,
}

impl FirstCallRow {
    /// How many times as long as a warm call the first one took: what is judged. A first call finds
    /// a device that has rested and links that have gone to sleep, whatever the op did when it was
    /// built; a call after as long a rest finds the same, so what is left is the op's own.
    pub fn of_warm(&self) -> f64 {
        self.first_call_ms / self.warm_ms.median
    }

    /// How many times as long as a call right after another it took: what a program feels whose
    /// next calls are such. Waking the links is in it, which no op can spare its first call, so it
    /// is shown and not judged.
    pub fn of_busy(&self) -> f64 {
        self.first_call_ms / self.busy_ms.median
    }
}

impl FirstCallReport {
    /// Writes the report as JSON, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), WriteError> {
        atomic_file::write_json(path, self)
    }

    /// Whether no first call took longer than it may.
    pub fn kept(&self) -> bool {
        self.rows.iter().all(|r| self.keeps(r))
    }

    /// Not a number is no success.
    fn keeps(&self, row: &FirstCallRow) -> bool {
        self.at_most.is_none_or(|most| row.of_warm() <= most)
    }

    /// Where first calls that are kept took longer beside busy calls than they may beside warm
    /// ones: how many did, and why that is no failure.
    fn note(&self) -> Option<String> {
        // Without a rest there is nothing between the two kinds of calls that would excuse it.
        let most = self.at_most.filter(|_| self.origin.gpus > 0)?;
        let beyond: Vec<f64> =
            self.rows.iter().filter(|row| self.keeps(row)).map(FirstCallRow::of_busy).filter(|ratio| *ratio > most).collect();
        let longest = beyond.iter().copied().reduce(f64::max)?;
        Some(format!(
            "note: first/busy is above {most} in {} of {} rows, up to {longest:.2}; first/warm decides: a call after a rest wakes the links, first or not\n",
            beyond.len(),
            self.rows.len()
        ))
    }
}

/// The report as text: what was measured where, then a line a row.
pub(crate) fn table(report: &FirstCallReport) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, r.head.dtype.as_str()));
    let at_most = report.at_most.map_or_else(String::new, |most| format!("; first/warm at most {most}"));
    let rests =
        if report.origin.gpus > 0 { "warm: after as long a rest as the first; busy: right after another" } else { "no call after a rest" };
    let mut text = format!(
        "{}, TP {tp}, {dtype}\nfirst call after build, a process each; ms, slowest rank{at_most}\n{rests}\n\n\
         {}    first     warm     busy  first/warm  first/busy   enqueue first     warm\n",
        report.origin.device,
        Head::ABOVE
    );
    for r in &report.rows {
        let (line, of_warm, of_busy) = (r.head.line(), r.of_warm(), r.of_busy());
        let [first, warm, busy, enqueue, warm_enqueue] =
            [r.first_call_ms, r.warm_ms.median, r.busy_ms.median, r.first_enqueue_ms, r.warm_enqueue_ms.median].map(ms);
        let word = if report.keeps(r) { "" } else { "  TOO SLOW" };
        let _ =
            writeln!(text, "{line} {first:>8} {warm:>8} {busy:>8} {of_warm:>11.2} {of_busy:>11.2} {enqueue:>15} {warm_enqueue:>8}{word}");
    }
    text.extend(report.note());
    text
}
