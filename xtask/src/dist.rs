//! `dist/`: what tests and measures flux on a GPU host without toolchain and network. Beside it
//! lies `dist.tar.gz`, the same packed.
//!
//! ```text
//! dist/flux-bench     the program          dist/tests/         the test binaries that need a GPU
//! dist/tp_mlp         the example          dist/cubins/        kernels compiled ahead of time
//! dist/gpu-ci         runs all of it       dist/flux-probe     asks the devices for the tests
//! dist/*.whl          the Python package   dist/python-tests/  its tests
//! dist/c/             the C interface: library, header, example
//! ```

use crate::cargo::{
    artifacts, build as build_workspace, cargo, check, commit, remove, root, target_folder,
};
use crate::kernels::Selection;
use crate::{kernels, wheel};
use anyhow::{Context, ensure};
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Device files of NVIDIA GPUs, on Linux and in WSL.
const DEVICES: [&str; 2] = ["/dev/nvidiactl", "/dev/dxg"];
/// What kernels are compiled for: Hopper, and PTX of the portable kernel, which runs there and on
/// GPUs that are newer than the kernels. Others compile theirs at first use.
const ARCHS: [&str; 3] = ["sm_90a", "compute_80", "compute_89"];
/// The tests of flux-ops, of which those on GPUs are modules.
const OPS: &str = "ops";
/// Limit of the archive.
const LIMIT_MIB: u64 = 64;

const RUNNER: &str = r#"#!/bin/sh
# Doctor, GPU tests, soak and a quick bench, with one summary and gpu-ci.json beside this file.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
exec "$here/flux-bench" lab gpu-ci --dist "$here" "$@"
"#;

/// Prints the names of the kernels that the folder would have.
pub(crate) fn list(selection: Selection) -> anyhow::Result<()> {
    kernels::list(&ARCHS, selection)
}

/// Builds the folder anew and returns its path.
pub(crate) fn build(selection: Selection) -> anyhow::Result<PathBuf> {
    let dist = root().join("dist");
    remove(&dist)?;
    fs::create_dir_all(dist.join("tests"))?;

    let mut tests = cargo();
    tests
        .args(["test", "--profile", "gpu", "--workspace", "--no-run"])
        .args(["--test", "gpu_*", "--test", OPS])
        .env("FLUX_COMMIT", commit());

    let programs = ["--bin", "flux-bench", "--bin", "flux-probe", "--example", "tp_mlp"];
    for artifact in build_workspace("gpu", &programs)? {
        copy(&artifact.path, &dist.join(artifact.name))?;
    }
    let mut names = Vec::new();
    for artifact in artifacts(tests)? {
        // A package's binaries are built with its tests; only the tests travel.
        if artifact.name == OPS || artifact.name.starts_with("gpu_") {
            copy(&artifact.path, &dist.join("tests").join(&artifact.name))?;
            names.push(artifact.name);
        }
    }
    ensure!(!names.is_empty(), "no test target is named gpu_* or {OPS}");

    let runner = dist.join("gpu-ci");
    fs::write(&runner, RUNNER)?;
    fs::set_permissions(&runner, fs::Permissions::from_mode(0o755))?;

    kernels::compile(Some(&dist.join("cubins")), &ARCHS, selection, &[])?;

    let wheel = wheel::build("gpu")?;
    copy(&wheel, &dist.join(wheel.file_name().context("a wheel has a name")?))?;
    let python_tests = dist.join("python-tests");
    fs::create_dir_all(&python_tests)?;
    for entry in fs::read_dir(root().join("flux-python/tests"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "py") {
            copy(&path, &python_tests.join(path.file_name().context("a test has a name")?))?;
        }
    }

    c_interface(&dist.join("c"))?;

    let packed = pack(&dist)?;
    let (folder, archive) = (folder_bytes(&dist)?, fs::metadata(&packed)?.len());
    println!(
        "{}: {:.1} MiB, {} test binaries: {}",
        dist.display(),
        mib(folder),
        names.len(),
        names.join(" ")
    );
    println!("{}: {:.1} MiB of {LIMIT_MIB}", packed.display(), mib(archive));
    ensure!(
        archive <= LIMIT_MIB << 20,
        "{} is above the limit of {LIMIT_MIB} MiB",
        packed.display()
    );
    Ok(dist)
}

/// Builds the C interface.
fn c_interface(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    let mut library = cargo();
    library
        .args(["build", "--profile", "gpu", "--package", "flux-tp-c", "--lib"])
        .current_dir(root());
    check(library)?;
    copy(&target_folder()?.join("gpu/libflux_tp_c.so"), &folder.join("libflux_tp_c.so"))?;
    let package = root().join("flux-c");
    copy(&package.join("include/flux.h"), &folder.join("flux.h"))?;
    copy(&package.join("examples/mlp.c"), &folder.join("mlp.c"))
}

/// Packs the folder into an archive beside it, and returns its path.
fn pack(dist: &Path) -> anyhow::Result<PathBuf> {
    let packed = dist.with_extension("tar.gz");
    let (parent, name) = (dist.parent().context("a folder")?, dist.file_name().context("a name")?);
    let mut tar = Command::new("tar");
    tar.arg("-czf").arg(&packed).arg("-C").arg(parent).arg(name);
    check(tar)?;
    Ok(packed)
}

/// Builds the folder and runs its checks here.
pub(crate) fn gpu_ci(args: &[OsString]) -> anyhow::Result<()> {
    // The program asks the driver again.
    ensure!(
        DEVICES.iter().any(|device| Path::new(device).exists()),
        "gpu-ci checks GPUs, and there is no NVIDIA GPU here ({})",
        DEVICES.join(", ")
    );
    let dist = build(Selection::Shipped)?;
    let mut run = Command::new(dist.join("gpu-ci"));
    run.args(args);
    check(run)
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn folder_bytes(folder: &Path) -> anyhow::Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        sum += if meta.is_dir() { folder_bytes(&entry.path())? } else { meta.len() };
    }
    Ok(sum)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
