//! A report as a Markdown table.
//!
//! Invariant: every row of the report is a row of the table, in the report's order.

use super::machine;
use crate::report::{Report, Row, ms, resolved};
use std::fmt::Write as _;

const HEAD: &str = "\
| op | model | m | T_op ms | T_gemm ms | T_serial ms | speed-up | ECT ms | E % |
|---|---|--:|--:|--:|--:|--:|--:|--:|
";

/// A paragraph that says what was measured where, then the table.
pub fn markdown(report: &Report) -> String {
    let mut text = heading(report);
    text.push_str(HEAD);
    for row in &report.rows {
        let efficiency = row.overlap_efficiency.filter(|_| resolved(row)).map_or_else(|| "-".to_owned(), |e| format!("{:.1}", e * 100.0));
        let [op, gemm, serial, ect] = [row.t_op_ms.median, row.t_gemm_ms.median, row.t_serial_ms.median, row.ect_ms].map(ms);
        let (name, model, m, speed_up) = (&row.op, &row.model, row.m, speed_up(row));
        let _ = writeln!(text, "| {name} | {model} | {m} | {op} | {gemm} | {serial} | {speed_up:.2} | {ect} | {efficiency} |");
    }
    text
}

/// How many times as long the serial path takes.
pub(super) fn speed_up(row: &Row) -> f64 {
    row.t_serial_ms.median / row.t_op_ms.median
}

fn heading(report: &Report) -> String {
    let version = |name, value: &Option<String>| value.as_ref().map_or_else(String::new, |v| format!(", {name} {v}"));
    let samples = report.rows.first().map_or(0, |r| r.samples);
    format!(
        "{}{}{}{}.\n\
         {samples} rounds on {}, commit `{}`: `{}`.\n\
         Speed-up is `T_serial / T_op`; E is `-` where `T_serial - T_gemm` is within the samples' spread.\n\n",
        machine(report),
        version("driver", &report.driver),
        version("CUDA", &report.cuda),
        version("NCCL", &report.nccl),
        report.date.split('T').next().unwrap_or_default(),
        report.commit,
        report.command,
    )
}
