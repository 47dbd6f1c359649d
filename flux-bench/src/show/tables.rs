//! Tables over all rows of reports: efficiencies by `m`, and one line a record.
//!
//! Invariant: a cell is computed from medians of rows that the report has; `-` stands where it has
//! none.

use super::extremes;
use super::markdown::speed_up;
use crate::report::{Report, Row, dashed, efficiency, markdown_table};
use std::collections::BTreeSet;

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
    let extents: Vec<String> = ms.iter().map(ToString::to_string).collect();
    let columns: Vec<&str> =
        ["record", "op", "model"].into_iter().chain(extents.iter().map(String::as_str)).collect();
    let cells = lines.into_iter().map(|[record, op, model]| {
        let of_m = ms.iter().map(|&m| {
            let is_there = |(name, row): &(&str, &Row)| {
                (*name, row.head.m, &*row.head.op, &*row.head.model) == (record, m, op, model)
            };
            dashed(rows().find(is_there).map(|(_, row)| efficiency(row, 0)))
        });
        let line = [format!("`{record}`"), op.to_owned(), model.to_owned()];
        line.into_iter().chain(of_m).collect()
    });
    markdown_table(&columns, 3..columns.len(), cells)
}

/// Numbers of rows from which on a call is long.
const LONG: u32 = 1024;
/// The efficiency that long calls are counted against.
const HIGH: f64 = 0.9;

/// A line for each record, with the range of `T_op / T_serial` for few, middling and many rows.
pub(super) fn summary<'r>(reports: &[(&'r str, &'r Report)]) -> String {
    let columns = [
        "record",
        "m <= 256",
        &format!("256 < m < {LONG}"),
        &format!("m >= {LONG}"),
        &format!("E >= {HIGH}, m >= {LONG}"),
    ];
    let rows = reports.iter().map(|(name, report)| {
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
        vec![
            format!("`{name}`"),
            range(&|m| m <= 256),
            range(&|m| m > 256 && m < LONG),
            range(&|m| m >= LONG),
            format!("{high} of {}", long().count()),
        ]
    });
    markdown_table(&columns, 1..5, rows)
}
