//! A file that is being written.

use crate::leftovers;
use crate::target::{folder, take_after};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// What a new file may have; the umask takes from it.
const NEW: u32 = 0o666;
/// Until it has the mode of the file that it replaces.
const PRIVATE: u32 = 0o600;

/// A file that gets its name when it is whole. Dropped before, it is gone.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    target: PathBuf,
    /// A name of its own, to be removed.
    name: Option<PathBuf>,
}

impl NewFile {
    /// An empty file in the folder of `target`. It has the mode and owner of a file that is there,
    /// and else the umask's. A link at `target` is replaced; see
    /// [`behind_links`](crate::behind_links).
    ///
    /// # Errors
    /// The system's: a file cannot be created in the folder.
    pub fn create(target: &Path) -> io::Result<Self> {
        let old = fs::symlink_metadata(target).ok().filter(Metadata::is_file);
        let mode = if old.is_some() { PRIVATE } else { NEW };
        leftovers::sweep(folder(target));
        let new = Self::unnamed(target, mode).or_else(|_| Self::under_a_name(target, mode))?;
        if let Some(old) = &old {
            take_after(&new.file, old)?;
        }
        Ok(new)
    }

    /// A new file under a name of its own, as [`create`](Self::create) makes it where the file
    /// system has no other. For tests.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn named(target: &Path) -> io::Result<Self> {
        Self::under_a_name(target, NEW)
    }

    /// What is to be written to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A name of its own, where the file system has no file without: a killed process leaves it for
    /// the next writer to remove.
    pub fn name(&self) -> Option<&Path> {
        self.name.as_deref()
    }

    /// Puts the file under its name, in place of one that is there, once its content is on the
    /// medium.
    ///
    /// # Errors
    /// The system's; what was there stays.
    pub fn commit(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        let whole = match self.name.take() {
            Some(name) => Some(name),
            None => self.link()?,
        };
        if let Some(whole) = whole {
            let renamed = fs::rename(&whole, &self.target);
            self.name = renamed.is_err().then_some(whole);
            renamed?;
        }
        // The name itself reaches the medium with the folder.
        File::open(folder(&self.target))?.sync_all()
    }

    /// A file without a name, which ends with this process.
    fn unnamed(target: &Path, mode: u32) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(folder(target), flags, Mode::from_raw_mode(mode))?);
        // What links it later; a container may have no `/proc`.
        fs::symlink_metadata(descriptor(&file))?;
        leftovers::lock(&file)?;
        Ok(Self { file, target: target.to_owned(), name: None })
    }

    fn under_a_name(target: &Path, mode: u32) -> io::Result<Self> {
        loop {
            let name = leftovers::name(folder(target))?;
            match File::options().read(true).write(true).create_new(true).mode(mode).open(&name) {
                Ok(file) => {
                    let new = Self { file, target: target.to_owned(), name: Some(name) };
                    if leftovers::lock(&new.file)? {
                        return Ok(new);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives an unnamed file the target's name, or returns another one where that is taken.
    fn link(&self) -> io::Result<Option<PathBuf>> {
        let link = |name: &Path| {
            rustix::fs::linkat(CWD, descriptor(&self.file), CWD, name, AtFlags::SYMLINK_FOLLOW)
        };
        if fs::symlink_metadata(&self.target).is_err() {
            match link(&self.target) {
                Ok(()) => return Ok(None),
                Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        // No call replaces a name by an unnamed file.
        let name = leftovers::name(folder(&self.target))?;
        link(&name)?;
        Ok(Some(name))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name
            && let Err(error) = fs::remove_file(name)
        {
            tracing::warn!(path = %name.display(), %error, "left behind");
        }
    }
}

fn descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests;
