//! Where an NCCL library may be.
//!
//! Invariant: nothing is executed and nothing is loaded here; a candidate may not exist.

use crate::cuda::wheels::site_packages;
use std::ffi::OsString;
use std::path::PathBuf;

/// What the library is called: wheels have only the first, development packages both.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// What to try, in order. Where `FLUX_NCCL_LIB` is set, nothing else is tried: whoever names a
/// library wants that one.
pub(super) fn candidates(env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    if let Some(named) = env("FLUX_NCCL_LIB").filter(|v| !v.is_empty()) {
        let named = PathBuf::from(named);
        return if named.is_dir() {
            NAMES.map(|name| named.join(name)).to_vec()
        } else {
            vec![named]
        };
    }
    // Without a slash the loader searches: LD_LIBRARY_PATH, the cache, what is loaded already.
    let mut found: Vec<PathBuf> = NAMES.iter().map(PathBuf::from).collect();
    let wheels =
        site_packages(env).into_iter().map(|site| site.join("nvidia/nccl/lib").join(NAMES[0]));
    found.extend(wheels.filter(|wheel| wheel.is_file()));
    // Debian's folder of libraries of this architecture.
    let system = PathBuf::from(format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    found.extend(NAMES.map(|name| system.join(name)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::path::Path;

    fn env(pairs: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> {
        let map: HashMap<String, OsString> =
            pairs.iter().map(|(k, v)| ((*k).to_owned(), v.as_os_str().to_owned())).collect();
        move |key| map.get(key).cloned()
    }

    #[test]
    fn a_named_library_is_the_only_candidate() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libnccl.so.2");
        assert_eq!(candidates(env(&[("FLUX_NCCL_LIB", &file)])), vec![file.clone()]);
        assert_eq!(
            candidates(env(&[("FLUX_NCCL_LIB", dir.path())])),
            vec![file, dir.path().join("libnccl.so")]
        );
    }

    #[test]
    fn wheels_of_the_environment_come_after_the_loader_and_before_the_system() {
        let dir = tempfile::tempdir().unwrap();
        let wheel = |root: &str, python: &str| {
            let lib = dir
                .path()
                .join(root)
                .join("lib")
                .join(python)
                .join("site-packages/nvidia/nccl/lib");
            std::fs::create_dir_all(&lib).unwrap();
            std::fs::write(lib.join("libnccl.so.2"), "").unwrap();
            lib.join("libnccl.so.2")
        };
        let venv = wheel("venv", "python3.12");
        let system = wheel("usr", "python3.11");
        std::fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        std::fs::write(dir.path().join("usr/bin/python3"), "").unwrap();
        let found = candidates(env(&[
            ("VIRTUAL_ENV", &dir.path().join("venv")),
            ("PATH", &dir.path().join("usr/bin")),
        ]));
        assert_eq!(
            found[..4],
            [PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so"), venv, system]
        );
        assert!(
            found[4..]
                .iter()
                .all(|p| p.starts_with(format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH))),
            "{found:?}"
        );
        assert_eq!(found.len(), 6);
    }
}
