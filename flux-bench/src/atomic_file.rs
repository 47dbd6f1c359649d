//! Files that are written whole or not at all.
//!
//! Invariant: the target's name refers to its previous content or to all of the new one.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why a file was not written. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum WriteError {
    /// The path has no file name, or names a folder, a device or another thing that is not a file.
    #[error("{0} cannot be written: it is not a regular file")]
    NotAFile(PathBuf),
    /// The folder is missing or cannot be written.
    #[error("{target} cannot be written: a file cannot be created in {folder}", target = target.display(), folder = folder.display())]
    Create { target: PathBuf, folder: PathBuf, source: io::Error },
    /// The content could not be written whole: a full disk, a quota, a medium's error.
    #[error("{target} was not written", target = target.display())]
    Write { target: PathBuf, source: io::Error },
}

/// Whether both lead to one file, by whatever names and links. `output` need not be there.
pub(crate) fn same_file(input: &Path, output: &Path) -> io::Result<bool> {
    let file = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
    match file(output) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        output => Ok(file(input)? == output?),
    }
}

/// Checks that [`write()`] could create its temporary file beside `target`.
pub(crate) fn check(target: &Path) -> Result<(), WriteError> {
    temporary(target).map(drop)
}

/// Writes what `content` writes, under the name `target`, replacing a file of that name.
pub(crate) fn write(target: &Path, content: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), WriteError> {
    let file = temporary(target)?;
    let fail = |source| WriteError::Write { target: target.to_owned(), source };
    let mut buffered = BufWriter::new(file.as_file());
    content(&mut buffered).and_then(|()| buffered.flush()).map_err(fail)?;
    drop(buffered);
    file.as_file().sync_all().map_err(fail)?;
    file.persist(target).map_err(|e| fail(e.error))?;
    // The rename itself reaches the medium with the folder.
    File::open(folder(target)).and_then(|f| f.sync_all()).map_err(fail)
}

/// Writes a value as JSON that people can read, as [`write()`] does.
pub(crate) fn write_json(target: &Path, value: &impl serde::Serialize) -> Result<(), WriteError> {
    write(target, |w| {
        serde_json::to_writer_pretty(&mut *w, value)?;
        w.write_all(b"\n")
    })
}

fn folder(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn temporary(target: &Path) -> Result<tempfile::NamedTempFile, WriteError> {
    let not_a_file = || WriteError::NotAFile(target.to_owned());
    let name = target.file_name().ok_or_else(not_a_file)?;
    if fs::metadata(target).is_ok_and(|m| !m.is_file()) {
        return Err(not_a_file());
    }
    let folder = folder(target);
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    // The umask's permissions, as `File::create` gives them, and the system's own error without the
    // path.
    let create = |path: &Path| File::options().read(true).write(true).create_new(true).open(path);
    let created = tempfile::Builder::new().prefix(&prefix).suffix(".partial").make_in(folder, create);
    created.map_err(|source| WriteError::Create { target: target.to_owned(), folder: folder.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("y.bin");
        write(&target, |w| w.write_all(b"old")).unwrap();
        let full = |w: &mut dyn Write| {
            w.write_all(&vec![0; 100_000])?;
            Err(io::Error::from(io::ErrorKind::StorageFull))
        };
        assert!(matches!(write(&target, full), Err(WriteError::Write { .. })));
        assert_eq!(fs::read(&target).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["y.bin"]);
    }

    #[test]
    fn an_error_says_the_systems_reason_and_the_path_once() {
        let folder = tempfile::tempdir().unwrap();
        let error = format!("{:#}", anyhow::Error::from(check(&folder.path().join("no/y.bin")).unwrap_err()));
        assert_eq!((error.matches("No such file").count(), error.matches("/no").count()), (1, 2), "target and folder: {error}");
        let full = |_: &mut dyn Write| Err(io::Error::from(io::ErrorKind::StorageFull));
        let error = format!("{:#}", anyhow::Error::from(write(&folder.path().join("y.bin"), full).unwrap_err()));
        assert!(error.ends_with("y.bin was not written: no storage space"), "{error}");
    }

    #[test]
    fn a_success_replaces_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("y.bin");
        for content in [b"first", b"later"] {
            write(&target, |w| w.write_all(content)).unwrap();
            assert_eq!(fs::read(&target).unwrap(), content);
        }
        let plain = folder.path().join("plain");
        fs::write(&plain, "").unwrap();
        assert_eq!(fs::metadata(&target).unwrap().permissions(), fs::metadata(&plain).unwrap().permissions());
        fs::remove_file(plain).unwrap();
        assert_eq!(names(folder.path()), ["y.bin"]);
    }

    #[test]
    fn a_target_that_cannot_be_a_file_is_refused_beforehand() {
        let folder = tempfile::tempdir().unwrap();
        for target in [folder.path(), Path::new("/dev/null"), Path::new("..")] {
            assert!(matches!(check(target), Err(WriteError::NotAFile(_))), "{target:?}");
        }
        let missing = folder.path().join("no/such/folder/y.bin");
        assert!(matches!(check(&missing), Err(WriteError::Create { .. })));
        assert!(names(folder.path()).is_empty());
    }
}
