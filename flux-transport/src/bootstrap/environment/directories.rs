//! Where private run-time directories are, and the variables that say so.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::bootstrap::names::FLUX_RENDEZVOUS;

/// Where private run-time directories are made: `XDG_RUNTIME_DIR` if it is a directory, else
/// `TMPDIR`, else `/tmp`.
pub(crate) fn runtime_directory(lookup: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    named_runtime_directory(lookup).map_or_else(|| PathBuf::from("/tmp"), |(_, path)| path)
}

/// The directory with the variable that names it.
fn named_runtime_directory(
    lookup: &dyn Fn(&str) -> Option<OsString>,
) -> Option<(&'static str, PathBuf)> {
    let said =
        |name| Some((name, lookup(name).map(PathBuf::from).filter(|path| path.is_absolute())?));
    said("XDG_RUNTIME_DIR").filter(|(_, path)| path.is_dir()).or_else(|| said("TMPDIR"))
}

/// The variable by which a rendezvous directory has its place; `None` where the caller chose it. A
/// launcher makes the directory that it names in `FLUX_RENDEZVOUS` in a run-time directory, too.
pub(crate) fn variable_of(
    directory: &Path,
    lookup: &dyn Fn(&str) -> Option<OsString>,
) -> Option<&'static str> {
    let within = named_runtime_directory(lookup)
        .filter(|(_, path)| directory.starts_with(path))
        .map(|(name, _)| name);
    within.or_else(|| {
        lookup(FLUX_RENDEZVOUS)
            .filter(|value| directory == Path::new(value))
            .map(|_| FLUX_RENDEZVOUS)
    })
}
