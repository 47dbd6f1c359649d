//! The private directory of one launch.
//!
//! Invariant: its launcher holds the lock (`flock`) of a file in it, and the lock ends with the
//! process, in any PID namespace. A directory whose file has no lock is a dead launcher's, and this
//! user's next launcher removes it. Ranks lock the directory itself, for another purpose.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::error::LaunchError;
use crate::bootstrap::random::random;

const PREFIX: &str = "flux-launch-";
/// The file that a launcher locks.
const LOCK: &str = "launcher";
/// A younger directory's launcher may not have its lock yet.
const SETTLED: Duration = Duration::from_mins(1);

/// Removed with all that is in it.
pub(super) struct Directory {
    pub(super) path: PathBuf,
    _lock: OwnedFd,
}

impl Directory {
    pub(super) fn make(within: &Path) -> Result<Self, LaunchError> {
        sweep(within);
        let failed = |errno: Errno| LaunchError::Directory {
            within: within.to_owned(),
            source: errno.into(),
        };
        let number = u64::from_ne_bytes(random().map_err(failed)?);
        let path = within.join(format!("{PREFIX}{number:016x}"));
        rustix::fs::mkdir(&path, Mode::RWXU).map_err(failed)?;
        let lock = locked(&path).map_err(failed)?;
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "left behind");
        }
    }
}

/// The locked file of a new directory.
fn locked(directory: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(directory.join(LOCK), flags, Mode::RUSR | Mode::WUSR)?;
    if let Err(errno) = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // Then nobody else can lock it either, and the directory stays.
        tracing::debug!(path = %directory.display(), %errno, "the file system has no locks");
    }
    Ok(file)
}

/// Removes what killed launchers of this user left.
fn sweep(within: &Path) {
    for entry in std::fs::read_dir(within).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if number.is_some_and(|number| {
            number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit())
        }) {
            let path = entry.path();
            match remove_dead(&path) {
                Ok(true) => {
                    tracing::info!(path = %path.display(), "removed what a killed launcher left");
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!(
                        path = %path.display(),
                        %error,
                        "cannot tell whether a launcher is dead",
                    );
                }
            }
        }
    }
}

/// Removes a directory whose launcher is dead. `false` where it lives, may be about to take its
/// lock, or is another user's.
fn remove_dead(path: &Path) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&directory)?;
    let changed =
        SystemTime::UNIX_EPOCH + Duration::from_secs(stat.st_mtime.try_into().unwrap_or(0));
    let settled = SystemTime::now().duration_since(changed).is_ok_and(|age| age >= SETTLED);
    if stat.st_uid != rustix::process::geteuid().as_raw() || !settled {
        return Ok(false);
    }
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let _lock = match rustix::fs::openat(&directory, LOCK, flags, Mode::empty()) {
        // Killed before it made the file.
        Err(Errno::NOENT) => None,
        file => {
            let file = file?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => Some(file),
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            }
        }
    };
    std::fs::remove_dir_all(path).map(|()| true)
}
