//! Result files: whole under their name, or not there.
//!
//! Invariant: the target's name leads to its previous content or to all of the new one, which is
//! written to the file behind links. A signal that ends this process leaves nothing of the new one.

use crate::end;
use flux_files::NewFile;
use flux_transport::launch::Signals;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often the signals are looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Why a file was not written. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum WriteError {
    /// The path has no file name, or names a folder, a device or another thing that is not a file.
    #[error("{0} cannot be written: it is not a regular file")]
    NotAFile(PathBuf),
    /// The folder is missing or cannot be written.
    #[error(
        "{target} cannot be written: a file cannot be created in {folder}",
        target = target.display(),
        folder = folder.display()
    )]
    Create { target: PathBuf, folder: PathBuf, source: io::Error },
    /// The content could not be written whole: a full disk, a quota, a medium's error.
    #[error("{target} was not written", target = target.display())]
    Write { target: PathBuf, source: io::Error },
}

/// A result file that is being written. Dropped before [`commit`](Self::commit), it is gone.
#[derive(Debug)]
pub(crate) struct ResultFile {
    target: PathBuf,
    new: NewFile,
    _watch: Option<Watch>,
}

impl ResultFile {
    /// An empty file, for the place that `target` leads to.
    pub(crate) fn create(target: &Path) -> Result<Self, WriteError> {
        let failed = |folder: &Path, source| WriteError::Create {
            target: target.to_owned(),
            folder: folder.to_owned(),
            source,
        };
        let file =
            flux_files::behind_links(target).map_err(|error| failed(folder(target), error))?;
        if file.file_name().is_none() || fs::metadata(&file).is_ok_and(|meta| !meta.is_file()) {
            return Err(WriteError::NotAFile(target.to_owned()));
        }
        let watched = NewFile::create(&file).and_then(|new| Ok((Watch::over(&new)?, new)));
        let (watch, new) = watched.map_err(|error| failed(folder(&file), error))?;
        Ok(Self { target: target.to_owned(), new, _watch: watch })
    }

    /// Writes bytes at an offset; parts may come in any order.
    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), WriteError> {
        self.new.file().write_all_at(bytes, offset).map_err(|error| self.failed(error))
    }

    /// Puts the file under its name, in place of one that is there.
    pub(crate) fn commit(self) -> Result<(), WriteError> {
        let target = self.target;
        self.new.commit().map_err(|source| WriteError::Write { target, source })
    }

    fn file(&self) -> &File {
        self.new.file()
    }

    fn failed(&self, source: io::Error) -> WriteError {
        WriteError::Write { target: self.target.clone(), source }
    }
}

/// Removes a name that a signal would leave behind, and then ends the process by the signal.
#[derive(Debug)]
struct Watch(Arc<AtomicBool>);

impl Watch {
    /// `None` for a file without a name, which goes with the process.
    fn over(new: &NewFile) -> io::Result<Option<Self>> {
        let Some(name) = new.name().map(Path::to_owned) else { return Ok(None) };
        let (signals, done) = (Signals::catch()?, Arc::new(AtomicBool::new(false)));
        let watch = Self(Arc::clone(&done));
        let body = move || {
            loop {
                let last = done.load(Ordering::Acquire);
                if let Some(signal) = signals.take() {
                    // It may have the target's name by now.
                    let _ = fs::remove_file(&name);
                    end::by(signal);
                }
                if last {
                    break;
                }
                std::thread::sleep(LOOK);
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).stack_size(1 << 16).spawn(body)?;
        Ok(Some(watch))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Whether both lead to one file, by whatever names and links. `output` need not be there.
pub(crate) fn same_file(input: &Path, output: &Path) -> io::Result<bool> {
    let file = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
    match file(output) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        output => Ok(file(input)? == output?),
    }
}

/// Checks that [`write()`] could create a file for `target`.
pub(crate) fn check(target: &Path) -> Result<(), WriteError> {
    ResultFile::create(target).map(drop)
}

/// Writes what `content` writes to the file that `target` leads to.
pub(crate) fn write(
    target: &Path,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteError> {
    write_to(ResultFile::create(target)?, content)
}

fn write_to(
    file: ResultFile,
    content: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), WriteError> {
    let mut buffered = BufWriter::new(file.file());
    content(&mut buffered).and_then(|()| buffered.flush()).map_err(|error| file.failed(error))?;
    drop(buffered);
    file.commit()
}

/// Writes a value as JSON that people can read, as [`write()`] does.
pub(crate) fn write_json(target: &Path, value: &impl serde::Serialize) -> Result<(), WriteError> {
    write(target, |w| {
        serde_json::to_writer_pretty(&mut *w, value)?;
        w.write_all(b"\n")
    })
}

fn folder(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
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
        let error = format!(
            "{:#}",
            anyhow::Error::from(check(&folder.path().join("no/y.bin")).unwrap_err())
        );
        assert_eq!(
            (error.matches("No such file").count(), error.matches("/no").count()),
            (1, 2),
            "target and folder: {error}"
        );
        let full = |_: &mut dyn Write| Err(io::Error::from(io::ErrorKind::StorageFull));
        let error = format!(
            "{:#}",
            anyhow::Error::from(write(&folder.path().join("y.bin"), full).unwrap_err())
        );
        assert!(error.ends_with("y.bin was not written: no storage space"), "{error}");
    }

    #[test]
    fn a_link_stays_and_the_file_behind_it_is_written_with_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        let (link, target) = (folder.path().join("link"), folder.path().join("file"));
        symlink("file", &link).unwrap();
        for content in [b"first", b"later"] {
            write(&link, |w| w.write_all(content)).unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(fs::read(&target).unwrap(), content);
            fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
        }
        write(&link, |w| w.write_all(b"last")).unwrap();
        assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o600);
        assert_eq!(names(folder.path()).len(), 2);
    }

    #[test]
    fn parts_come_in_any_order() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("y.bin");
        let file = ResultFile::create(&target).unwrap();
        file.write_at(b"there", 6).unwrap();
        file.write_at(b"hello ", 0).unwrap();
        assert!(!target.exists());
        file.commit().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"hello there");
    }

    #[test]
    fn a_target_that_cannot_be_a_file_is_refused_beforehand() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        for target in [folder.path(), Path::new("/dev/null"), Path::new(".."), &link] {
            assert!(matches!(check(target), Err(WriteError::NotAFile(_))), "{target:?}");
        }
        let missing = folder.path().join("no/such/folder/y.bin");
        assert!(matches!(check(&missing), Err(WriteError::Create { .. })));
        assert_eq!(names(folder.path()), ["link"]);
    }

    /// Names the target of a process that writes until it is ended.
    const TARGET: &str = "FLUX_TEST_WRITES";

    /// Run again as another process, it writes as where the file system has no unnamed files.
    #[test]
    fn a_signal_removes_a_file_that_has_a_name() {
        if let Some(target) = std::env::var_os(TARGET).map(PathBuf::from) {
            let new = NewFile::named(&target).unwrap();
            let file = ResultFile { _watch: Watch::over(&new).unwrap(), new, target };
            let error = write_to(file, |w| {
                w.write_all(&[1; 10_000])?;
                io::stdout().write_all(b"\nit writes\n")?;
                loop {
                    std::thread::park();
                }
            });
            panic!("{error:?}");
        }
        for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("y.bin");
            fs::write(&target, "old").unwrap();
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([
                "--exact",
                "atomic_file::tests::a_signal_removes_a_file_that_has_a_name",
                "--nocapture",
            ]);
            let mut writer = command.env(TARGET, &target).stdout(Stdio::piped()).spawn().unwrap();
            let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
            assert!(lines.map_while(Result::ok).any(|line| line == "it writes"));
            assert_eq!(names(folder.path()).len(), 2);
            rustix::process::kill_process(rustix::process::Pid::from_child(&writer), signal)
                .unwrap();
            assert_eq!(writer.wait().unwrap().signal(), Some(signal.as_raw()));
            assert_eq!(
                (names(folder.path()), fs::read(&target).unwrap()),
                (vec!["y.bin".to_owned()], b"old".to_vec())
            );
        }
    }
}
