//! Tables over all rows of reports: efficiencies by `m`, and one line a record.
//!
//! Invariant: a cell is computed from medians of rows that the report has; `-` stands where it has
//! none.

use super::extremes;
use super::markdown::{efficiency, speed_up};
use crate::report::{Report, Row, dashed};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// The overlap efficiency in percent: a line for each record, op and model, a column for each `m`.
pub(super) fn efficiencies<'r>(reports: &[(&'r str, &'r Report)]) -> String {
    let rows = || {
        reports.iter().flat_map(|(name, report)| report.rows.iter().map(move |row| (*name, row)))
    };
    let ms: BTreeSet<u32> = rows().map(|(_, row)| row.head.m).collect();
    let mut lines: Vec<[&str; 3]> = Vec::new();
    for (name, Row { head, .. }) in rows() {
        let line = [name, head.op.as_str(), head.model.as_str()];
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let mut text = "| record | op | model |".to_owned();
    for m in &ms {
        let _ = write!(text, " {m} |");
    }
    let _ = writeln!(text, "\n|---|---|---|{}", "--:|".repeat(ms.len()));
    for [record, op, model] in lines {
        let _ = write!(text, "| `{record}` | {op} | {model} |");
        for &m in &ms {
            let is_there = |(name, row): &(&str, &Row)| {
                (*name, row.head.m, &*row.head.op, &*row.head.model) == (record, m, op, model)
            };
            let row = rows().find(is_there);
            let _ = write!(text, " {} |", dashed(row.map(|(_, row)| efficiency(row, 0))));
        }
        text.push('\n');
    }
    text
}

/// Numbers of rows from which on a call is long.
const LONG: u32 = 1024;
/// The efficiency that long calls are counted against.
const HIGH: f64 = 0.9;

/// A line for each record, with the range of `T_op / T_serial` for few, middling and many rows.
pub(super) fn summary<'r>(reports: &[(&'r str, &'r Report)]) -> String {
    let mut text = format!(
        "| record | m <= 256 | 256 < m < {LONG} | m >= {LONG} | E >= {HIGH}, m >= {LONG} \
         |\n|---|--:|--:|--:|--:|\n"
    );
    for (name, report) in reports {
        let range = |of: &dyn Fn(u32) -> bool| {
            let (low, high) = extremes(
                report.rows.iter().filter(|row| of(row.head.m)).map(|row| 1.0 / speed_up(row)),
            );
            if low > high { "-".to_owned() } else { format!("{low:.2} to {high:.2}") }
        };
        let long = || report.rows.iter().filter(|row| row.head.m >= LONG);
        let high = long()
            .filter(|row| row.overlap_efficiency.is_some_and(|efficiency| efficiency >= HIGH))
            .count();
        let [few, some, many] =
            [range(&|m| m <= 256), range(&|m| m > 256 && m < LONG), range(&|m| m >= LONG)];
        let _ =
            writeln!(text, "| `{name}` | {few} | {some} | {many} | {high} of {} |", long().count());
    }
    text
}
