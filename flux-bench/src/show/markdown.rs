//! A report as a Markdown table.
//!
//! Invariant: every row of the report is a row of the table, in the report's order.

use super::machine;
use crate::report::{PeersReport, Report, Row, dashed, efficiency, markdown_table, ms, versions};

const COLUMNS: [&str; 9] =
    ["op", "model", "m", "T_op ms", "T_gemm ms", "T_serial ms", "speed-up", "ECT ms", "E %"];

/// A paragraph that says what was measured where, then the table; with a column of the best peer,
/// where peers are known.
pub(crate) fn markdown(report: &Report, peers: Option<&PeersReport>) -> String {
    let mut columns = COLUMNS.to_vec();
    columns.extend(peers.map(|_| "best peer ms"));
    let rows = report.rows.iter().map(|row| {
        let [op, gemm, serial, ect] =
            [row.t_op_ms.median, row.t_gemm_ms.median, row.t_serial_ms.median, row.ect_ms].map(ms);
        let padded = row.serial_m.map_or_else(String::new, |m| format!(" (serial {m})"));
        let mut cells = vec![
            row.head.op.clone(),
            row.head.model.clone(),
            format!("{}{padded}", row.head.m),
            op,
            gemm,
            serial,
            format!("{:.2}", speed_up(row)),
            ect,
            efficiency(row, 1),
        ];
        cells.extend(peers.map(|_| best_peer(peers, row)));
        cells
    });
    let peers = peers.map(peers_heading).unwrap_or_default();
    format!("{}{peers}\n{}", heading(report), markdown_table(&columns, 2..9, rows))
}

/// The fastest way of the peers at a row's shape, with its time.
pub(crate) fn best_peer(peers: Option<&PeersReport>, row: &Row) -> String {
    let best = peers.and_then(|peers| peers.of(row)?.best());
    dashed(best.map(|(time, way)| format!("{} ({way})", ms(time))))
}

fn peers_heading(peers: &PeersReport) -> String {
    let samples = peers.rows.first().map_or(0, |r| r.samples);
    format!(
        "The best peer is the fastest of NCCL and a GEMM in turn (serial), PyTorch's fused op on \
         symmetric memory (async-TP), and a GEMM before its all-reduce there in one exchange \
         (one-shot) or two (two-shot): PyTorch {}, NCCL {},\n\
         {samples} rounds on {}: `{}`.\n",
        peers.torch,
        peers.nccl,
        peers.origin.date.split('T').next().unwrap_or_default(),
        peers.origin.command,
    )
}

/// How many times as long the serial path takes.
pub(crate) fn speed_up(row: &Row) -> f64 {
    row.t_serial_ms.median / row.t_op_ms.median
}

fn heading(report: &Report) -> String {
    let samples = report.rows.first().map_or(0, |r| r.samples);
    format!(
        "{}{}.\n\
         {samples} rounds on {}, commit `{}`: `{}`.\n\
         Speed-up is `T_serial / T_op`; E is `-` where `T_serial - T_gemm` is within the samples' \
         spread.\n",
        machine(report),
        versions(&report.origin, report.nccl.as_ref()),
        report.origin.date.split('T').next().unwrap_or_default(),
        report.origin.commit,
        report.origin.command,
    )
}
