//! Libraries that are opened at run time, and may lie in several places.
//!
//! Invariant: a candidate that exists and cannot be loaded is reported in the loader's words. A
//! missing one is reported only if all are missing. An opened library stays for the life of the
//! process.

mod search;
mod table;
mod wheels;

pub use search::Search;
pub use table::MissingSymbol;

pub use libloading::os::unix::Library;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why no candidate was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotLoaded {
    /// What the loader said of each that is there, in the order of the candidates.
    failed: Vec<String>,
    absent: Vec<String>,
}

impl fmt::Display for NotLoaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.failed.is_empty() {
            return f.write_str(&self.failed.join("; "));
        }
        match &self.absent[..] {
            [] => f.write_str("not found, and there is nowhere to look"),
            absent => write!(f, "not found, looked at: {}", absent.join(", ")),
        }
    }
}

/// Loads the first candidate that can be loaded, and returns its path. The system's loader searches
/// for those without a slash.
///
/// Only for libraries whose initialisers may run at any time.
///
/// # Errors
/// [`NotLoaded`], if there is none.
pub fn first(candidates: Vec<PathBuf>) -> Result<(PathBuf, Library), NotLoaded> {
    let mut none = NotLoaded::default();
    for path in candidates {
        // SAFETY: the callers' libraries are made to be loaded in any process at any time.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok((path, library)),
            Err(error) => none.add(&path, &words(&error)),
        }
    }
    Err(none)
}

impl NotLoaded {
    fn add(&mut self, path: &Path, said: &str) {
        let name = path.display().to_string();
        if is_absent(path, said) {
            self.absent.push(name);
        } else if said.contains(&name) {
            self.failed.push(said.to_owned());
        } else {
            // Of a library that another one needs the loader names only that.
            self.failed.push(format!("{name}: {said}"));
        }
    }
}

/// Whether a candidate of which the loader said this is not there at all.
fn is_absent(path: &Path, said: &str) -> bool {
    if path.components().nth(1).is_none() {
        // Only the loader knows where it looked. A missing dependency is reported in the same
        // words, under its own name.
        return said.contains(&format!("{}: ", path.display()))
            && said.contains("No such file or directory");
    }
    // A link that leads nowhere is there, and somebody meant it to work.
    path.symlink_metadata().is_err_and(|error| {
        matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
    })
}

/// What the system's loader said: the library's own error only names the call.
pub(crate) fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(candidates: &[&Path]) -> String {
        first(candidates.iter().map(|path| path.to_path_buf()).collect()).unwrap_err().to_string()
    }

    #[test]
    fn a_library_that_is_there_and_cannot_be_loaded_is_told_whatever_comes_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let (broken, link, missing) = (
            folder.path().join("liba.so"),
            folder.path().join("libb.so"),
            folder.path().join("libc.so"),
        );
        std::fs::write(
            &broken,
            "not a library, but longer than the head of one, so that the loader looks at what it \
             says",
        )
        .unwrap();
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        let nameless = Path::new("libflux-of-nobody.so");
        let said = refused(&[&missing, &broken, &link, nameless]);
        // The loader's own words, and not those of the call alone.
        assert!(said.contains(&format!("{}: invalid ELF header", broken.display())), "{said}");
        assert!(said.contains(&link.display().to_string()), "{said}");
        assert!(
            !said.contains("libc.so") && !said.contains("of-nobody") && !said.contains("dlopen"),
            "{said}"
        );
        // Where none is there, the places are what helps.
        let said = refused(&[&missing, nameless, &broken.join("below")]);
        let places = [
            missing.display().to_string(),
            nameless.display().to_string(),
            broken.join("below").display().to_string(),
        ];
        assert_eq!(said, format!("not found, looked at: {}", places.join(", ")));
        assert_eq!(refused(&[]), "not found, and there is nowhere to look");
    }

    #[test]
    fn a_library_that_misses_another_one_is_there() {
        let missed = "libcudart.so.13: cannot open shared object file: No such file or directory";
        let mut none = NotLoaded::default();
        none.add(Path::new("libcublasLt.so.13"), missed);
        assert_eq!(none.to_string(), format!("libcublasLt.so.13: {missed}"));
        let mut none = NotLoaded::default();
        none.add(Path::new("libcudart.so.13"), missed);
        assert_eq!(none.to_string(), "not found, looked at: libcudart.so.13");
    }

    #[test]
    fn what_can_be_loaded_is_taken_though_others_cannot() {
        let (path, _) = first(vec!["/nowhere/libc.so.6".into(), "libc.so.6".into()]).unwrap();
        assert_eq!(path, Path::new("libc.so.6"));
    }
}
