//! Where one of CUDA's libraries may be.
//!
//! Invariant: nothing is executed and nothing is loaded here; a candidate may not exist.

use super::wheels::site_packages;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A toolkit's folder of this architecture: NVIDIA calls servers with Arm processors SBSA.
const TARGET_LIB: &str = if cfg!(target_arch = "aarch64") {
    "targets/sbsa-linux/lib"
} else {
    "targets/x86_64-linux/lib"
};

/// How to find a library.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// Its names, the newest first: wheels have only one with a major version.
    pub names: &'static [&'static str],
    /// The variable that names the file, or its folder. Where it is set, nothing else is tried.
    pub variable: &'static str,
    /// Where wheels have it, below `site-packages`.
    pub wheels: &'static [&'static str],
    /// Whether the system's loader is asked before folders are searched: it knows a library that
    /// the process has loaded already.
    pub loader_first: bool,
}

impl Search {
    /// What to try, in order: the folder of `FLUX_CUDA_LIB_DIR`, toolkits, wheels and Conda's
    /// packages, the folder of this program, and Debian's folder of libraries.
    pub fn candidates(&self) -> Vec<PathBuf> {
        let executable = std::env::current_exe().ok();
        self.candidates_in(|key| std::env::var_os(key), executable.as_deref())
    }

    fn candidates_in(
        &self,
        env: impl Fn(&str) -> Option<OsString>,
        executable: Option<&Path>,
    ) -> Vec<PathBuf> {
        let folder = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(named) = folder(self.variable) {
            return if named.is_dir() {
                self.names.iter().map(|name| named.join(name)).collect()
            } else {
                vec![named]
            };
        }
        let mut folders = Vec::from_iter(folder("FLUX_CUDA_LIB_DIR"));
        let toolkits =
            [folder("CUDA_HOME"), folder("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))];
        for toolkit in toolkits.into_iter().flatten() {
            folders.extend(["lib64", "lib", TARGET_LIB].map(|lib| toolkit.join(lib)));
        }
        for site in site_packages(&env) {
            folders.extend(self.wheels.iter().map(|lib| site.join(lib)));
        }
        // Conda's own packages are no wheels.
        folders.extend(folder("CONDA_PREFIX").map(|conda| conda.join("lib")));
        if let Some(beside) = executable.and_then(Path::parent) {
            folders.extend([beside.to_path_buf(), beside.join("lib")]);
        }
        folders.push(PathBuf::from(format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH)));

        // Without a slash the loader searches: LD_LIBRARY_PATH, its cache, what is loaded already.
        let loader = self.names.iter().map(PathBuf::from);
        let mut found: Vec<PathBuf> =
            if self.loader_first { loader.clone().collect() } else { Vec::new() };
        for folder in folders {
            for library in self.names.iter().map(|name| folder.join(name)) {
                if library.is_file() && !found.contains(&library) {
                    found.push(library);
                }
            }
        }
        if !self.loader_first {
            found.extend(loader);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const NVRTC: Search = Search {
        names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        variable: "FLUX_NVRTC_LIB",
        wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
        loader_first: false,
    };

    fn env(pairs: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> {
        let map: HashMap<String, OsString> =
            pairs.iter().map(|(k, v)| ((*k).to_owned(), v.as_os_str().to_owned())).collect();
        move |key| map.get(key).cloned()
    }

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mine.so");
        assert_eq!(NVRTC.candidates_in(env(&[("FLUX_NVRTC_LIB", &file)]), None), [file]);
        let inside = NVRTC.candidates_in(env(&[("FLUX_NVRTC_LIB", dir.path())]), None);
        assert_eq!(
            inside,
            NVRTC.names.iter().map(|name| dir.path().join(name)).collect::<Vec<_>>()
        );
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
        let found = NVRTC.candidates_in(env(&[("VIRTUAL_ENV", dir.path())]), None);
        assert_eq!(found_in(dir.path(), &found), expected);
    }

    #[test]
    fn a_conda_environment_has_packages_of_its_own_and_wheels() {
        let dir = tempfile::tempdir().unwrap();
        let [venv, conda] = ["venv", "conda"].map(|name| dir.path().join(name));
        let expected = [
            file(&venv.join("lib/python3.12/site-packages/nvidia/cu13/lib"), "libnvrtc.so.13"),
            file(&conda.join("lib/python3.12/site-packages/nvidia/cu13/lib"), "libnvrtc.so.13"),
            file(&conda.join("lib"), "libnvrtc.so.12"),
        ];
        let found =
            NVRTC.candidates_in(env(&[("VIRTUAL_ENV", &venv), ("CONDA_PREFIX", &conda)]), None);
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
        let found = NVRTC.candidates_in(env(&pairs), Some(&at("app/flux")));
        assert_eq!(found_in(dir.path(), &found), expected);
        assert_eq!(
            found[found.len() - 3..],
            NVRTC.names.iter().map(PathBuf::from).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_library_that_the_process_may_have_loaded_is_asked_of_the_loader_first() {
        let dir = tempfile::tempdir().unwrap();
        let wheel =
            file(&dir.path().join("lib/python3.12/site-packages/nvidia/nccl/lib"), "libnccl.so.2");
        let nccl = Search {
            names: &["libnccl.so.2", "libnccl.so"],
            variable: "FLUX_NCCL_LIB",
            wheels: &["nvidia/nccl/lib"],
            loader_first: true,
        };
        let found = nccl.candidates_in(env(&[("VIRTUAL_ENV", dir.path())]), None);
        let expected = [PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so"), wheel];
        assert_eq!(found[..3], expected);
    }
}
