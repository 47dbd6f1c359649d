//! Running cargo and other programs; errors name the program that failed.

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The cargo that runs this task.
pub(crate) fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")))
}

/// Runs `command` to its end; an error if it could not start or failed.
pub(crate) fn check(mut command: Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", shown(&command)))?;
    if status.success() {
        return Ok(());
    }
    bail!("{} failed: {status}", shown(&command))
}

/// Whether `cargo <subcommand>` is installed.
pub(crate) fn has_subcommand(subcommand: &str) -> bool {
    let status = cargo()
        .args([subcommand, "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|s| s.success())
}

/// Builds flux-bench with `profile` and runs its `subcommand`, in the caller's directory and in the
/// place of this process, so that signals and exit status are its own.
///
/// # Errors
/// Whenever this returns: cargo could not be started.
pub(crate) fn flux_bench(
    profile: &str,
    subcommand: &[&str],
    args: &[OsString],
) -> anyhow::Result<()> {
    let mut run = running(profile, subcommand, args);
    let error = run.env("FLUX_COMMIT", commit()).exec();
    Err(error).with_context(|| format!("cannot start {}", shown(&run)))
}

/// Shows cargo's progress, as the build takes minutes.
fn running(profile: &str, subcommand: &[&str], args: &[OsString]) -> Command {
    let mut run = cargo();
    run.args(["run", "--profile", profile, "--manifest-path"]).arg(root().join("Cargo.toml"));
    run.args(["--package", "flux-bench", "--"]).args(subcommand).args(args);
    run
}

/// The commit of the working tree, with `-dirty` where it has changes; `unknown` outside a
/// repository.
pub(crate) fn commit() -> String {
    let git = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
        .current_dir(root())
        .output();
    match git {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

/// One executable that cargo has built.
#[derive(Debug)]
pub(crate) struct Artifact {
    /// Name of the target: a binary's or a test file's.
    pub(crate) name: String,
    /// Where it lies.
    pub(crate) path: PathBuf,
}

/// Builds targets of the workspace, with the features that dependencies have in the whole of it:
/// for one package they would be compiled anew.
pub(crate) fn build(profile: &str, targets: &[&str]) -> anyhow::Result<Vec<Artifact>> {
    let mut build = cargo();
    build.args(["build", "--profile", profile, "--workspace"]).args(targets);
    build.env("FLUX_COMMIT", commit());
    artifacts(build)
}

/// Runs a cargo command that builds, and returns the executables that it names.
pub(crate) fn artifacts(mut command: Command) -> anyhow::Result<Vec<Artifact>> {
    #[derive(Deserialize)]
    struct Message {
        target: Option<Target>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }

    command
        .arg("--message-format=json-render-diagnostics")
        .current_dir(root())
        .stderr(Stdio::inherit());
    let out = command.output().with_context(|| format!("cannot start {}", shown(&command)))?;
    if !out.status.success() {
        bail!("{} failed: {}", shown(&command), out.status);
    }
    let mut found = Vec::new();
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let message: Message = serde_json::from_str(line)
            .with_context(|| format!("cargo wrote a line that is not a message: {line}"))?;
        if let (Some(target), Some(path)) = (message.target, message.executable) {
            found.push(Artifact { name: target.name, path });
        }
    }
    Ok(found)
}

/// Where cargo builds this workspace.
pub(crate) fn target_folder() -> anyhow::Result<PathBuf> {
    #[derive(Deserialize)]
    struct Metadata {
        target_directory: PathBuf,
    }
    let mut metadata = cargo();
    metadata
        .args(["metadata", "--no-deps", "--format-version", "1", "--manifest-path"])
        .arg(root().join("Cargo.toml"));
    let out = metadata.output().context("cannot start cargo metadata")?;
    ensure!(
        out.status.success(),
        "cargo metadata failed: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(serde_json::from_slice::<Metadata>(&out.stdout)
        .context("cargo metadata wrote no metadata")?
        .target_directory)
}

/// Removes a folder, if it is there.
pub(crate) fn remove(folder: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_takes_minutes_shows_its_progress() {
        let run = running("release", &["bench"], &["--ms".into(), "16".into()]);
        let words: Vec<_> = run.get_args().filter_map(OsStr::to_str).collect();
        assert!(
            words.ends_with(&["--package", "flux-bench", "--", "bench", "--ms", "16"]),
            "{words:?}"
        );
        assert!(!words.iter().any(|word| ["-q", "--quiet"].contains(word)), "{words:?}");
    }
}
