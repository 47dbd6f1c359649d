//! Where an NCCL library may be.
//!
//! Invariant: nothing is executed and nothing is loaded here; a candidate may not exist.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// What the library is called: wheels have only the first, development packages both.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// What to try, in order. Where `FLUX_NCCL_LIB` is set, nothing else is tried: whoever names a
/// library wants that one.
pub(super) fn candidates(env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(named) = env("FLUX_NCCL_LIB").filter(|v| !v.is_empty()) {
        let named = PathBuf::from(named);
        return if named.is_dir() { NAMES.map(|name| named.join(name)).to_vec() } else { vec![named] };
    }
    // Without a slash the loader searches: LD_LIBRARY_PATH, the cache, what is loaded already.
    let mut found: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
    let mut prefixes: Vec<PathBuf> = env("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    prefixes.extend(python_prefixes(env("PATH").as_deref()));
    for prefix in prefixes {
        for site in site_packages(&prefix) {
            let wheel = site.join("nvidia/nccl/lib").join(NAMES[0]);
            if wheel.is_file() && !found.contains(&wheel) {
                found.push(wheel);
            }
        }
    }
    found.extend(NAMES.map(|name| Path::new("/usr/lib/x86_64-linux-gnu").join(name)));
    found
}

/// The prefixes of the first `python3` on `path`: as it is named there (a virtual environment) and
/// as its links resolve.
fn python_prefixes(path: Option<&OsStr>) -> Vec<PathBuf> {
    let python = path.into_iter().flat_map(std::env::split_paths).map(|dir| dir.join("python3")).find(|p| p.is_file());
    let Some(python) = python else {
        return Vec::new();
    };
    let resolved = python.canonicalize().ok();
    [Some(python), resolved].into_iter().flatten().filter_map(|p| Some(p.parent()?.parent()?.to_path_buf())).collect()
}

/// The package folders below a prefix, the newest Python first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for lib in ["lib", "local/lib"] {
        let Ok(entries) = std::fs::read_dir(prefix.join(lib)) else {
            continue;
        };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with("python3") {
                sites.extend(["site-packages", "dist-packages"].map(|packages| entry.path().join(packages)));
            }
        }
    }
    sites.sort();
    sites.reverse();
    sites
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn env(pairs: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> {
        let map: HashMap<String, OsString> = pairs.iter().map(|(k, v)| ((*k).to_owned(), v.as_os_str().to_owned())).collect();
        move |key| map.get(key).cloned()
    }

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libnccl.so.2");
        assert_eq!(candidates(env(&[("FLUX_NCCL_LIB", &file)])), vec![file.clone()]);
        assert_eq!(candidates(env(&[("FLUX_NCCL_LIB", dir.path())])), vec![file, dir.path().join("libnccl.so")]);
    }

    #[test]
    fn wheels_of_the_environment_come_after_the_loader_and_before_the_system() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = |root: &str, python: &str| {
            let lib = dir.path().join(root).join("lib").join(python).join("site-packages/nvidia/nccl/lib");
            std::fs::create_dir_all(&lib).unwrap();
            std::fs::write(lib.join("libnccl.so.2"), "").unwrap();
            lib.join("libnccl.so.2")
        };
        let venv = wheel("venv", "python3.12");
        let system = wheel("usr", "python3.11");
        std::fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        std::fs::write(dir.path().join("usr/bin/python3"), "").unwrap();
        let found = candidates(env(&[("VIRTUAL_ENV", &dir.path().join("venv")), ("PATH", &dir.path().join("usr/bin"))]));
        assert_eq!(found[..4], [PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so"), venv, system]);
        assert_eq!(found.len(), 6);
    }
}
