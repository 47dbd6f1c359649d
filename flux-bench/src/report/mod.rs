//! Reports: one form for table, file and pictures.
//!
//! Invariant: [`Row::new`] derives a row from four times of the same run.

mod command;
mod execution;
mod head;
mod json;
mod markdown;
mod origin;
mod peers;
mod placement;
mod serving;
mod sustained;
mod table;

pub use crate::machine::Ranks;
pub(crate) use command::{LAUNCHED_BY, command_line};
pub use execution::Execution;
pub(crate) use head::Head;
pub(crate) use json::{check_json, write_json};
pub(crate) use markdown::markdown_table;
pub(crate) use origin::Origin;
pub use peers::PeersReport;
pub(crate) use peers::{PEERS_SCHEMA, PeerRow, table as peers_table};
pub use placement::Placement;
pub use serving::ServingReport;
pub(crate) use serving::{Held, HeldMemory, HostTime, SERVING_SCHEMA, ServingRow};
pub(crate) use sustained::{Sustained, table as sustained_table};
pub(crate) use table::{
    Column, RowTable, aligned, columns, dashed, efficiency, ms, of_rounds, resolved, setup,
    verdict, versions, what_it_shows,
};

use crate::harness::{Times, Verdict};
use crate::out;
use flux_core::{Problem, metrics};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Version of a record's format.
pub const SCHEMA: u32 = 2;

/// A benchmark's results, with what is needed to judge and repeat them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Where it was measured, and how it is repeated: `device` to `command`.
    #[serde(flatten)]
    pub origin: Origin,
    /// Transport that carried the fused ops.
    pub transport: String,
    /// What the ranks were, and where: the fields `ranks`, `hosts` and `machines`.
    #[serde(flatten)]
    pub placement: Placement,
    /// Version of NCCL, of the serial path.
    pub nccl: Option<String>,
    /// One per op and shape.
    pub rows: Vec<Row>,
}

/// One op at one shape. Times are in milliseconds, of the slowest rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What it is of: `op` to `dtype`.
    #[serde(flatten)]
    pub head: Head,
    /// The fused op's plan; in schema 1 its schedule and executor, in words.
    pub plan: String,
    /// What executed it on rank 0; absent in schema 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution: Option<Execution>,
    /// The fused op.
    pub t_op_ms: Times,
    /// The fastest GEMM that is known for one rank's part, unsplit.
    pub t_gemm_ms: Times,
    /// The collective alone.
    pub t_comm_ms: Times,
    /// The collective and the GEMM, one after the other.
    pub t_serial_ms: Times,
    /// Effective communication time, of the medians.
    pub ect_ms: f64,
    /// Overlap efficiency of the medians; absent where the serial path is not slower than its GEMM.
    pub overlap_efficiency: Option<f64>,
    /// Rate of one rank in the fused op, of the median.
    pub tflops: f64,
    /// Largest deviation from the fp64 reference, over its largest element.
    pub max_rel_err: f64,
    /// Whether random data were within the derived bound and integers exact, over the whole output
    /// on every rank, and the serial path within its own.
    pub verified: bool,
    /// Rows of the serial path and its GEMM, where these pad them for shards of equal length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial_m: Option<u32>,
    /// Rounds measured.
    pub samples: u32,
    /// Those of them that were left out; absent where none was.
    #[serde(default, skip_serializing_if = "Late::is_none")]
    pub late: Late,
    /// Enqueue times of the slowest host; absent where the host computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enqueue_ms: Option<Each<Times>>,
    /// Calls back to back, where they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sustained: Option<Sustained>,
}

/// Something of each of the four contenders.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Each<T> {
    /// The fused op.
    pub op: T,
    /// The GEMM alone.
    pub gemm: T,
    /// The collective alone.
    pub comm: T,
    /// One after the other.
    pub serial: T,
}

/// The contenders' times, over the same rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    pub times: Each<Times>,
    /// Rounds that are not among them.
    pub late: Late,
    /// What hosts take to enqueue them: calls back to back cannot be faster.
    pub enqueue: Option<Each<Times>>,
}

/// Rounds left out of a contender's times, because a host had not enqueued the call in time. Where
/// they are the majority none is left out.
pub(crate) type Late = Each<u32>;

impl Late {
    /// Rounds that are in a contender's times, of `rounds` of which so many were late.
    pub const fn kept(rounds: u32, late: u32) -> u32 {
        if late > rounds / 2 { rounds } else { rounds - late }
    }

    fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Row {
    /// The row of `problem`, from what was measured.
    pub fn new(
        model: &str,
        problem: &Problem,
        plan: String,
        measured: Measured,
        verdict: Verdict,
        samples: u32,
    ) -> Self {
        let Measured { times, late, enqueue: enqueue_ms } = measured;
        let [op, gemm, serial] = [times.op, times.gemm, times.serial].map(milliseconds);
        Self {
            head: Head::new(model, problem),
            plan,
            execution: None,
            t_op_ms: times.op,
            t_gemm_ms: times.gemm,
            t_comm_ms: times.comm,
            t_serial_ms: times.serial,
            ect_ms: metrics::ect(op, gemm) * 1e3,
            overlap_efficiency: metrics::overlap_efficiency(op, gemm, serial),
            tflops: metrics::tflops(problem.flop_per_rank(), op),
            max_rel_err: verdict.max_rel_err(),
            verified: verdict.ok(),
            serial_m: None,
            samples,
            late,
            enqueue_ms,
            sustained: None,
        }
    }
}

impl Report {
    /// Whether every row's numbers were verified.
    pub fn verified(&self) -> bool {
        self.rows.iter().all(|r| r.verified)
    }
}

/// Prints a report's table and, where it is asked for, writes the report as JSON.
pub(crate) fn deliver(
    table: &str,
    json: Option<&Path>,
    report: &impl Serialize,
) -> anyhow::Result<()> {
    out::print(&table);
    json.map_or(Ok(()), |path| write_json(path, report))
}

/// Now, UTC, as `2026-11-20T07:00:00Z`.
pub(crate) fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

/// The median, as a time.
pub(crate) fn milliseconds(times: Times) -> Duration {
    Duration::from_secs_f64(times.median.max(0.0) * 1e-3)
}

/// The commit of this build, from `FLUX_COMMIT` at build time (`cargo xtask` sets it).
pub(crate) fn commit() -> &'static str {
    option_env!("FLUX_COMMIT").filter(|commit| !commit.is_empty()).unwrap_or("unknown")
}

#[cfg(test)]
mod tests;
