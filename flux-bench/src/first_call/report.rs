//! What first calls took.

use crate::atomic_file::{self, WriteError};
use crate::report::{Head, Origin, ms};
use crate::stats::Times;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::Path;

/// Version of the file's form.
pub const SCHEMA: u32 = 2;

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
    pub rows: Vec<FirstCall>,
}

/// One op at one shape. Times are in milliseconds, of the slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstCall {
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

impl FirstCall {
    /// How many times as long as a warm call the first one took.
    pub fn ratio(&self) -> f64 {
        self.first_call_ms / self.warm_ms.median
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
    fn keeps(&self, row: &FirstCall) -> bool {
        self.at_most.is_none_or(|most| row.ratio() <= most)
    }
}

/// The report as text: what was measured where, then a line a row.
pub fn table(report: &FirstCallReport) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, r.head.dtype.as_str()));
    let at_most = report.at_most.map_or_else(String::new, |most| format!("; at most {most} times a warm call"));
    let rests =
        if report.origin.gpus > 0 { "warm: after as long a rest as the first; busy: right after another" } else { "no call after a rest" };
    let mut text = format!(
        "{}, TP {tp}, {dtype}\nfirst call after build, a process each; ms, slowest rank{at_most}\n{rests}\n\n\
         {}    first     warm  ratio     busy   enqueue first     warm\n",
        report.origin.device,
        Head::ABOVE
    );
    for r in &report.rows {
        let (line, ratio) = (r.head.line(), r.ratio());
        let [first, warm, busy, enqueue, warm_enqueue] =
            [r.first_call_ms, r.warm_ms.median, r.busy_ms.median, r.first_enqueue_ms, r.warm_enqueue_ms.median].map(ms);
        let word = if report.keeps(r) { "" } else { "  TOO SLOW" };
        let _ = writeln!(text, "{line} {first:>8} {warm:>8} {ratio:>6.2} {busy:>8} {enqueue:>15} {warm_enqueue:>8}{word}");
    }
    text
}
