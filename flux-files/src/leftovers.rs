//! Names of files that are not whole yet.
//!
//! Invariant: who writes such a file holds its lock (`flock`), which ends with the process. So a
//! file without a lock is a dead writer's, and its name is removed by whoever finds it.

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PREFIX: &str = ".flux-";
const SUFFIX: &str = ".partial";

/// A name in `folder` that nothing has, short whatever the target's name is.
pub(crate) fn name(folder: &Path) -> io::Result<PathBuf> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(folder.join(format!("{PREFIX}{:016x}{SUFFIX}", u64::from_ne_bytes(bytes))))
}

/// Takes the lock; `false` where a sweep found the file first and removed its name.
pub(crate) fn lock(file: &File) -> io::Result<bool> {
    rustix::io::retry_on_intr(|| rustix::fs::flock(file, FlockOperation::LockExclusive))?;
    Ok(file.metadata()?.nlink() > 0)
}

/// Removes what this user's dead writers left in `folder`.
pub(crate) fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        if number.is_some_and(|number| {
            number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit())
        }) {
            let path = entry.path();
            match remove_dead(&path) {
                Ok(true) => {
                    tracing::info!(path = %path.display(), "removed what a killed writer left");
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!(
                        path = %path.display(),
                        %error,
                        "cannot tell whether a writer is dead",
                    );
                }
            }
        }
    }
}

/// Removes a name whose file nobody writes; `false` where somebody does, or it is not this user's.
fn remove_dead(path: &Path) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Ok(false);
    }
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        // A live writer renamed it away, if it is gone now: no other file ever has its name.
        Ok(()) => match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(true),
        },
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_writers_file_goes_and_everything_else_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (dead, live) = (name(dir.path()).unwrap(), name(dir.path()).unwrap());
        let locked = File::create(&live).unwrap();
        assert!(lock(&locked).unwrap());
        let others = [
            ".flux-0123.partial",
            ".flux-0123456789abcdeg.partial",
            "flux-0123456789abcdef.partial",
            ".y.st.partial",
        ];
        for name in others {
            File::create(dir.path().join(name)).unwrap();
        }
        File::create(&dead).unwrap();
        std::os::unix::fs::symlink("elsewhere", dir.path().join(".flux-0123456789abcdef.partial"))
            .unwrap();
        sweep(dir.path());
        assert!(!dead.exists() && live.exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), others.len() + 2);
        drop(locked);
        // A process that another test starts has a copy of the descriptor until it runs its
        // program.
        while live.exists() {
            sweep(dir.path());
        }
    }

    #[test]
    fn a_writer_whose_name_was_swept_before_its_lock_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = name(dir.path()).unwrap();
        let file = File::create(&path).unwrap();
        sweep(dir.path());
        assert!(!lock(&file).unwrap());
    }
}
