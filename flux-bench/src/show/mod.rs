//! Records as tables and pictures.
//!
//! Invariant: what is shown is a function of the files alone.

mod markdown;
mod svg;
mod tables;
#[cfg(test)]
mod tests;

pub(crate) use markdown::{best_peer, markdown, speed_up};
use svg::svg;
pub(crate) use svg::{
    Chart, TimeScale, charts, escape, layer_charts, legends, timeline_chart, timeline_legend,
    timelines,
};

use crate::compare::{self, Bound};
use crate::record::{self, Record};
use crate::report::{PeersReport, Report};
use crate::{atomic_file, out};
use anyhow::{bail, ensure};
use std::path::{Path, PathBuf};

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
    /// Files that `flux-bench bench --json` has written; with --compare of any kind of record, and
    /// with --svg also one of whole layers
    #[arg(value_name = "FILE.json", required = true)]
    pub files: Vec<PathBuf>,
    /// Print a Markdown table of the files; `rows` unless a picture is asked for
    #[arg(long, value_name = "KIND")]
    pub table: Option<Table>,
    /// Show only rows with these m
    #[arg(long, value_name = "M,...", value_delimiter = ',')]
    pub ms: Vec<u32>,
    /// Write a picture of the one file that is given: of ops, or of whole layers
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Print a Markdown table of the same rows of two records of one kind, with the change
    #[arg(long, conflicts_with_all = ["table", "ms", "svg", "peers"])]
    pub compare: bool,
    /// Show beside the one file that is given what peers took: a file that
    /// `flux-bench lab peers --json` has written
    #[arg(long, value_name = "FILE.json")]
    pub peers: Option<PathBuf>,
}

/// Prints and writes what was asked for.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(path) = &args.svg {
        for read in args.files.iter().chain(&args.peers) {
            ensure!(
                !atomic_file::same_file(read, path)?,
                "--svg {} is a file that is shown, which it would replace: name another",
                path.display()
            );
        }
        let picture = picture(args)?;
        atomic_file::write(path, |w| w.write_all(picture.as_bytes()))?;
    }
    if args.table.is_some() || args.svg.is_none() {
        out::print(&rendered(args)?);
    }
    Ok(())
}

/// The picture that `flux-bench show --svg` writes.
///
/// # Errors
/// As [`rendered`]; and there are several files, or one of another kind.
pub fn picture(args: &Args) -> anyhow::Result<String> {
    let [path] = &args.files[..] else {
        bail!("a picture shows one file, not {}", args.files.len())
    };
    if let Record::Layers(mut report) = record::read(path)? {
        report.rows.retain(|row| args.ms.is_empty() || row.m.is_some_and(|m| args.ms.contains(&m)));
        ensure_rows(report.rows.len(), path, &args.ms)?;
        return Ok(svg::layers(&report));
    }
    let (reports, peers) = args.read()?;
    Ok(reports.iter().map(|report| svg(report, peers.as_ref())).collect())
}

fn ensure_rows(rows: usize, path: &Path, ms: &[u32]) -> anyhow::Result<()> {
    ensure!(rows > 0, "{} has no rows with m of {ms:?}", path.display());
    Ok(())
}

impl Args {
    /// The reports, with only the rows that are asked for, and what peers took.
    fn read(&self) -> anyhow::Result<(Vec<Report>, Option<PeersReport>)> {
        let read = |path: &PathBuf| record::read_ops(path);
        let mut reports = self.files.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
        if !self.ms.is_empty() {
            for (report, path) in reports.iter_mut().zip(&self.files) {
                report.rows.retain(|row| self.ms.contains(&row.head.m));
                ensure_rows(report.rows.len(), path, &self.ms)?;
            }
        }
        let peers = match (&self.peers, &reports[..]) {
            (None, _) => None,
            (Some(path), [report]) => Some(record::read_peers(path, report)?),
            (Some(_), _) => bail!("peers are shown beside one file, not {}", reports.len()),
        };
        Ok((reports, peers))
    }
}

/// The Markdown that `flux-bench show` prints.
///
/// # Errors
/// As `read_ops` and `read_peers` of records; two files to compare are of two kinds.
pub fn rendered(args: &Args) -> anyhow::Result<String> {
    if args.compare {
        return Ok(compare::files(&args.files)?.markdown(Bound::NONE));
    }
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

/// The least and the largest of the values; infinities where there is none.
pub(crate) fn extremes(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut found = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values {
        found = (found.0.min(value), found.1.max(value));
    }
    found
}

/// What was measured on, in words.
pub(crate) fn machine(report: &Report) -> String {
    let (tp, dtype) = report.rows.first().map_or((0, ""), |r| (r.head.tp, &r.head.dtype));
    let (on, transport, placement) = (report.origin.machine(), &report.transport, report.placement);
    format!("{on}, transport {transport}, TP {tp}, {dtype}{placement}")
}
