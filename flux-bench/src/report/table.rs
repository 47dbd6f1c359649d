//! The table of a report: medians, the spread of the op, and its enqueue time.

use super::{Late, Origin, Placement, Report, Row};
use crate::harness::Times;
use std::fmt::Write as _;

const HEAD: [&str; 14] = [
    "op", "model", "m", "n", "k", "T_op ms", "p10-p90", "enqueue", "T_gemm", "T_comm", "T_serial",
    "ECT ms", "E %", "TFLOP/s",
];

/// The report as text: a head, then a line a row.
pub(crate) fn table(report: &Report) -> String {
    let mut lines = vec![HEAD.map(str::to_owned).to_vec()];
    lines[0].push("verified".to_owned());
    for r in &report.rows {
        let verified =
            if r.verified { format!("yes, {:.1e}", r.max_rel_err) } else { "NO".to_owned() };
        let verified =
            if r.late.op > 0 { format!("{verified}, {} late", r.late.op) } else { verified };
        let figures = [
            ms(r.t_op_ms.median),
            format!("{}-{}", ms(r.t_op_ms.p10), ms(r.t_op_ms.p90)),
            r.enqueue_ms.map_or_else(|| "-".to_owned(), |host| ms(host.op.median)),
            ms(r.t_gemm_ms.median),
            ms(r.t_comm_ms.median),
            ms(r.t_serial_ms.median),
            ms(r.ect_ms),
            r.overlap_efficiency
                .filter(|_| resolved(r))
                .map_or_else(|| "-".to_owned(), |e| format!("{:.1}", e * 100.0)),
            if r.tflops < 10.0 { format!("{:.4}", r.tflops) } else { format!("{:.0}", r.tflops) },
            verified,
        ];
        lines.push(r.head.cells().into_iter().chain(figures).collect());
    }
    heading(report) + &aligned(&lines)
}

/// Lines of equally many cells as columns: the first two words, the others numbers.
pub(crate) fn aligned(lines: &[Vec<String>]) -> String {
    let mut text = String::new();
    let columns = lines.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|c| lines.iter().map(|l| l[c].len()).max().unwrap_or(0)).collect();
    for line in lines {
        for (c, (cell, width)) in line.iter().zip(&widths).enumerate() {
            // Words to the left, numbers to the right.
            let _ = if c < 2 {
                write!(text, "{cell:<width$}  ")
            } else {
                write!(text, "{cell:>width$}  ")
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// Fewest samples that have a spread.
const LEAST_SAMPLES: u32 = 5;

/// Whether the collective's cost in the serial path stands out of the spread: no ratio to noise.
pub(crate) fn resolved(row: &Row) -> bool {
    let kept = |late| Late::kept(row.samples, late);
    stands_out(&row.t_serial_ms, &row.t_gemm_ms, kept(row.late.serial).min(kept(row.late.gemm)))
}

/// Whether serial path and GEMM are further apart than their samples spread, of which there are
/// enough.
pub(super) fn stands_out(serial: &Times, gemm: &Times, samples: u32) -> bool {
    let spread = |t: &Times| t.p90 - t.p10;
    samples >= LEAST_SAMPLES && serial.median - gemm.median > spread(serial).max(spread(gemm))
}

fn heading(report: &Report) -> String {
    let tp = report.rows.first().map_or(0, |r| r.head.tp);
    let dtype = report.rows.first().map_or("", |r| &r.head.dtype);
    let samples = report.rows.first().map_or(0, |r| r.samples);
    format!(
        "{}medians of {samples} rounds, slowest rank; E = 1 - (T_op - T_gemm) / (T_serial - \
         T_gemm)\n{}\n",
        on(&report.origin, (&report.transport, report.placement, tp, dtype), report.nccl.as_ref()),
        what_it_shows(&report.transport),
    )
}

/// A line that says what times on the host mean; nothing for GPUs.
pub(crate) fn what_it_shows(transport: &str) -> &'static str {
    if transport == "host" {
        "the ranks share this machine's processors: this shows that results are right, not what \
         fusion gains on GPUs\n"
    } else {
        ""
    }
}

/// The line that says what a table was measured on.
pub(crate) fn on(
    origin: &Origin,
    (transport, placement, tp, dtype): (&str, Placement, u32, &str),
    nccl: Option<&String>,
) -> String {
    let version =
        |name, value: Option<&String>| value.map_or_else(String::new, |v| format!(", {name} {v}"));
    format!(
        "{}, transport {transport}, TP {tp}, {dtype}{placement}{}{}{}\n",
        origin.device,
        version("driver", origin.driver.as_ref()),
        version("CUDA", origin.cuda.as_ref()),
        version("NCCL", nccl),
    )
}

/// Three significant digits or more, as the host's milliseconds and a GPU's microseconds both need.
pub(crate) fn ms(value: f64) -> String {
    let decimals = match value.abs() {
        v if v < 10.0 => 3,
        v if v < 100.0 => 2,
        _ => 1,
    };
    format!("{value:.decimals$}")
}
