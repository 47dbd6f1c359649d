//! What a record must hold before anything of it is shown.

use super::{LayersReport, SimulatedReport};
use crate::lab::{CoreReport, FirstCallReport};
use crate::report::{Head, PeersReport, Report, Row, ServingReport, milliseconds};
use anyhow::{Context, bail, ensure};
use flux_core::metrics;

pub(super) fn ops(name: &str, report: &Report) -> anyhow::Result<()> {
    let times_of = |row: &Row| [row.t_op_ms, row.t_gemm_ms, row.t_serial_ms];
    rows(name, &report.rows, |row| {
        (&row.head, row.verified, times_of(row).map(|times| times.median).to_vec())
    })?;
    let first = &report.rows[0].head;
    for row in &report.rows {
        let (shape, Head { tp, dtype, .. }) = (format!("{name}: {}", row.head), &row.head);
        // What is shown of a file says both once, for all of its rows.
        ensure!(
            (tp, dtype) == (&first.tp, &first.dtype),
            "{shape} is of TP {tp}, {dtype}, and the first row of TP {}, {}",
            first.tp,
            first.dtype
        );
        let [op, gemm, serial] = times_of(row).map(milliseconds);
        let efficiency = metrics::overlap_efficiency(op, gemm, serial);
        let same = match (efficiency, row.overlap_efficiency) {
            (Some(of_times), Some(said)) => {
                (of_times - said).abs() < 1e-3 * of_times.abs().max(1.0)
            }
            (of_times, said) => of_times == said,
        };
        ensure!(
            same,
            "{shape}: its times make an overlap efficiency of {efficiency:?}, and it says {:?}",
            row.overlap_efficiency
        );
    }
    Ok(())
}

pub(super) fn peers(name: &str, report: &PeersReport) -> anyhow::Result<()> {
    rows(name, &report.rows, |row| {
        let times = [row.gemm_ms, row.serial_ms, row.async_tp_ms, row.one_shot_ms, row.two_shot_ms];
        (&row.head, row.verified, times.into_iter().flatten().map(|t| t.median).collect())
    })
}

pub(super) fn serving(name: &str, report: &ServingReport) -> anyhow::Result<()> {
    rows(name, &report.serving, |row| {
        (&row.head, row.verified, vec![row.total_op_ms, row.total_serial_ms])
    })?;
    let idle = report.serving.iter().find(|row| row.calls == 0);
    idle.map_or(Ok(()), |row| bail!("{name}: {} has no calls", row.head))
}

pub(super) fn core(name: &str, report: &CoreReport) -> anyhow::Result<()> {
    rows(name, &report.rows, |row| {
        let times = [row.t_core_ms, row.t_order_ms, row.t_flags_ms];
        let times = row.t_gemm_ms.into_iter().chain(times).map(|t| t.median);
        (&row.head, row.verified, times.collect())
    })
}

pub(super) fn first_call(name: &str, report: &FirstCallReport) -> anyhow::Result<()> {
    rows(name, &report.rows, |row| (&row.head, true, vec![row.first_call_ms, row.warm_ms.median]))
}

pub(super) fn layers(name: &str, report: &LayersReport) -> anyhow::Result<()> {
    ensure!(!report.rows.is_empty(), "{name} has no rows");
    for row in &report.rows {
        let shape = format!("{name}: {}", row.label());
        let spreads = row.spread.values().flatten();
        times(&shape, row.verified, &row.ms.values().chain(spreads).copied().collect::<Vec<_>>())?;
        ensure!(
            row.ms.keys().any(|mode| LayersReport::is_flux(mode)),
            "{shape} has no time of flux, only of {:?}",
            row.ms.keys().collect::<Vec<_>>()
        );
    }
    Ok(())
}

pub(super) fn simulated(name: &str, report: &SimulatedReport) -> anyhow::Result<()> {
    rows(name, &report.rows, |row| {
        (&row.head, true, vec![row.t_op_ms, row.t_gemm_ms, row.t_serial_ms])
    })
}

/// Checks rows by their heads, by whether they were verified, and by their times.
fn rows<R>(
    name: &str,
    rows: &[R],
    parts: impl Fn(&R) -> (&Head, bool, Vec<f64>),
) -> anyhow::Result<()> {
    ensure!(!rows.is_empty(), "{name} has no rows");
    for (head, verified, ms) in rows.iter().map(parts) {
        let shape = format!("{name}: {head}");
        times(&shape, verified, &ms)?;
        head.problem().with_context(|| format!("{shape} is no shape"))?;
    }
    Ok(())
}

/// Whether a result was verified, and each time may be what a call took, in milliseconds: some
/// hours at most.
fn times(shape: &str, verified: bool, ms: &[f64]) -> anyhow::Result<()> {
    ensure!(verified, "{shape}: the result was not verified, so its times are not shown");
    ensure!(
        ms.iter().all(|&ms| 0.0 < ms && ms < 1e7),
        "{shape}: times of {ms:?} ms cannot be compared"
    );
    Ok(())
}
