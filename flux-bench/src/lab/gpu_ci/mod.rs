//! The checks that `cargo xtask dist` packs, run on a GPU host.
//!
//! Invariant: every step runs within a limit of its own, however the others ended; one failure
//! fails the whole.

mod step;
mod steps;

pub(super) use step::{Outcome, Step};

use crate::{atomic_file, limited, limits, out, report};
use anyhow::{Context, ensure};
use flux_transport::launch::Signals;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Arguments of `flux-bench lab gpu-ci`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The folder that `cargo xtask dist` built: this program, `tests/`, `cubins/`
    #[arg(long, value_name = "DIR")]
    pub dist: PathBuf,
    /// Seconds after which a step is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = limits::seconds(1))]
    pub limit: u64,
    /// Run only the steps whose names contain this, or one of these if given several times
    #[arg(long, value_name = "TEXT")]
    pub only: Vec<String>,
    /// Fail a step whose tests were all skipped
    #[arg(long)]
    pub no_skips: bool,
    /// Ranks of soak and benchmark: as many as there are GPUs where it is left out
    #[arg(long, visible_alias = "ranks")]
    pub tp: Option<u32>,
    /// Where summary, logs and the benchmark's figures go: the folder itself where it is left out
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Version of the form of `gpu-ci.json`. 2: steps can be skipped.
pub(super) const SCHEMA: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Summary {
    pub schema: u32,
    pub commit: String,
    pub date: String,
    /// Whether every step passed or, unless that was asked to be a failure, was skipped.
    pub passed: bool,
    /// The steps, in the order in which they ran.
    pub steps: Vec<Step>,
}

/// Runs the steps, prints the summary, writes `gpu-ci.json`, and says whether none failed.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    flux_cuda::available().context("gpu-ci checks GPUs")?;
    check(args, crate::machine::gpu_count())
}

fn check(args: &Args, gpus: u32) -> anyhow::Result<bool> {
    // A step that a signal ends is the last, and the summary says how far the run came.
    let signals = Signals::catch()?;
    let out = args.out.as_ref().unwrap_or(&args.dist);
    let logs = out.join("logs");
    let dist = &args.dist;
    ensure!(
        dist.join("tests").is_dir(),
        "{} is no folder that `cargo xtask dist` has built: it has no tests/",
        dist.display()
    );
    std::fs::create_dir_all(&logs).with_context(|| format!("{} cannot be made", logs.display()))?;
    let pytorch = gpus > 1 && has_pytorch(OsStr::new("python3"), LOOK, &logs.join("pytorch.log"));
    let planned = steps::steps(args, out, gpus, pytorch)?;
    let is_of = |only: &String, name: &str| name.contains(only.as_str());
    if let Some(only) =
        args.only.iter().find(|only| !planned.iter().any(|(name, _)| is_of(only, name)))
    {
        let names: Vec<&str> = planned.iter().map(|(name, _)| name.as_str()).collect();
        anyhow::bail!("--only {only}: no step of this machine is called so: {}", names.join(" "));
    }
    let wanted =
        |name: &str| args.only.is_empty() || args.only.iter().any(|only| is_of(only, name));
    let mut steps = Vec::new();
    let mut ended_by = signals.take();
    for (name, command) in planned.into_iter().filter(|(name, _)| wanted(name)) {
        if ended_by.is_some() {
            break;
        }
        out::note(&format!("gpu-ci: {name}"));
        let limit = if name.starts_with(steps::FAULTS) {
            args.limit.max(steps::FAULTS_LIMIT)
        } else {
            args.limit
        };
        let mut step = Step::run(
            &name,
            command,
            Duration::from_secs(limit),
            &logs.join(format!("{name}.log")),
        );
        if args.no_skips && step.outcome == Outcome::Skipped {
            (step.outcome, step.status) = (Outcome::Failed, "no test ran".to_owned());
        }
        out::note(&format!(
            "gpu-ci: {name}: {:?} after {:.1} s {}",
            step.outcome, step.seconds, step.status
        ));
        steps.push(step);
        ended_by = signals.take();
    }
    let passed = ended_by.is_none() && !steps.is_empty() && !steps.iter().any(has_failed);
    let summary = Summary {
        schema: SCHEMA,
        commit: report::commit().to_owned(),
        date: report::now(),
        passed,
        steps,
    };
    atomic_file::write_json(&out.join("gpu-ci.json"), &summary)?;
    out::print(&text(&summary));
    match ended_by {
        Some(signal) => Err(limited::interrupted(signal).into()),
        None => Ok(passed),
    }
}

fn has_failed(step: &Step) -> bool {
    matches!(step.outcome, Outcome::Failed | Outcome::TimedOut)
}

/// How long Python may look for PyTorch.
const LOOK: Duration = Duration::from_secs(30);

/// Whether Python would find PyTorch, which is slow to import, within the limit.
fn has_pytorch(python: &OsStr, limit: Duration, log: &Path) -> bool {
    let script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    let found = limited::run(Command::new(python).args(["-c", script]), limit, log);
    found.is_ok_and(|ended| ended.is_some_and(|status| status.success()))
}

/// The first program of this name in the folders of `path`.
fn find(name: &str, path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// The summary: a line a step, and the last output of each that failed.
fn text(summary: &Summary) -> String {
    let mut text = String::new();
    let width = summary.steps.iter().map(|s| s.name.len()).max().unwrap_or(0);
    for step in &summary.steps {
        let word = match step.outcome {
            Outcome::Passed => "passed",
            Outcome::Skipped => "skipped",
            Outcome::Failed => "FAILED",
            Outcome::TimedOut => "TIMED OUT",
        };
        let (parts, tests): (Vec<_>, Vec<_>) =
            step.skipped.iter().partition(|line| step::is_part(line));
        let said = |count: usize, what: &str| (count > 0).then(|| format!("{count} {what}"));
        let status = (!step.status.is_empty()).then(|| step.status.clone());
        let notes = [status, said(tests.len(), "skipped"), said(parts.len(), "in part")];
        let notes = notes.into_iter().flatten().collect::<Vec<_>>().join(", ");
        let _infallible =
            writeln!(text, "{:<width$}  {word:<9}  {:>7.1} s  {notes}", step.name, step.seconds);
    }
    for step in summary.steps.iter().filter(|s| has_failed(s)) {
        let _infallible =
            writeln!(text, "\n== {}: {}\n{}", step.name, step.command, step.output_tail.join("\n"));
    }
    let mut skipped: Vec<&str> =
        summary.steps.iter().flat_map(|s| s.skipped.iter().map(String::as_str)).collect();
    let tests = skipped.iter().filter(|line| !step::is_part(line)).count();
    skipped.dedup();
    for why in skipped {
        let _infallible = write!(text, "\nskipped: {why}");
    }
    let of = |is: fn(&Step) -> bool| summary.steps.iter().filter(|step| is(step)).count();
    let (passed, failed) = (of(|step| step.outcome == Outcome::Passed), of(has_failed));
    let skipped = of(|step| step.outcome == Outcome::Skipped);
    let _infallible = writeln!(
        text,
        "\n{passed} steps passed, {skipped} skipped, {failed} failed; {tests} tests skipped, \
         commit {}",
        summary.commit
    );
    text
}

#[cfg(test)]
mod tests;
