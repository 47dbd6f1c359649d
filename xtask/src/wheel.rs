//! The wheel of the Python package `flux_tp`, one for every Python from 3.10 on.
//!
//! Invariant: nothing is installed outside the target folder.

use crate::cargo::{build as build_workspace, check, commit, remove, root, target_folder};
use anyhow::{Context, ensure};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Builds wheels; the version that the package is tested with.
const MATURIN: &str = "maturin==1.16.0";

/// Builds the wheel with a cargo profile, and returns its path.
pub(crate) fn build(profile: &str) -> anyhow::Result<PathBuf> {
    let folder = target_folder()?.join("wheels");
    remove(&folder)?;
    let package = root().join("flux-python");
    // The proof of peer access runs in a process of its own, which a Python program cannot be.
    for artifact in build_workspace(profile, &["--bin", "flux-probe"])? {
        let beside = package.join("python/flux_tp").join(&artifact.name);
        fs::copy(&artifact.path, &beside)
            .with_context(|| format!("cannot copy to {}", beside.display()))?;
    }
    let mut maturin = Command::new(tool("maturin", MATURIN)?);
    maturin
        .args(["build", "--profile", profile, "--compatibility", "linux"])
        .args(["--interpreter", "python3", "--out"])
        .arg(&folder)
        .arg("--manifest-path")
        .arg(package.join("Cargo.toml"))
        .current_dir(root())
        .env("FLUX_COMMIT", commit());
    check(maturin)?;
    let mut wheels = fs::read_dir(&folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    ensure!(
        wheels.len() == 1,
        "{} has {} files, and one wheel is expected",
        folder.display(),
        wheels.len()
    );
    Ok(wheels.remove(0))
}

/// A program of a version of a Python package, which is installed where it is not.
fn tool(program: &str, package: &str) -> anyhow::Result<PathBuf> {
    let folder = target_folder()?.join("python").join(package.replace("==", "-"));
    let path = folder.join("bin").join(program);
    if !path.exists() {
        let mut venv = Command::new("python3");
        venv.args(["-m", "venv"]).arg(&folder);
        check(venv)?;
        let mut install = Command::new(folder.join("bin/python"));
        install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]);
        check(install)?;
    }
    Ok(path)
}
