//! `flux-bench report`: records as one page of HTML that needs nothing else.
//!
//! Invariant: the page is a function of the files alone. Every record that is given is on it, or is
//! named there with the reason why not.

mod ahead;
mod comparison;
mod html;
mod layers;
mod machines;
mod ops;
mod others;
#[cfg(test)]
mod tests;
mod timeline;

pub(crate) use timeline::Drawings;
#[cfg(test)]
pub(crate) use timeline::page as of_timelines;

use crate::compare::{self, Bound};
use crate::record::{self, Record};
use crate::report::PeersReport;
use crate::{atomic_file, out};
use anyhow::{Context, ensure};
use html::Html;
use std::fs;
use std::path::PathBuf;

/// Arguments of `flux-bench report`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Records, and folders whose `.json` files are records
    #[arg(value_name = "FILE or FOLDER", default_value = "results")]
    pub files: Vec<PathBuf>,
    /// Write the page to this file
    #[arg(long, value_name = "FILE.html", default_value = "report.html")]
    pub output: PathBuf,
    /// Compare the same rows of two records, the earlier first
    #[arg(long)]
    pub compare: bool,
    /// With --compare: the exit status is 1 where a row of the later record is slower than this, in
    /// per cent
    #[arg(long, value_name = "PERCENT", requires = "compare")]
    pub slower_than: Option<Bound>,
}

/// A record with its name: the file's, without `.json`.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) record: Record,
}

/// A page, and what could not be shown on it.
#[derive(Clone, Debug)]
pub struct Page {
    /// The whole file.
    pub html: String,
    /// A sentence for each file that is left out.
    pub left_out: Vec<String>,
}

/// Writes the page, and says whether every file is on it and no row is too slow.
pub(crate) fn run(args: &Args) -> anyhow::Result<bool> {
    let (html, right) = if args.compare {
        let bound = args.slower_than.unwrap_or(Bound::NONE);
        let comparison = compare::files(&args.files)?;
        out::print(&comparison.markdown(bound));
        (comparison::page(&comparison, bound), comparison.slower(bound) == 0)
    } else {
        let page = made(&args.files)?;
        for reason in &page.left_out {
            crate::end::say(&format!("left out: {reason}"));
        }
        (page.html, page.left_out.is_empty())
    };
    for read in &args.files {
        ensure!(
            !atomic_file::same_file(read, &args.output)?,
            "--output {} is a record, which the page would replace: name another",
            args.output.display()
        );
    }
    atomic_file::write(&args.output, |w| w.write_all(html.as_bytes()))?;
    out::line(&format_args!("written to {}", args.output.display()));
    Ok(right)
}

/// The page of these files and folders.
///
/// # Errors
/// There is no record among them.
pub fn made(files: &[PathBuf]) -> anyhow::Result<Page> {
    let paths = paths(files)?;
    let (mut records, mut left_out) = (Vec::new(), Vec::new());
    for path in &paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        match record::read(path) {
            Ok(record) => records.push(Named { name, record }),
            Err(error) => left_out.push(format!("{error:#}")),
        }
    }
    ensure!(!records.is_empty(), "there is no record to show: {}", left_out.join("; "));
    records.sort_by_key(|named| {
        let origin = named.record.origin();
        let order = ["nvlink", "pcie", "mixed", "nccl"];
        let transport = named.record.transport();
        let place = order.iter().position(|name| Some(*name) == transport).unwrap_or(order.len());
        let gpus = std::cmp::Reverse(origin.gpus);
        // Names of main records are the shortest.
        let name = (named.name.len(), named.name.clone());
        (std::cmp::Reverse(origin.device.clone()), gpus, place, name)
    });
    Ok(Page { html: document(&records, &left_out), left_out })
}

/// The files, and those of the folders, by name.
fn paths(files: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for file in files {
        if !file.is_dir() {
            paths.push(file.clone());
            continue;
        }
        let folder = file.display();
        let entries = fs::read_dir(file).with_context(|| format!("cannot read {folder}"))?;
        let mut found: Vec<PathBuf> =
            entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        found.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        ensure!(!found.is_empty(), "{folder} has no .json file: name one of records");
        found.sort();
        paths.append(&mut found);
    }
    Ok(paths)
}

/// What peers took at rows of a record of ops: on the same machine, over NVLink, of the same
/// layers.
fn peers_of<'r>(records: &'r [Named], named: &Named) -> Option<&'r PeersReport> {
    let Record::Ops(report) = &named.record else { return None };
    let machine = (&report.origin.device, report.origin.gpus);
    let on_links = report.transport == "nvlink";
    records.iter().filter(|_| on_links).find_map(|other| match &other.record {
        Record::Peers(peers)
            if (&peers.origin.device, peers.origin.gpus) == machine
                && peers
                    .rows
                    .iter()
                    .any(|peer| report.rows.iter().any(|r| r.head == peer.head)) =>
        {
            Some(peers)
        }
        _ => None,
    })
}

/// Where it stands, what it is called, and what writes it.
type Section = (&'static str, &'static str, fn(&mut Html, &[Named]));

fn document(records: &[Named], left_out: &[String]) -> String {
    let mut page = Html::default();
    let sections: [Section; 6] = [
        ("ahead", "Where flux is ahead, and where not", ahead::section),
        ("layers", "What a whole layer gains", layers::section),
        ("ops", "Each op against m", ops::section),
        ("serving", "Serving traces, first calls, the kernel alone", others::section),
        ("simulated", "Simulated, not measured", others::simulated),
        ("records", "What was measured, and on what", machines::section),
    ];
    let mut shown = Vec::new();
    for (id, title, write) in sections {
        let mut section = Html::default();
        write(&mut section, records);
        if !section.is_empty() {
            shown.push((id, title));
            page.section(id, title, &section);
        }
    }
    if !left_out.is_empty() {
        let mut section = Html::default();
        section.list(left_out);
        shown.push(("left-out", "Left out"));
        page.section("left-out", "Left out", &section);
    }
    let mut intro = Html::default();
    machines::intro(&mut intro, records);
    html::document("flux: measured", &shown, &intro, &page)
}
