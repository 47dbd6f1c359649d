//! Showing what `flux-bench bench --json` has written.
//!
//! Invariant: what is shown is a function of the files alone, and only of files whose every row was
//! verified.

mod markdown;
mod svg;
mod tables;
#[cfg(test)]
mod tests;

pub(crate) use markdown::markdown;
pub use svg::svg;

use crate::atomic_file;
use crate::lab::{CoreReport, FirstCallReport};
use crate::out;
use crate::report::{PEERS_SCHEMA, PeersReport, ServingReport};
use crate::report::{Report, Row, SCHEMA};
use anyhow::{Context, bail, ensure};
use flux_core::metrics;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a table shows of records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Table {
    /// The times of every row
    #[default]
    Rows,
    /// Overlap efficiencies by m, for each model and op
    Efficiency,
    /// One line a record, with ranges of T_op / T_serial
    Summary,
}

/// Arguments of `flux-bench show`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Files that `flux-bench bench --json` has written
    #[arg(value_name = "FILE.json", required = true)]
    pub files: Vec<PathBuf>,
    /// Print a Markdown table of the files; `rows` unless a picture is asked for
    #[arg(long, value_name = "KIND")]
    pub table: Option<Table>,
    /// Show only rows with these m
    #[arg(long, value_name = "M,...", value_delimiter = ',')]
    pub ms: Vec<u32>,
    /// Write a picture of the one file that is given
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Show beside the one file that is given what peers took: a file that
    /// `flux-bench lab peers --json` has written
    #[arg(long, value_name = "FILE.json")]
    pub peers: Option<PathBuf>,
}

/// Prints and writes what was asked for.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let (reports, peers) = args.read()?;
    if let Some(path) = &args.svg {
        for read in args.files.iter().chain(&args.peers) {
            ensure!(
                !atomic_file::same_file(read, path)?,
                "--svg {} is a file that is shown, which it would replace: name another",
                path.display()
            );
        }
        let [report] = &reports[..] else {
            bail!("a picture shows one file, not {}", reports.len())
        };
        write(path, &svg(report, peers.as_ref()))?;
    }
    if args.table.is_some() || args.svg.is_none() {
        out::print(&table(args, &reports, peers.as_ref()));
    }
    Ok(())
}

impl Args {
    /// The reports, with only the rows that are asked for, and what peers took.
    fn read(&self) -> anyhow::Result<(Vec<Report>, Option<PeersReport>)> {
        let mut reports =
            self.files.iter().map(|path| read(path)).collect::<anyhow::Result<Vec<_>>>()?;
        if !self.ms.is_empty() {
            for (report, path) in reports.iter_mut().zip(&self.files) {
                report.rows.retain(|row| self.ms.contains(&row.head.m));
                ensure!(
                    !report.rows.is_empty(),
                    "{} has no rows with m of {:?}",
                    path.display(),
                    self.ms
                );
            }
        }
        let peers = match (&self.peers, &reports[..]) {
            (None, _) => None,
            (Some(path), [report]) => Some(read_peers(path, report)?),
            (Some(_), _) => bail!("peers are shown beside one file, not {}", reports.len()),
        };
        Ok((reports, peers))
    }
}

/// The Markdown that `flux-bench show` prints.
///
/// # Errors
/// As [`read`] and [`read_peers`].
pub fn rendered(args: &Args) -> anyhow::Result<String> {
    let (reports, peers) = args.read()?;
    Ok(table(args, &reports, peers.as_ref()))
}

fn table(args: &Args, reports: &[Report], peers: Option<&PeersReport>) -> String {
    let names = args
        .files
        .iter()
        .map(|path| path.file_stem().and_then(|name| name.to_str()).unwrap_or_default());
    let named: Vec<(&str, &Report)> = names.zip(reports).collect();
    match args.table.unwrap_or_default() {
        Table::Rows => {
            reports.iter().map(|report| markdown(report, peers)).collect::<Vec<_>>().join("\n")
        }
        Table::Efficiency => tables::efficiencies(&named),
        Table::Summary => tables::summary(&named),
    }
}

/// The report in `path`.
///
/// # Errors
/// The file is no report of a known schema, is empty, mixes worlds or element types, or has a row
/// that is unverified or whose times cannot be.
pub fn read(path: &Path) -> anyhow::Result<Report> {
    let name = path.display();
    let report: Report = parsed(path, BENCH)?;
    ensure!(
        (1..=SCHEMA).contains(&report.schema),
        "{name} has schema {}: this program reads 1 to {SCHEMA}",
        report.schema
    );
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
        ensure!(row.verified, "{shape}: the result was not verified, so its times are not shown");
        row.head.problem().with_context(|| format!("{shape} is no shape"))?;
        let medians = [row.t_op_ms, row.t_gemm_ms, row.t_serial_ms].map(|t| t.median);
        ensure!(
            medians.into_iter().all(is_time),
            "{shape}: times of {medians:?} ms cannot be compared"
        );
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
    Ok(report)
}

/// What peers took, in `path`, to be shown beside `report`.
///
/// # Errors
/// Where the file is no such report, is of another machine, has no rows of `report`'s, or has a row
/// that must not be shown.
pub fn read_peers(path: &Path, report: &Report) -> anyhow::Result<PeersReport> {
    let name = path.display();
    let peers: PeersReport = parsed(path, PEERS)?;
    ensure!(
        peers.schema == PEERS_SCHEMA,
        "{name} has schema {}: this program reads {}",
        peers.schema,
        PEERS_SCHEMA
    );
    let (theirs, ours) =
        ((&peers.origin.device, peers.origin.gpus), (&report.origin.device, report.origin.gpus));
    ensure!(
        theirs == ours,
        "{name} was measured on {} x {}, and the ops on {} x {}",
        theirs.1,
        theirs.0,
        ours.1,
        ours.0
    );
    ensure!(
        report.rows.iter().any(|row| peers.of(row).is_some()),
        "{name} has none of the shapes that it is to be shown beside"
    );
    for row in &peers.rows {
        let shape = format!("{name}: {}", row.head);
        ensure!(row.verified, "{shape}: the result was not verified, so its times are not shown");
        let medians = || {
            [row.gemm_ms, row.serial_ms, row.async_tp_ms, row.one_shot_ms, row.two_shot_ms]
                .into_iter()
                .flatten()
                .map(|t| t.median)
        };
        row.head.problem().with_context(|| format!("{shape} is no shape"))?;
        ensure!(
            medians().all(is_time),
            "{shape}: times of {:?} ms cannot be compared",
            medians().collect::<Vec<_>>()
        );
    }
    Ok(peers)
}

/// What writes files that are shown, and files that are shown beside them.
const BENCH: &str = "flux-bench bench --json";
const PEERS: &str = "flux-bench lab peers --json";
const SHOWN_BY_PYTHON: &str = "show it with `python -m flux_tp.bench show`";

/// What writes such a file, and the option that takes it; where it is one of this program's.
fn writer(value: &Value) -> Option<(&'static str, &'static str)> {
    fn is<'de, T: Deserialize<'de>>(value: &'de Value) -> bool {
        T::deserialize(value).is_ok()
    }
    let of_python = |kind: &str| value.get("kind").is_some_and(|found| found == kind);
    let kinds = [
        (is::<Report>(value), (BENCH, "show it as FILE.json")),
        (
            is::<PeersReport>(value),
            (
                PEERS,
                "name it with --peers, beside a file that `flux-bench bench --json` has written",
            ),
        ),
        (
            is::<ServingReport>(value),
            ("flux-bench bench --trace-m --json", "its table is printed where it is measured"),
        ),
        (
            is::<CoreReport>(value),
            ("flux-bench lab core --json", "its table is printed where it is measured"),
        ),
        (
            is::<FirstCallReport>(value),
            ("flux-bench lab first-call --json", "its table is printed where it is measured"),
        ),
        (of_python("layers"), ("python -m flux_tp.bench layers --json", SHOWN_BY_PYTHON)),
        (of_python("megatron"), ("python -m flux_tp.bench megatron --json", SHOWN_BY_PYTHON)),
        (of_python("vllm"), ("python -m flux_tp.bench vllm --json", SHOWN_BY_PYTHON)),
    ];
    kinds.into_iter().find(|(is, _)| *is).map(|(_, kind)| kind)
}

/// What `program` has written to `path`.
fn parsed<T: DeserializeOwned>(path: &Path, program: &str) -> anyhow::Result<T> {
    let name = path.display();
    let text = fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let other = || format!("{name} is not what `{program}` writes");
    let value: Value = serde_json::from_slice(&text).with_context(other)?;
    ensure!(
        is_plain(&value),
        "{name} has texts with control characters, or a model with `|`, which would not be shown \
         as they are"
    );
    match T::deserialize(&value) {
        Ok(report) => Ok(report),
        Err(error) => match writer(&value) {
            Some((writer, remedy)) => {
                bail!("{name} is what `{writer}` writes, not `{program}`: {remedy}")
            }
            None => Err(error).with_context(other),
        },
    }
}

/// Whether no text of it would do anything to a terminal, a table or a picture.
fn is_plain(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.contains(char::is_control),
        Value::Array(values) => values.iter().all(is_plain),
        // The one text of a table's cell that is nowhere else checked.
        Value::Object(fields) => fields.iter().all(|(name, value)| {
            is_plain(value)
                && !(name == "model" && value.as_str().is_some_and(|model| model.contains('|')))
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
    }
}

/// Whether a median may be what a call took, in milliseconds: some hours at most.
fn is_time(ms: f64) -> bool {
    0.0 < ms && ms < 1e7
}

/// The least and the largest of the values; infinities where there is none.
fn extremes(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut found = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values {
        found = (found.0.min(value), found.1.max(value));
    }
    found
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    Ok(atomic_file::write(path, |w| w.write_all(text.as_bytes()))?)
}

/// What was measured on, in words.
fn machine(report: &Report) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, &r.head.dtype));
    let count =
        if report.origin.gpus == 0 { String::new() } else { format!("{} x ", report.origin.gpus) };
    format!(
        "{count}{}, transport {}, TP {tp}, {dtype}{}",
        report.origin.device, report.transport, report.placement
    )
}
