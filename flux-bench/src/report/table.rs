//! The table of a report: medians, the spread of the op, and its enqueue time.

use super::{Head, Late, Origin, Placement, Row};
use crate::harness::Times;
use std::fmt;
use std::fmt::Write as _;

const HEAD: [&str; 14] = [
    "op", "model", "m", "n", "k", "T_op ms", "p10-p90", "enqueue", "T_gemm", "T_comm", "T_serial",
    "ECT ms", "E %", "TFLOP/s",
];

/// Least widths of the columns, by the longest figures of ordinary rows: rows are printed as they
/// are measured.
const WIDTHS: [usize; 15] = [8, 5, 5, 5, 5, 7, 11, 7, 6, 6, 8, 6, 5, 7, 12];

/// The table of a report, row by row.
pub(crate) struct RowTable {
    widths: Vec<usize>,
}

impl RowTable {
    /// For rows of these problems.
    pub(crate) fn of(heads: impl Iterator<Item = Head>) -> Self {
        let mut widths = WIDTHS.to_vec();
        for head in heads {
            for (width, cell) in widths.iter_mut().zip(head.cells()) {
                *width = cell.len().max(*width);
            }
        }
        Self { widths }
    }

    /// The line above the rows.
    pub(crate) fn head(&self) -> String {
        line(&self.widths, HEAD.iter().chain(&["verified"]))
    }

    /// The line of a row.
    pub(crate) fn row(&self, r: &Row) -> String {
        let mut verified = verdict(r.verified, r.max_rel_err);
        if r.late.op > 0 {
            let _ = write!(verified, ", {} late", r.late.op);
        }
        if let Some(padded) = r.serial_m {
            let _ = write!(verified, ", serial pads m to {padded}");
        }
        let figures = [
            ms(r.t_op_ms.median),
            format!("{}-{}", ms(r.t_op_ms.p10), ms(r.t_op_ms.p90)),
            dashed(r.enqueue_ms.map(|host| ms(host.op.median))),
            ms(r.t_gemm_ms.median),
            ms(r.t_comm_ms.median),
            ms(r.t_serial_ms.median),
            ms(r.ect_ms),
            efficiency(r, 1),
            if r.tflops < 10.0 { format!("{:.4}", r.tflops) } else { format!("{:.0}", r.tflops) },
            verified,
        ];
        line(&self.widths, r.head.cells().iter().chain(&figures))
    }
}

/// A column of a table: what stands above it, and its cell of a row.
pub(crate) type Column<'a, R> = (&'static str, &'a dyn Fn(&R) -> String);

/// Rows as lines below the names of their columns, of which the first are a row's head.
pub(crate) fn columns<R>(
    rows: &[R],
    (names, head): ([&str; 5], fn(&R) -> &Head),
    columns: &[Column<'_, R>],
) -> String {
    let names = names.into_iter().chain(columns.iter().map(|(name, _)| *name));
    let mut lines = vec![names.map(str::to_owned).collect()];
    lines.extend(rows.iter().map(|row| {
        let cells = columns.iter().map(|(_, cell)| cell(row));
        head(row).cells().into_iter().chain(cells).collect()
    }));
    aligned(&lines)
}

/// What there is, or a dash.
pub(crate) fn dashed(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "-".to_owned())
}

/// Whether a row was verified, and how far its elements are off.
pub(crate) fn verdict(verified: bool, max_rel_err: f64) -> String {
    if verified { format!("yes, {max_rel_err:.1e}") } else { "NO".to_owned() }
}

/// Lines of equally many cells as columns: the first two words, the others numbers.
pub(crate) fn aligned(lines: &[Vec<String>]) -> String {
    let mut text = String::new();
    let columns = lines.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|c| lines.iter().map(|l| l[c].len()).max().unwrap_or(0)).collect();
    for cells in lines {
        text += &line(&widths, cells);
    }
    text
}

/// A line of cells: the first two to the left, as they are words, and numbers to the right.
fn line(widths: &[usize], cells: impl IntoIterator<Item = impl fmt::Display>) -> String {
    let mut text = String::new();
    for (column, (cell, width)) in cells.into_iter().zip(widths).enumerate() {
        let _ = if column < 2 {
            write!(text, "{cell:<width$}  ")
        } else {
            write!(text, "{cell:>width$}  ")
        };
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

/// The overlap efficiency in percent, with so many decimals; `-` where it is within the spread.
pub(crate) fn efficiency(row: &Row, decimals: usize) -> String {
    let efficiency = row.overlap_efficiency.filter(|_| resolved(row));
    dashed(efficiency.map(|part| format!("{:.decimals$}", part * 100.0)))
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

/// A line that says what times on the host mean; nothing for GPUs.
pub(crate) fn what_it_shows(transport: &str) -> &'static str {
    if transport == "host" {
        "the ranks share this machine's processors: this shows that results are right, not what \
         fusion gains on GPUs\n"
    } else {
        ""
    }
}

/// What a table was measured on, in a line.
pub(crate) fn setup(
    origin: &Origin,
    (transport, placement): (&str, Placement),
    nccl: Option<&String>,
    head: Option<&Head>,
) -> String {
    let (tp, dtype) = head.map_or((0, ""), |head| (head.tp, &head.dtype));
    let (device, versions) = (&origin.device, versions(origin, nccl));
    format!("{device}, transport {transport}, TP {tp}, {dtype}{placement}{versions}\n")
}

/// Versions of what was measured, behind other words.
pub(crate) fn versions(origin: &Origin, nccl: Option<&String>) -> String {
    let all = [("driver", origin.driver.as_ref()), ("CUDA", origin.cuda.as_ref()), ("NCCL", nccl)];
    all.iter().filter_map(|(name, version)| Some(format!(", {name} {}", (*version)?))).collect()
}

/// What stands between [`setup`] and a table of so many rounds.
pub(crate) fn of_rounds(transport: &str, samples: u32) -> String {
    format!(
        "medians of {samples} rounds, slowest rank; E = 1 - (T_op - T_gemm) / (T_serial - \
         T_gemm)\n{}\n",
        what_it_shows(transport)
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
