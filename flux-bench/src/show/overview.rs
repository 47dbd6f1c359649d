//! All records as one document: a table each, a line for each number of rows.
//!
//! Invariant: every row of every report has a cell, and a cell is of one row.

use super::machine;
use super::markdown::speed_up;
use crate::report::{Report, Row, ms, resolved};
use std::fmt::Write as _;

/// What stands above the tables.
const ABOVE: &str = "# All records

Written by `cargo xtask results` from `results/*-TRANSPORT.json`: nothing here is typed in. Each cell is one row of the record, medians of the slowest rank:

> **T_op** in ms · **speed-up**, `T_serial / T_op` · **E** in %, `1 - (T_op - T_gemm) / (T_serial - T_gemm)`, `-` where `T_serial - T_gemm` is within the samples' spread · **host** in us, what the host
> takes to enqueue the call, in records that have it

A row whose host was late in some rounds, which are left out of its times, has their number behind it. What the figures mean, and what disturbed some of them, is in [performance.md](performance.md); how they
are measured in [results/README.md](../results/README.md).
";

/// The document, of reports in the order in which they are given, with the names of their files up
/// to the ending.
pub(super) fn overview<'r>(reports: impl Iterator<Item = (&'r str, &'r Report)>) -> String {
    let reports: Vec<(&str, &Report)> = reports.collect();
    let mut text = format!("{ABOVE}\n{INDEX}");
    text.extend(reports.iter().map(|(stem, report)| index_line(report, &format!("[{stem}](#{stem})"))));
    for (stem, report) in reports {
        let (samples, origin) = (report.rows.first().map_or(0, |row| row.samples), &report.origin);
        let (date, commit) = (origin.date.split('T').next().unwrap_or_default(), origin.commit.get(..7).unwrap_or(&origin.commit));
        let _ = write!(
            text,
            "\n## {stem}\n\n{}; {samples} rounds on {date}, commit `{commit}` ([`results/{stem}.json`](../results/{stem}.json)).\n\n```sh\n{}\n```\n\n{}",
            machine(report),
            origin.command,
            table(&report.rows)
        );
    }
    text
}

/// Above lines of [`index_line`].
pub(super) const INDEX: &str = "| on | speed-ups | record |\n|---|---|---|\n";

/// Where a record was made, the range of its speed-ups, and a link to it.
pub(super) fn index_line(report: &Report, link: &str) -> String {
    let speed_ups = || report.rows.iter().map(speed_up);
    let (low, high) = (speed_ups().fold(f64::INFINITY, f64::min), speed_ups().fold(f64::NEG_INFINITY, f64::max));
    format!("| {} | {low:.2} to {high:.2} | {link} |\n", machine(report))
}

/// A column for each op of each model, in the order in which they come, and a line for each number
/// of rows.
fn table(rows: &[Row]) -> String {
    let (mut columns, mut lines): (Vec<[&str; 2]>, Vec<u32>) = Default::default();
    for Row { head, .. } in rows {
        let column = [head.model.as_str(), head.op.as_str()];
        if !columns.contains(&column) {
            columns.push(column);
        }
        if !lines.contains(&head.m) {
            lines.push(head.m);
        }
    }
    lines.sort_unstable();
    let heads = columns.iter().fold(String::new(), |heads, [model, op]| heads + &format!(" {model} {op} |"));
    let mut text = format!("| m |{heads}\n|--:|{}\n", "---|".repeat(columns.len()));
    for m in lines {
        let _ = write!(text, "| {m} |");
        for [model, op] in &columns {
            let of = rows.iter().filter(|row| (row.head.m, row.head.model.as_str(), row.head.op.as_str()) == (m, *model, *op));
            let cells: Vec<String> = of.map(cell).collect();
            let _ = write!(text, " {} |", if cells.is_empty() { "-".to_owned() } else { cells.join("; ") });
        }
        text.push('\n');
    }
    text
}

fn cell(row: &Row) -> String {
    let efficiency = row.overlap_efficiency.filter(|_| resolved(row)).map_or_else(|| "-".to_owned(), |e| format!("{:.0}", e * 100.0));
    let mut text = format!("{} · {:.2} · {efficiency}", ms(row.t_op_ms.median), speed_up(row));
    if let Some(host) = row.enqueue_ms {
        let _ = write!(text, " · {:.0}", host.op.median * 1e3);
    }
    if row.late.op > 0 {
        let _ = write!(text, " ({} late)", row.late.op);
    }
    text
}
