//! Candidate paths of an NVRTC library.
//!
//! Invariant: nothing is executed and nothing is loaded here; a candidate may not exist.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Names of the library: wheels have only one with a major version.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// A toolkit's folder of this architecture: NVIDIA calls servers with Arm processors SBSA.
const TARGET_LIB: &str = if cfg!(target_arch = "aarch64") {
    "targets/sbsa-linux/lib"
} else {
    "targets/x86_64-linux/lib"
};

/// The candidates in order. `FLUX_NVRTC_LIB`, where set, is the only one.
pub(super) fn candidates(
    env: impl Fn(&str) -> Option<OsString>,
    executable: Option<&Path>,
) -> Vec<PathBuf> {
    let folder = |name: &str| env(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(named) = folder("FLUX_NVRTC_LIB") {
        return if named.is_dir() {
            NAMES.map(|name| named.join(name)).to_vec()
        } else {
            vec![named]
        };
    }
    let mut folders = Vec::from_iter(folder("FLUX_CUDA_LIB_DIR"));
    for toolkit in
        [folder("CUDA_HOME"), folder("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))]
            .into_iter()
            .flatten()
    {
        folders.extend(["lib64", "lib", TARGET_LIB].map(|lib| toolkit.join(lib)));
    }
    folders.extend(folder("VIRTUAL_ENV").iter().flat_map(|prefix| wheels(prefix)));
    if let Some(conda) = folder("CONDA_PREFIX") {
        // Conda's own packages are no wheels.
        folders.push(conda.join("lib"));
        folders.extend(wheels(&conda));
    }
    folders
        .extend(python_prefixes(env("PATH").as_deref()).iter().flat_map(|prefix| wheels(prefix)));
    if let Some(beside) = executable.and_then(Path::parent) {
        folders.extend([beside.to_path_buf(), beside.join("lib")]);
    }
    let mut found = Vec::new();
    for library in folders.iter().flat_map(|folder| NAMES.map(|name| folder.join(name))) {
        if library.is_file() && !found.contains(&library) {
            found.push(library);
        }
    }
    // Without a slash the loader searches: LD_LIBRARY_PATH, its cache, what is loaded already.
    found.extend(NAMES.map(PathBuf::from));
    found
}

/// The prefixes of the first `python3` on `path`: as it is named there (a virtual environment) and
/// as its links resolve.
fn python_prefixes(path: Option<&OsStr>) -> Vec<PathBuf> {
    let python = path
        .into_iter()
        .flat_map(std::env::split_paths)
        .map(|folder| folder.join("python3"))
        .find(|p| p.is_file());
    let resolved = python.as_ref().and_then(|python| python.canonicalize().ok());
    [python, resolved]
        .into_iter()
        .flatten()
        .filter_map(|p| Some(p.parent()?.parent()?.to_path_buf()))
        .collect()
}

/// Where wheels below a prefix have the library.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    site_packages(prefix)
        .iter()
        .flat_map(|site| ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|lib| site.join(lib)))
        .collect()
}

/// The package folders below a prefix, the newest Python first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn env(pairs: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> {
        let map: HashMap<String, OsString> =
            pairs.iter().map(|(k, v)| ((*k).to_owned(), v.as_os_str().to_owned())).collect();
        move |key| map.get(key).cloned()
    }

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mine.so");
        assert_eq!(candidates(env(&[("FLUX_NVRTC_LIB", &file)]), None), [file]);
        let inside = candidates(env(&[("FLUX_NVRTC_LIB", dir.path())]), None);
        assert_eq!(inside, NAMES.map(|name| dir.path().join(name)));
    }

    /// An empty file, and its path.
    fn file(folder: &Path, name: &str) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(name), "").unwrap();
        folder.join(name)
    }

    /// What is found in `dir`.
    fn found_in(dir: &Path, found: &[PathBuf]) -> Vec<PathBuf> {
        found.iter().filter(|p| p.starts_with(dir)).cloned().collect()
    }

    #[test]
    fn the_newest_python_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let library = |python: &str| {
            let folder = dir.path().join("lib").join(python).join("site-packages/nvidia/cu13/lib");
            file(&folder, "libnvrtc.so.13")
        };
        let expected = ["python3.13t", "python3.13", "python3.9", "python3"].map(library);
        library("python2.7");
        let found = candidates(env(&[("VIRTUAL_ENV", dir.path())]), None);
        assert_eq!(found_in(dir.path(), &found), expected);
    }

    #[test]
    fn a_conda_environment_has_packages_of_its_own_and_wheels() {
        let dir = tempfile::tempdir().unwrap();
        let [venv, conda] = ["venv", "conda"].map(|name| dir.path().join(name));
        let expected = [
            file(&venv.join("lib/python3.12/site-packages/nvidia/cu13/lib"), "libnvrtc.so.13"),
            file(&conda.join("lib"), "libnvrtc.so.12"),
            file(&conda.join("lib/python3.12/site-packages/nvidia/cu13/lib"), "libnvrtc.so.13"),
        ];
        let found = candidates(env(&[("VIRTUAL_ENV", &venv), ("CONDA_PREFIX", &conda)]), None);
        assert_eq!(found_in(dir.path(), &found), expected);
    }

    #[test]
    fn named_folders_come_before_toolkits_wheels_the_executable_and_the_loader() {
        let dir = tempfile::tempdir().unwrap();
        let library = |folder: &str, name: &str| file(&dir.path().join(folder), name);
        let expected = [
            library("named", "libnvrtc.so.12"),
            library("cuda/lib64", "libnvrtc.so.13"),
            library("venv/lib/python3.12/site-packages/nvidia/cu13/lib", "libnvrtc.so.13"),
            library("usr/lib/python3.11/dist-packages/nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"),
            library("app", "libnvrtc.so.13"),
        ];
        library("usr/bin", "python3");
        let at = |name: &str| dir.path().join(name);
        let (named, cuda, venv, path) = (at("named"), at("cuda"), at("venv"), at("usr/bin"));
        let pairs: [(&str, &Path); 4] = [
            ("FLUX_CUDA_LIB_DIR", &named),
            ("CUDA_HOME", &cuda),
            ("VIRTUAL_ENV", &venv),
            ("PATH", &path),
        ];
        let found = candidates(env(&pairs), Some(&at("app/flux")));
        assert_eq!(found_in(dir.path(), &found), expected);
        assert_eq!(found[found.len() - 3..], NAMES.map(PathBuf::from));
    }
}
