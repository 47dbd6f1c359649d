//! Where an NVRTC library may be.
//!
//! Invariant: nothing is executed and nothing is loaded here; a candidate may not exist.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// What the library is called: wheels have only a name with a major version, toolkits all.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// What to try, in order. Where `FLUX_NVRTC_LIB` is set, nothing else is tried: whoever names a library wants that one.
pub(super) fn candidates(env: impl Fn(&str) -> Option<OsString>, executable: Option<&Path>) -> Vec<PathBuf> {
    let folder = |name: &str| env(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(named) = folder("FLUX_NVRTC_LIB") {
        return if named.is_dir() { NAMES.map(|name| named.join(name)).to_vec() } else { vec![named] };
    }
    let mut folders = Vec::from_iter(folder("FLUX_CUDA_LIB_DIR"));
    for toolkit in [folder("CUDA_HOME"), folder("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))].into_iter().flatten() {
        folders.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|lib| toolkit.join(lib)));
    }
    for prefix in [folder("VIRTUAL_ENV"), folder("CONDA_PREFIX")].into_iter().flatten().chain(python_prefixes(env("PATH").as_deref())) {
        for site in site_packages(&prefix) {
            folders.extend(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|lib| site.join(lib)));
        }
    }
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

/// The prefixes of the first `python3` on `path`: as it is named there (a virtual environment) and as its links resolve.
fn python_prefixes(path: Option<&OsStr>) -> Vec<PathBuf> {
    let python = path.into_iter().flat_map(std::env::split_paths).map(|folder| folder.join("python3")).find(|p| p.is_file());
    let resolved = python.as_ref().and_then(|python| python.canonicalize().ok());
    [python, resolved].into_iter().flatten().filter_map(|p| Some(p.parent()?.parent()?.to_path_buf())).collect()
}

/// The package folders below a prefix, the newest Python first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let mut sites = Vec::new();
    for entry in ["lib", "local/lib"].iter().filter_map(|lib| std::fs::read_dir(prefix.join(lib)).ok()).flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("python3") {
            sites.extend(["site-packages", "dist-packages"].map(|packages| entry.path().join(packages)));
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
        let file = dir.path().join("mine.so");
        assert_eq!(candidates(env(&[("FLUX_NVRTC_LIB", &file)]), None), [file]);
        let inside = candidates(env(&[("FLUX_NVRTC_LIB", dir.path())]), None);
        assert_eq!(inside, NAMES.map(|name| dir.path().join(name)));
    }

    #[test]
    fn named_folders_come_before_toolkits_wheels_the_executable_and_the_loader() {
        let dir = tempfile::tempdir().unwrap();
        let library = |folder: &str, name: &str| {
            let folder = dir.path().join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(name), "").unwrap();
            folder.join(name)
        };
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
        let pairs: [(&str, &Path); 4] = [("FLUX_CUDA_LIB_DIR", &named), ("CUDA_HOME", &cuda), ("VIRTUAL_ENV", &venv), ("PATH", &path)];
        let found = candidates(env(&pairs), Some(&at("app/flux")));
        let ours: Vec<_> = found.iter().filter(|p| p.starts_with(dir.path())).cloned().collect();
        assert_eq!(ours, expected);
        assert_eq!(found[found.len() - 3..], NAMES.map(PathBuf::from));
    }
}
