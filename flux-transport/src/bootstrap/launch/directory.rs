//! The private directory of one launch.
//!
//! Invariant: its launcher holds its lock (`flock`), which ends with the process in any PID
//! namespace. So a directory without a lock is a dead launcher's, and this user's next one removes
//! it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::LaunchError;
use crate::bootstrap::random::random;

const PREFIX: &str = "flux-launch-";

/// Removed with all that is in it.
pub(super) struct Directory {
    pub(super) path: PathBuf,
    _lock: OwnedFd,
}

impl Directory {
    pub(super) fn make(within: &Path) -> Result<Self, LaunchError> {
        sweep(within);
        let failed = |errno: Errno| LaunchError::Directory { within: within.to_owned(), source: errno.into() };
        loop {
            let number = u64::from_ne_bytes(random().map_err(failed)?);
            let path = within.join(format!("{PREFIX}{number:016x}"));
            rustix::fs::mkdir(&path, Mode::RWXU).map_err(failed)?;
            // Another launcher's sweep may find it before it has its lock.
            if let Some(lock) = locked(&path).map_err(failed)? {
                return Ok(Self { path, _lock: lock });
            }
        }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "left behind");
        }
    }
}

/// The directory with its lock; `None` where it is gone.
fn locked(path: &Path) -> Result<Option<OwnedFd>, Errno> {
    let directory = match open(path) {
        Err(Errno::NOENT) => return Ok(None),
        directory => directory?,
    };
    if let Err(errno) = rustix::io::retry_on_intr(|| rustix::fs::flock(&directory, FlockOperation::LockExclusive)) {
        // Then nobody else can lock it either, and it stays.
        tracing::debug!(path = %path.display(), %errno, "the file system locks no directories");
    }
    match rustix::fs::stat(path) {
        Ok(_) => Ok(Some(directory)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Removes what killed launchers of this user left.
fn sweep(within: &Path) {
    for entry in std::fs::read_dir(within).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if number.is_some_and(|number| number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            let path = entry.path();
            match remove_dead(&path) {
                Ok(true) => tracing::info!(path = %path.display(), "removed what a killed launcher left"),
                Ok(false) => {}
                Err(error) => tracing::debug!(path = %path.display(), %error, "cannot tell whether a launcher is dead"),
            }
        }
    }
}

/// Removes a directory whose launcher is dead; `false` where it lives, or is another user's.
fn remove_dead(path: &Path) -> io::Result<bool> {
    let directory = open(path)?;
    if rustix::fs::fstat(&directory)?.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(false);
    }
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => std::fs::remove_dir_all(path).map(|()| true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn open(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}
