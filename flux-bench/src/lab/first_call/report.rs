//! What first calls took.

use crate::harness::Times;
use crate::report::{Head, Origin, columns, ms};
use serde::{Deserialize, Serialize};

pub(crate) const SCHEMA: u32 = 3;

/// First calls, with what is needed to judge and repeat them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FirstCallReport {
    /// `SCHEMA`.
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
    /// On the host, until the first call was enqueued.
    pub first_enqueue_ms: f64,
    /// The same of later calls.
    pub warm_enqueue_ms: Times,
}

impl FirstCallRow {
    /// The first call's time over a warm call's. Both come after as long a rest, in which NVLink
    /// falls asleep, so the ratio is the op's own.
    pub fn of_warm(&self) -> f64 {
        self.first_call_ms / self.warm_ms.median
    }
}

impl FirstCallReport {
    /// Whether no first call took longer than it may.
    pub fn kept(&self) -> bool {
        self.rows.iter().all(|r| self.keeps(r))
    }

    /// NaN is no success.
    fn keeps(&self, row: &FirstCallRow) -> bool {
        self.at_most.is_none_or(|most| row.of_warm() <= most)
    }
}

/// The report as text: what was measured where, then a line a row.
pub(crate) fn table(report: &FirstCallReport) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, r.head.dtype.as_str()));
    let at_most =
        report.at_most.map_or_else(String::new, |most| format!("; first/warm at most {most}"));
    let rests = if report.origin.gpus > 0 {
        "warm: after as long a rest as the first"
    } else {
        "no call after a rest"
    };
    let shown = columns(
        &report.rows,
        (Head::COLUMNS, |row| &row.head),
        &[
            ("first", &|row| ms(row.first_call_ms)),
            ("warm", &|row| ms(row.warm_ms.median)),
            ("first/warm", &|row| format!("{:.2}", row.of_warm())),
            ("enqueue first", &|row| ms(row.first_enqueue_ms)),
            ("warm", &|row| ms(row.warm_enqueue_ms.median)),
            ("", &|row| if report.keeps(row) { "" } else { "TOO SLOW" }.to_owned()),
        ],
    );
    format!(
        "{}, TP {tp}, {dtype}\nfirst call after build, a process each; ms, slowest \
         rank{at_most}\n{rests}\n\n{shown}",
        report.origin.device,
    )
}
