//! Tables over all rows of reports: efficiencies by `m`, and one line a record.
//!
//! Invariant: a cell is computed from medians of rows that the report has; `-` stands where it has
//! none.

use super::machine;
use super::markdown::{efficiency, speed_up};
use crate::report::{Report, Row};
use std::fmt::Write as _;

/// The overlap efficiency in percent: a line for each `m`, a column for each model and op.
pub(super) fn efficiencies(report: &Report) -> String {
    let (mut columns, mut ms): (Vec<[&str; 2]>, Vec<u32>) = Default::default();
    for Row { head, .. } in &report.rows {
        let column = [head.model.as_str(), head.op.as_str()];
        if !columns.contains(&column) {
            columns.push(column);
        }
        if !ms.contains(&head.m) {
            ms.push(head.m);
        }
    }
    ms.sort_unstable();
    let heads = columns.iter().fold(String::new(), |heads, [model, op]| heads + &format!(" {model} {op} |"));
    let mut text = format!("{}: E %\n\n| m |{heads}\n|--:|{}\n", machine(report), "--:|".repeat(columns.len()));
    for m in ms {
        let _ = write!(text, "| {m} |");
        for [model, op] in &columns {
            let row = report.rows.iter().find(|row| (row.head.m, &*row.head.model, &*row.head.op) == (m, model, op));
            let _ = write!(text, " {} |", row.map_or_else(|| "-".to_owned(), |row| efficiency(row, 0)));
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
pub(super) fn summary<'r>(reports: impl Iterator<Item = (&'r str, &'r Report)>) -> String {
    let mut text = format!("| record | m <= 256 | 256 < m < {LONG} | m >= {LONG} | E >= {HIGH}, m >= {LONG} |\n|---|--:|--:|--:|--:|\n");
    for (name, report) in reports {
        let range = |of: &dyn Fn(u32) -> bool| {
            let ratios = || report.rows.iter().filter(|row| of(row.head.m)).map(|row| 1.0 / speed_up(row));
            let (low, high) = (ratios().fold(f64::INFINITY, f64::min), ratios().fold(f64::NEG_INFINITY, f64::max));
            if low > high { "-".to_owned() } else { format!("{low:.2} to {high:.2}") }
        };
        let long = || report.rows.iter().filter(|row| row.head.m >= LONG);
        let high = long().filter(|row| row.overlap_efficiency.is_some_and(|efficiency| efficiency >= HIGH)).count();
        let [few, some, many] = [range(&|m| m <= 256), range(&|m| m > 256 && m < LONG), range(&|m| m >= LONG)];
        let _ = writeln!(text, "| `{name}` | {few} | {some} | {many} | {high} of {} |", long().count());
    }
    text
}
