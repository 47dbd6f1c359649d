//! What the peers took: one form for table, file and pictures.
//!
//! Invariant: a missing time has its reason beside it.

use super::{Head, Origin, Row, columns, dashed, ms};
use crate::harness::Times;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(crate) const PEERS_SCHEMA: u32 = 1;

/// The peers' times, with what is needed to judge and repeat them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeersReport {
    /// `PEERS_SCHEMA`.
    pub schema: u32,
    /// Where it was measured, and how it is repeated: `device` to `command`.
    #[serde(flatten)]
    pub origin: Origin,
    /// Version of the NCCL that PyTorch uses.
    pub nccl: String,
    /// Version of PyTorch.
    pub torch: String,
    /// One per op and shape.
    pub rows: Vec<PeerRow>,
}

/// One op at one shape. Times are in milliseconds, of the slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRow {
    /// What it is of: `op` to `dtype`.
    #[serde(flatten)]
    pub head: Head,
    /// `torch.mm` of one rank's part, unsplit. Of 8-bit operands it is `torch._scaled_mm`, here and
    /// below.
    pub gemm_ms: Option<Times>,
    /// NCCL and `torch.mm`, one after the other.
    pub serial_ms: Option<Times>,
    /// PyTorch's fused op on symmetric memory.
    pub async_tp_ms: Option<Times>,
    /// `torch.mm`, then PyTorch's all-reduce in one exchange on symmetric memory (`gemm_ar`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub one_shot_ms: Option<Times>,
    /// The same in two exchanges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub two_shot_ms: Option<Times>,
    /// Rounds in which a host was late, by the contender's name; left out as [`super::Late::kept`]
    /// says.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub late: BTreeMap<String, u32>,
    /// Why a time is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Whether every result was finite and the fused op's equal to the serial path's, up to
    /// rounding.
    pub verified: bool,
    /// Rounds measured.
    pub samples: u32,
}

impl PeerRow {
    /// Median and name of the fastest way to run the whole op; `None` where none ran.
    pub fn best(&self) -> Option<(f64, &'static str)> {
        let ways = [
            (self.serial_ms, "serial"),
            (self.async_tp_ms, "async-TP"),
            (self.one_shot_ms, "one-shot"),
            (self.two_shot_ms, "two-shot"),
        ];
        ways.into_iter()
            .filter_map(|(times, name)| Some((times?.median, name)))
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }
}

impl PeersReport {
    /// Whether every row's numbers were verified.
    pub fn verified(&self) -> bool {
        self.rows.iter().all(|r| r.verified)
    }

    /// The peers' row for one of the benchmark's rows.
    pub fn of(&self, row: &Row) -> Option<&PeerRow> {
        self.rows.iter().find(|r| r.head.same_problem(&row.head))
    }
}

/// The report as text: a head, then a line a row.
pub(crate) fn table(report: &PeersReport) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, r.head.dtype.as_str()));
    let samples = report.rows.first().map_or(0, |r| r.samples);
    let time = |times: Option<Times>| dashed(times.map(|t| ms(t.median)));
    let shown = columns(
        &report.rows,
        (Head::COLUMNS, |row| &row.head),
        &[
            ("gemm", &|row| time(row.gemm_ms)),
            ("serial", &|row| time(row.serial_ms)),
            ("async-TP", &|row| time(row.async_tp_ms)),
            ("one-shot", &|row| time(row.one_shot_ms)),
            ("two-shot", &|row| time(row.two_shot_ms)),
            ("verified", &|row| if row.verified { "yes" } else { "NO" }.to_owned()),
            ("", &|row| row.why.clone().unwrap_or_default()),
        ],
    );
    format!(
        "{}, TP {tp}, {dtype}, PyTorch {}, NCCL {}\nmedians of {samples} rounds in ms, slowest \
         rank\n\n{shown}",
        report.origin.device, report.torch, report.nccl,
    )
}
