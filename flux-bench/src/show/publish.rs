//! The repository's results: README's part, the document of all records and the pictures.
//!
//! Invariant: they hold nothing that is not in `results/*-TRANSPORT.json` and the `*-peers.json`
//! beside those of nvlink. [`render`] is what they must be, and changes no file.

use super::markdown::markdown;
use super::overview::{INDEX, index_line, overview};
use super::svg::svg;
use super::{machine, read, read_peers};
use crate::report::PeersReport;
use crate::report::Report;
use anyhow::{Context, ensure};
use std::cmp::Reverse;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- results:begin -->\n";
const END: &str = "<!-- results:end -->";
/// Where all records are shown.
const ALL: &str = "docs/results.md";
/// Results with this ending are published with a picture: those of GPUs, named after hardware and
/// transport.
const SUFFIX: &str = "-nvlink.json";
/// Of these, the range of the speed-ups.
const OTHERS: [&str; 3] = ["-pcie.json", "-nccl.json", "-mixed.json"];
/// What peers took on the same hardware is in the file with this ending in its place.
const PEERS_SUFFIX: &str = "-peers.json";
/// How many GPUs the figures are wanted for.
const WANTED_GPUS: u32 = 8;

/// A file of the repository as it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// Where, under the repository's root.
    pub path: PathBuf,
    /// All of its text.
    pub content: String,
}

/// A report, the name of its file up to the ending `.json`, and what peers took.
struct Named {
    stem: String,
    report: Report,
    peers: Option<PeersReport>,
    pictured: bool,
}

impl Named {
    fn picture(&self) -> String {
        format!("docs/{}.svg", self.stem)
    }
}

/// README.md of the repository at `root` with its results replaced, the document of all results,
/// and a picture of those over nvlink.
///
/// # Errors
/// Where there are no results, one of them cannot be read, or README.md lacks the marks that its
/// results stand between.
pub fn render(root: &Path) -> anyhow::Result<Vec<Rendered>> {
    let results = results(root)?;
    let path = root.join("README.md");
    let readme = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let marks = || format!("{} lacks the lines {} and {END}", path.display(), BEGIN.trim_end());
    let (before, rest) = readme.split_once(BEGIN).with_context(marks)?;
    let (_, after) = rest.split_once(END).with_context(marks)?;
    let content = format!("{before}{BEGIN}{}{END}{after}", part(&results));

    let all = overview(results.iter().map(|result| (result.stem.as_str(), &result.report)));
    let mut files = vec![Rendered { path, content }, Rendered { path: root.join(ALL), content: all }];
    files.extend(
        results.iter().filter(|r| r.pictured).map(|r| Rendered { path: root.join(r.picture()), content: svg(&r.report, r.peers.as_ref()) }),
    );
    Ok(files)
}

/// Those with a picture first, by falling number of GPUs, bf16 before fp16, by the GPU's falling
/// name, as an H200's before an H100's, then by their own.
fn results(root: &Path) -> anyhow::Result<Vec<Named>> {
    let folder = root.join("results");
    let mut results = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(hardware) = name.strip_suffix(SUFFIX) {
            let stem = name.trim_end_matches(".json").to_owned();
            let report = read(&path)?;
            let peers = folder.join(format!("{hardware}{PEERS_SUFFIX}"));
            let peers = if peers.exists() { Some(read_peers(&peers, &report)?) } else { None };
            results.push(Named { stem, report, peers, pictured: true });
        } else if OTHERS.iter().any(|ending| name.ends_with(ending)) {
            let stem = name.trim_end_matches(".json").to_owned();
            results.push(Named { stem, report: read(&path)?, peers: None, pictured: false });
        }
    }
    ensure!(results.iter().any(|r| r.pictured), "{} holds no file that ends in {SUFFIX}", folder.display());
    results.sort_by(|a, b| rank(a).cmp(&rank(b)));
    Ok(results)
}

/// Where a result stands among the others.
fn rank(of: &Named) -> (bool, Reverse<u32>, Option<&str>, Reverse<&str>, &str) {
    let dtype = of.report.rows.first().map(|row| row.head.dtype.as_str());
    let origin = &of.report.origin;
    (!of.pictured, Reverse(origin.gpus), dtype, Reverse(&origin.device), &of.stem)
}

/// What stands between the marks: the first result whole, of the others with a picture a line each
/// with the range of their speed-ups.
fn part(results: &[Named]) -> String {
    let pictured: Vec<&Named> = results.iter().filter(|r| r.pictured).collect();
    let [first, others @ ..] = &*pictured else { return String::new() };
    let mut text = String::new();
    if first.report.origin.gpus < WANTED_GPUS {
        let mut counts = pictured.iter().map(|r| r.report.origin.gpus.to_string()).collect::<Vec<_>>();
        counts.dedup();
        let counts = counts.join(" and ");
        let _ = writeln!(text, "Measured on {counts} GPUs because {WANTED_GPUS} were not available.\n");
    }
    let name = machine(&first.report);
    let _ = writeln!(
        text,
        "{}\n![Times over those of the GEMM alone: {name}]({})\n",
        markdown(&first.report, first.peers.as_ref()),
        first.picture()
    );
    let _ = writeln!(
        text,
        "All records, row by row and over every transport: [{ALL}]({ALL}).{}\n",
        if others.is_empty() { "" } else { " Others with a picture:" }
    );
    if !others.is_empty() {
        text.push_str(INDEX);
        for other in others {
            let stem = &other.stem;
            text.push_str(&index_line(&other.report, &format!("[{stem}]({ALL}#{stem}), [picture]({})", other.picture())));
        }
        text.push('\n');
    }
    text.push_str("`cargo xtask bench --json results/NAME-nvlink.json` records a run; `cargo xtask results` writes this part, docs/results.md and the pictures anew.\n");
    text
}
