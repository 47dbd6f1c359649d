//! Folders of Python environments in which wheels keep CUDA's libraries.
//!
//! Invariant: nothing is executed and nothing is loaded here; a folder may not exist.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// The `site-packages` folders of `VIRTUAL_ENV`, and then those of the first `python3` on `PATH`,
/// the newest Python first.
pub fn site_packages(env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = env("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
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
        .map(|dir| dir.join("python3"))
        .find(|p| p.is_file());
    let Some(python) = python else {
        return Vec::new();
    };
    let resolved = python.canonicalize().ok();
    [Some(python), resolved]
        .into_iter()
        .flatten()
        .filter_map(|p| Some(p.parent()?.parent()?.to_path_buf()))
        .collect()
}

/// The package folders below a prefix, the newest Python first.
fn below(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for lib in ["lib", "local/lib"] {
        let Ok(entries) = std::fs::read_dir(prefix.join(lib)) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with("python3") {
                sites.extend(
                    ["site-packages", "dist-packages"].map(|packages| entry.path().join(packages)),
                );
            }
        }
    }
    sites.sort();
    sites.reverse();
    sites
}
