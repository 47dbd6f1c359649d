//! Where `--json` leads: to a file, to a pipe or to the standard output.
//!
//! Invariant: a file is whole under its name, or not there. JSON in the standard output is alone
//! there.

use crate::{atomic_file, out};
use anyhow::Context;
use serde::Serialize;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Refuses a place that cannot be written, before minutes are spent on what goes there. Where that
/// is the standard output, all else that is printed goes to the standard error from here on.
pub(crate) fn check_json(path: Option<&Path>) -> anyhow::Result<()> {
    match path {
        Some(path) if is_stdout(path) => out::reserve(),
        Some(path) if !is_pipe(path) => atomic_file::check(path)?,
        _ => {}
    }
    Ok(())
}

/// Writes a report as JSON to where `--json` leads, and says so where that is a file.
pub(crate) fn write_json(path: &Path, report: &impl Serialize) -> anyhow::Result<()> {
    let text = || anyhow::Ok(serde_json::to_string_pretty(report)? + "\n");
    if is_stdout(path) {
        out::reserved(&text()?);
    } else if is_pipe(path) {
        fs::write(path, text()?)
            .with_context(|| format!("{} cannot be written", path.display()))?;
    } else {
        atomic_file::write_json(path, report)?;
        out::line(&format_args!("\nwritten to {}", path.display()));
    }
    Ok(())
}

/// Whether it is `-`, or another name of the standard output.
fn is_stdout(path: &Path) -> bool {
    let same = || {
        let (stdout, found) =
            (rustix::fs::fstat(std::io::stdout()).ok()?, fs::metadata(path).ok()?);
        Some((stdout.st_dev, stdout.st_ino) == (found.dev(), found.ino()))
    };
    path == Path::new("-") || same().unwrap_or(false)
}

fn is_pipe(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}
