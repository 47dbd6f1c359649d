//! The rendezvous directory and the socket's name in it.
//!
//! Invariant: only this user may enter the directory (checked again by `SO_PEERCRED`). The name is
//! removed before the socket closes. The next leader removes what a killed one has left.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::bootstrap::environment::{HostPlace, variable_of};
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::socket;
use crate::bootstrap::unblock::pause_for;

/// Most bytes of a socket's path: `sun_path` has 108 with the final zero.
const PATH_LIMIT: usize = 107;
const SOCKET_NAME: &str = "rank0.sock";

pub(crate) fn socket_path(place: &HostPlace) -> Result<PathBuf, BootstrapError> {
    let path = place.directory.join(SOCKET_NAME);
    let length = path.as_os_str().len();
    if length <= PATH_LIMIT {
        return Ok(path);
    }
    let variable = variable_of(&place.directory, &|name| std::env::var_os(name));
    Err(BootstrapError::PathTooLong { path, variable, length, limit: PATH_LIMIT })
}

/// Opens the directory and proves it private; `None` where it is not there (yet).
pub(crate) fn open_private(path: &Path) -> Result<Option<OwnedFd>, BootstrapError> {
    let problem = |problem: String| BootstrapError::Directory { path: path.to_owned(), problem };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(problem("is not a directory".to_owned())),
        Err(errno) => return Err(problem(format!("cannot be opened: {errno}"))),
    };
    let stat = rustix::fs::fstat(&directory)
        .map_err(BootstrapError::io("looking at the rendezvous directory"))?;
    let (uid, mode) = (rustix::process::geteuid().as_raw(), stat.st_mode & 0o7777);
    if stat.st_uid != uid {
        return Err(problem(format!(
            "belongs to user {}, this process runs as {uid}",
            stat.st_uid
        )));
    }
    if mode & 0o077 != 0 {
        return Err(problem(format!("has mode {mode:04o}: others may enter it, use 0700")));
    }
    Ok(Some(directory))
}

/// The leader's listening socket under its name.
pub(crate) struct NamedSocket {
    socket: OwnedFd,
    path: PathBuf,
    /// To be removed with the socket.
    directory: Option<PathBuf>,
}

impl NamedSocket {
    /// Takes the name; `None` where another live process has it.
    pub(crate) fn bind(
        place: &HostPlace,
        deadline: Instant,
    ) -> Result<Option<Self>, BootstrapError> {
        let path = socket_path(place)?;
        let step = "taking the rendezvous socket's name";
        let not_there = || BootstrapError::Directory {
            path: place.directory.clone(),
            problem: "does not exist; its launcher makes it".to_owned(),
        };
        if place.made_by_leader {
            sweep(&place.directory);
        }
        loop {
            if place.made_by_leader {
                match rustix::fs::mkdir(&place.directory, Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => {
                        let problem = format!("cannot be made: {errno}");
                        return Err(BootstrapError::Directory {
                            path: place.directory.clone(),
                            problem,
                        });
                    }
                }
            }
            let Some(directory) = open_private(&place.directory)? else {
                // The leader of an earlier launch of the same name removed it just now.
                if place.made_by_leader && Instant::now() < deadline {
                    continue;
                }
                return Err(not_there());
            };
            // A stale name is removed under a lock: another process may have replaced it.
            if !lock(&directory, deadline).map_err(BootstrapError::io(step))? {
                return Err(BootstrapError::io(step)(Errno::TIMEDOUT));
            }
            match socket::listen(&path) {
                Ok(socket) => {
                    let directory = place.made_by_leader.then(|| place.directory.clone());
                    return Ok(Some(Self { socket, path, directory }));
                }
                Err(Errno::ADDRINUSE) => {
                    if !remove_stale(&path).map_err(BootstrapError::io(step))? {
                        return Ok(None);
                    }
                }
                Err(Errno::NOENT) if place.made_by_leader && Instant::now() < deadline => {}
                Err(errno) => return Err(BootstrapError::io(step)(errno)),
            }
        }
    }
}

impl AsFd for NamedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for NamedSocket {
    fn drop(&mut self) {
        report(&self.path, std::fs::remove_file(&self.path));
        if let Some(directory) = &self.directory {
            report(directory, std::fs::remove_dir(directory));
        }
    }
}

/// Removes what killed leaders of this user left beside `own`. Names are often random, so no later
/// launch reuses them.
fn sweep(own: &Path) {
    let beside = own
        .parent()
        .and_then(|parent| std::fs::read_dir(parent).ok())
        .into_iter()
        .flatten()
        .flatten();
    for left in beside
        .filter(|entry| entry.file_name().to_str().is_some_and(HostPlace::is_name))
        .map(|entry| entry.path())
    {
        if left != own
            && let Ok(Some(directory)) = open_private(&left)
            && lock(&directory, Instant::now()) == Ok(true)
            && remove_stale(&left.join(SOCKET_NAME)) == Ok(true)
        {
            let _ = std::fs::remove_dir(&left);
        }
    }
}

fn report(path: &Path, removed: io::Result<()>) {
    if let Err(error) = removed
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "left behind");
    }
}

/// Takes the directory's advisory lock, which ends with the descriptor; `false` at the deadline.
fn lock(directory: &OwnedFd, deadline: Instant) -> Result<bool, Errno> {
    loop {
        match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                pause_for(Duration::from_millis(2))?;
            }
            Err(Errno::WOULDBLOCK) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Removes a socket that nobody listens on; `false` where somebody does.
fn remove_stale(path: &Path) -> Result<bool, Errno> {
    match rustix::fs::lstat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            return Err(Errno::NOTSOCK);
        }
        Ok(_) => {}
        Err(Errno::NOENT) => return Ok(true),
        Err(errno) => return Err(errno),
    }
    match socket::connect(path) {
        Err(Errno::CONNREFUSED) => match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => Ok(true),
            Err(errno) => Err(errno),
        },
        Err(Errno::NOENT) => Ok(true),
        // Connected, or its queue is full: it lives.
        Ok(_) | Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;

    #[test]
    fn what_a_killed_leader_left_goes_with_the_next_and_what_is_in_use_stays() {
        let parent = tempfile::tempdir().unwrap();
        let place = |nonce| HostPlace::below(parent.path(), nonce);
        let soon = || Instant::now() + AMPLE;
        let make = |path: &Path| rustix::fs::mkdir(path, Mode::RWXU).unwrap();
        // One with a name that nobody listens at, one killed before it had that, one of something
        // else.
        let (killed, earlier, other) =
            (place(1).directory, place(2).directory, parent.path().join("flux-other"));
        for path in [&killed, &earlier, &other] {
            make(path);
        }
        drop(socket::listen(&killed.join(SOCKET_NAME)).unwrap());
        let live = NamedSocket::bind(&place(3), soon()).unwrap().unwrap();
        let next = NamedSocket::bind(&place(4), soon()).unwrap().unwrap();
        assert!([killed, earlier].iter().all(|path| !path.exists()) && other.exists());
        assert!([&live, &next].iter().all(|listener| socket::connect(&listener.path).is_ok()));
        drop((live, next));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);
    }
}
