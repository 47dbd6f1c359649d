//! What a record must hold before anything of it is shown.

use super::{LayersReport, SimulatedReport};
use crate::lab::{CoreReport, FirstCallReport};
use crate::report::{Head, PeersReport, Report, Row, ServingReport};
use anyhow::{Context, bail, ensure};
use flux_core::metrics;
use std::fmt::Display;
use std::time::Duration;

pub(super) fn ops(name: &str, report: &Report) -> anyhow::Result<()> {
    let [Row { head: first, .. }, ..] = &report.rows[..] else { bail!("{name} has no rows") };
    for row in &report.rows {
        let shape = format!("{name}: {}", row.head);
        let (tp, dtype) = (row.head.tp, &row.head.dtype);
        // What is shown of a file says both once, for all of its rows.
        ensure!(
            (tp, dtype) == (first.tp, &first.dtype),
            "{shape} is of TP {tp}, {dtype}, and the first row of TP {}, {}",
            first.tp,
            first.dtype
        );
        let medians = [row.t_op_ms, row.t_gemm_ms, row.t_serial_ms].map(|t| t.median);
        of_head(&shape, &row.head, row.verified, &medians)?;
        let [op, gemm, serial] = medians.map(|ms| Duration::from_secs_f64(ms / 1e3));
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
    for row in &report.rows {
        let times = [row.gemm_ms, row.serial_ms, row.async_tp_ms, row.one_shot_ms, row.two_shot_ms];
        let medians: Vec<f64> = times.into_iter().flatten().map(|t| t.median).collect();
        of_head(&format!("{name}: {}", row.head), &row.head, row.verified, &medians)?;
    }
    rows(name, report.rows.len())
}

pub(super) fn serving(name: &str, report: &ServingReport) -> anyhow::Result<()> {
    for row in &report.serving {
        let totals = [row.total_op_ms, row.total_serial_ms];
        of_head(&format!("{name}: {}", row.head), &row.head, row.verified, &totals)?;
        ensure!(row.calls > 0, "{name}: {} has no calls", row.head);
    }
    rows(name, report.serving.len())
}

pub(super) fn core(name: &str, report: &CoreReport) -> anyhow::Result<()> {
    for row in &report.rows {
        let times =
            row.t_gemm_ms.into_iter().chain([row.t_core_ms, row.t_order_ms, row.t_flags_ms]);
        let medians: Vec<_> = times.map(|t| t.median).collect();
        of_head(&format!("{name}: {}", row.head), &row.head, row.verified, &medians)?;
    }
    rows(name, report.rows.len())
}

pub(super) fn first_call(name: &str, report: &FirstCallReport) -> anyhow::Result<()> {
    for row in &report.rows {
        let times = [row.first_call_ms, row.warm_ms.median];
        of_head(&format!("{name}: {}", row.head), &row.head, true, &times)?;
    }
    rows(name, report.rows.len())
}

pub(super) fn layers(name: &str, report: &LayersReport) -> anyhow::Result<()> {
    for row in &report.rows {
        let shape = format!("{name}: {}", row.label());
        verified(&shape, row.verified)?;
        let spreads = row.spread.values().flatten();
        times(&shape, &row.ms.values().chain(spreads).copied().collect::<Vec<_>>())?;
        ensure!(
            row.ms.keys().any(|mode| LayersReport::is_flux(mode)),
            "{shape} has no time of flux, only of {:?}",
            row.ms.keys().collect::<Vec<_>>()
        );
    }
    rows(name, report.rows.len())
}

pub(super) fn simulated(name: &str, report: &SimulatedReport) -> anyhow::Result<()> {
    for row in &report.rows {
        let all = [row.t_op_ms, row.t_gemm_ms, row.t_serial_ms];
        of_head(&format!("{name}: {}", row.head), &row.head, true, &all)?;
    }
    rows(name, report.rows.len())
}

fn rows(name: &str, count: usize) -> anyhow::Result<()> {
    ensure!(count > 0, "{name} has no rows");
    Ok(())
}

fn of_head(shape: &str, head: &Head, right: bool, medians: &[f64]) -> anyhow::Result<()> {
    verified(shape, right)?;
    head.problem().with_context(|| format!("{shape} is no shape"))?;
    times(shape, medians)
}

fn verified(shape: impl Display, right: bool) -> anyhow::Result<()> {
    ensure!(right, "{shape}: the result was not verified, so its times are not shown");
    Ok(())
}

/// Whether each may be what a call took, in milliseconds: some hours at most.
fn times(shape: impl Display, ms: &[f64]) -> anyhow::Result<()> {
    ensure!(
        ms.iter().all(|&ms| 0.0 < ms && ms < 1e7),
        "{shape}: times of {ms:?} ms cannot be compared"
    );
    Ok(())
}
