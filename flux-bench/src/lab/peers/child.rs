//! The Python process that times the peers.
//!
//! Invariant: it ends by the deadline with all that it started, and its output is whole or an
//! error.

use crate::limited;
use crate::report::PeerRow;
use anyhow::{Context, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The script, carried in this program: a GPU host needs nothing but PyTorch beside it.
const SCRIPT: &str = include_str!("../../../peers/async_tp.py");

/// What the script is to do; its documentation names the fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ScriptJob {
    pub(super) tp: u32,
    /// Element types, as rows of records name them.
    pub(super) dtype: String,
    pub(super) output: &'static str,
    pub(super) scales: String,
    pub(super) fast_accumulation: bool,
    pub(super) samples: u32,
    /// Whether residual and norm follow each of them.
    pub(super) norm: bool,
    pub(super) cases: Vec<ScriptCase>,
}

/// One op of one model, at some `m`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ScriptCase {
    pub(super) op: &'static str,
    pub(super) model: String,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) ms: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Versions {
    pub(super) torch: String,
    pub(super) nccl: String,
}

/// The job with the files that the script is to use.
#[derive(Serialize)]
struct ScriptInput<'a> {
    #[serde(flatten)]
    job: &'a ScriptJob,
    out: PathBuf,
    store: PathBuf,
}

/// Runs the script under `python` for at most `limit`.
pub(super) fn run(
    python: &OsStr,
    job: &ScriptJob,
    limit: Duration,
) -> anyhow::Result<(Versions, Vec<PeerRow>)> {
    // Only this user can read or replace what is in it.
    let folder = tempfile::tempdir().context("a folder for the script cannot be made")?;
    let at = |name: &str| folder.path().join(name);
    let (script, log, out) = (at("async_tp.py"), at("log"), at("rows"));
    fs::write(&script, SCRIPT).context("the script cannot be written")?;
    let order = serde_json::to_string(&ScriptInput { job, out: out.clone(), store: at("store") })?;

    let mut command = Command::new(python);
    command.arg(&script).arg(order);
    // NVLink multicast can take a shared host's devices out of service.
    command.env("NCCL_NVLS_ENABLE", "0").env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1");
    // A launcher's variables, of torchrun or another, are not for these ranks.
    for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(variable);
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("PYTHONUNBUFFERED", "1");
    let ended = limited::run(&mut command, limit, &log).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let python = python.to_string_lossy();
            anyhow!("{python} was not found: the peers need Python 3 with PyTorch")
        }
        _ => anyhow::Error::new(error).context("Python cannot be run"),
    })?;
    let wanted: usize = job.cases.iter().map(|c| c.ms.len()).sum();
    if let Some(how) = limited::failure(ended, limit, &log) {
        let rows = read(&out).map_or(0, |(_, rows)| rows.len());
        bail!("timing the peers, with {rows} rows of {wanted} done, {how}");
    }
    let (versions, rows) = read(&out)?;
    let done = rows.len();
    ensure!(
        done == wanted,
        "the script wrote {done} rows of {wanted}:\n{}",
        limited::last_lines(&log)
    );
    Ok((versions, rows))
}

/// The versions on the first line and a row on each of the others.
fn read(out: &Path) -> anyhow::Result<(Versions, Vec<PeerRow>)> {
    let text = fs::read_to_string(out).context("the script wrote nothing")?;
    let mut lines = text.lines();
    let versions = serde_json::from_str(lines.next().context("the script wrote no versions")?)?;
    let rows = lines
        .map(|line| serde_json::from_str(line).with_context(|| format!("no row: {line}")))
        .collect::<anyhow::Result<_>>()?;
    Ok((versions, rows))
}
