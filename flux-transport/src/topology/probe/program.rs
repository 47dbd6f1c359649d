//! Which program can be the probe.
//!
//! Invariant: only a program known to answer is started: a named one, this one if it has called
//! [`serve`](super::serve), or one with the probe's name.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Names the program; empty for none.
pub(super) const PROGRAM: &str = "FLUX_PROBE";
/// What the program is called where nobody names it.
const NAME: &str = "flux-probe";

/// The program to start: what `FLUX_PROBE` names, else this one (`own`) if it `serves`, else
/// `flux-probe` beside it, else on the path.
pub(super) fn find(
    env: impl Fn(&str) -> Option<OsString>,
    own: Option<&Path>,
    serves: bool,
) -> Option<PathBuf> {
    if let Some(named) = env(PROGRAM) {
        return Some(PathBuf::from(named)).filter(|path| !path.as_os_str().is_empty());
    }
    if let Some(own) = own.filter(|_| serves) {
        return Some(own.to_owned());
    }
    let beside = own.and_then(Path::parent).map(Path::to_owned);
    let path = env("PATH");
    let folders = beside.into_iter().chain(path.as_deref().into_iter().flat_map(folders));
    folders.map(|folder| folder.join(NAME)).find(|program| program.is_file())
}

/// The absolute folders of a path: what the working folder happens to hold is not asked for.
fn folders(path: &OsStr) -> impl Iterator<Item = PathBuf> {
    std::env::split_paths(path).filter(|folder| folder.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &Path)]) -> impl Fn(&str) -> Option<OsString> {
        move |key| {
            pairs
                .iter()
                .find(|(name, _)| *name == key)
                .map(|(_, value)| value.as_os_str().to_owned())
        }
    }

    #[test]
    fn what_is_named_comes_first_then_what_serves_then_what_is_beside_then_the_path() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = here.path().join("program");
        for folder in [&here, &there] {
            std::fs::write(folder.path().join(NAME), "").unwrap();
        }
        let path = ("PATH", there.path());
        assert_eq!(
            find(env(&[(PROGRAM, Path::new("/x")), path]), Some(&own), true),
            Some("/x".into())
        );
        assert_eq!(
            find(env(&[(PROGRAM, Path::new("")), path]), Some(&own), true),
            None,
            "empty is none"
        );
        assert_eq!(find(env(&[path]), Some(&own), true), Some(own.clone()));
        assert_eq!(find(env(&[path]), Some(&own), false), Some(here.path().join(NAME)));
        assert_eq!(find(env(&[path]), None, true), Some(there.path().join(NAME)));
        assert_eq!(find(env(&[("PATH", Path::new("."))]), None, false), None);
        assert_eq!(find(env(&[]), Some(Path::new("/no/such/program")), false), None);
    }
}
