//! Folders of Python environments in which wheels keep CUDA's libraries.
//!
//! Invariant: nothing is executed and nothing is loaded here; a folder may not exist.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The `site-packages` folders of `VIRTUAL_ENV`, of `CONDA_PREFIX`, and of the first `python3` on
/// `PATH`, the newest Python of each first.
pub(super) fn site_packages(env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> =
        [named("VIRTUAL_ENV"), named("CONDA_PREFIX")].into_iter().flatten().collect();
    prefixes.extend(python_prefixes(env("PATH").as_deref()));
    let mut found = Vec::new();
    for site in prefixes.iter().flat_map(|prefix| below(prefix)) {
        if !found.contains(&site) {
            found.push(site);
        }
    }
    found
}

/// The prefixes of the first `python3` on `path`: as it is named there (a virtual environment) and
/// as its links resolve.
fn python_prefixes(path: Option<&OsStr>) -> Vec<PathBuf> {
    let python = path
        .into_iter()
        .flat_map(std::env::split_paths)
        .map(|folder| folder.join("python3"))
        .find(|python| python.is_file());
    let resolved = python.as_ref().and_then(|python| python.canonicalize().ok());
    [python, resolved]
        .into_iter()
        .flatten()
        .filter_map(|python| Some(python.parent()?.parent()?.to_path_buf()))
        .collect()
}

/// The package folders below a prefix, the newest Python first.
fn below(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for entry in ["lib", "local/lib"]
        .iter()
        .filter_map(|lib| std::fs::read_dir(prefix.join(lib)).ok())
        .flatten()
        .flatten()
    {
        if let Some(minor) = python_minor(&entry.file_name().to_string_lossy()) {
            sites.extend(
                ["site-packages", "dist-packages"]
                    .map(|packages| (minor, entry.path().join(packages))),
            );
        }
    }
    sites.sort();
    sites.into_iter().rev().map(|(_, site)| site).collect()
}

/// The minor version in a folder's name like `python3.13` or `python3.13t`; 0 where it has none.
fn python_minor(folder: &str) -> Option<u32> {
    let version = folder.strip_prefix("python3")?;
    let minor = version
        .strip_prefix('.')
        .and_then(|minor| minor.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok());
    Some(minor.unwrap_or(0))
}
