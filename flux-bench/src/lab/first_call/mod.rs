//! `flux-bench lab first-call`: an op's first call in a new process, beside its later calls.
//!
//! Invariant: every shape has a process of its own, so no earlier shape has loaded or compiled
//! anything.

mod report;
#[cfg(test)]
mod tests;
mod timing;

pub use report::FirstCallReport;
pub(crate) use report::SCHEMA;
use report::{FirstCallRow, table};

use crate::harness::Defect;
use crate::report::{Origin, Ranks, check_json, deliver};
use crate::shapes::{self, Layer, LayerArgs};
use crate::{atomic_file, launch, limited, limits, machine};
use anyhow::{Context, bail};
use flux_kernels::with_element;
use flux_transport::Select;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Arguments of `flux-bench lab first-call`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the results to this file, as JSON; `-` is the standard output, and the table then goes
    /// to the standard error
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) layers: LayerArgs,
    /// Ranks; as many as there are GPUs, or 8 on the host, where it is left out
    #[arg(long, visible_alias = "ranks", value_name = "RANKS")]
    pub tp: Option<u32>,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// How many times a warm call's time a first call may take; 2 on GPUs and any on the host where
    /// left out
    #[arg(long, value_name = "RATIO", value_parser = limits::not_negative::<f64>)]
    pub at_most: Option<f64>,
    /// Seconds after which the process of a shape is ended, and the run has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = limits::seconds(1))]
    pub limit: u64,
    /// Time the one shape that is given in this very process, and write its row to this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "at_most", "limit"])]
    pub here: Option<PathBuf>,
    #[command(flatten)]
    defect: Defect,
}

/// Times every shape in a process of its own, prints the table, writes the file, and says whether
/// no first call was too slow.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    launch::refuse("first-call")?;
    let dtype = args.layers.types.of_one_type("lab first-call")?;
    let on_gpus = machine::uses_gpus(args.transport)?;
    let tp = args.tp.unwrap_or_else(|| if on_gpus { machine::gpu_count() } else { 8 });
    let cases = args.layers.layers(shapes::world(tp)?, on_gpus, &[512, 2048, 8192])?;
    if let Some(path) = &args.here {
        let [case] = &cases[..] else { bail!("--here times one shape, not {}", cases.len()) };
        atomic_file::check(path)?;
        let first_call = with_element!(dtype, T, timing::first_call::<T>);
        write_row(&first_call(&case.name, &case.problem, args.transport, args.defect)?, path)?;
        return Ok(true);
    }
    check_json(args.json.as_deref())?;
    let folder = tempfile::tempdir().context("a folder for the rows cannot be made")?;
    let rows = cases
        .iter()
        .map(|case| in_a_process(args, case, tp, folder.path()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    // On the host a few cores are shared by all ranks' threads, which start when they can.
    let at_most = args.at_most.or(on_gpus.then_some(2.0));
    let origin = Origin::of(on_gpus, tp, Ranks::Threads);
    let report = FirstCallReport { schema: SCHEMA, origin, at_most, rows };
    deliver(&table(&report), args.json.as_deref(), &report)?;
    Ok(report.kept())
}

/// The row of a case, from this program started anew.
fn in_a_process(args: &Args, case: &Layer, tp: u32, folder: &Path) -> anyhow::Result<FirstCallRow> {
    let (row, log) = (folder.join("row"), folder.join("log"));
    let mut command = Command::new(std::env::current_exe()?);
    let Layer { name, problem } = case;
    let line = format!(
        "lab first-call --ops {} --shapes {name} --dtype {} --ms {} --tp {tp} --transport {} \
         --here",
        problem.op().name(),
        problem.numerics().operand.name(),
        problem.m(),
        args.transport
    );
    command.args(line.split(' ')).arg(&row);
    if args.defect.spoil {
        command.arg("--spoil");
    }
    let limit = Duration::from_secs(args.limit);
    let ended = limited::run(&mut command, limit, &log)?;
    if let Some(how) = limited::failure(ended, limit, &log) {
        bail!("{problem} {how}");
    }
    Ok(serde_json::from_slice(&std::fs::read(&row)?)?)
}

fn write_row(row: &FirstCallRow, path: &Path) -> anyhow::Result<()> {
    Ok(atomic_file::write(path, |w| Ok(serde_json::to_writer(w, row)?))?)
}
