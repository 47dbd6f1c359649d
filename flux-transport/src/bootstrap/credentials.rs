//! Users of the processes at the other ends of Unix sockets.
//!
//! Invariant: only the user counts. A peer in a PID namespace that this process does not see has
//! the process id 0, which `rustix`'s credentials cannot hold.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::process::Uid;

/// Whether the process at the other end ran as this process's user when it connected or listened.
pub(super) fn same_user(socket: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(user(&ask(socket)?) == Some(rustix::process::geteuid()))
}

/// `SO_PEERCRED`.
fn ask(socket: BorrowedFd<'_>) -> Result<libc::ucred, Errno> {
    let mut credentials = MaybeUninit::<libc::ucred>::uninit();
    let size = size_of::<libc::ucred>() as libc::socklen_t;
    let mut written = size;
    // SAFETY: the kernel writes at most `written` bytes, which is the size of `credentials`.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials.as_mut_ptr().cast(),
            &raw mut written,
        )
    };
    if code != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    if written != size {
        return Err(Errno::INVAL);
    }
    // SAFETY: the kernel has written all of it, and every bit pattern is a `ucred`.
    Ok(unsafe { credentials.assume_init() })
}

/// The user, whatever the process id; `None` of a socket that never had a peer.
fn user(credentials: &libc::ucred) -> Option<Uid> {
    // Uid -1 is nobody's: `Uid::from_raw` panics on it.
    (credentials.uid != u32::MAX).then(|| Uid::from_raw(credentials.uid))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::bootstrap::socket;

    #[test]
    fn the_user_of_a_process_in_another_pid_namespace_is_read() {
        for uid in [0, 1000, 65534, u32::MAX - 1] {
            assert_eq!(user(&libc::ucred { pid: 0, uid, gid: 0 }).map(Uid::as_raw), Some(uid));
        }
    }

    #[test]
    fn a_socket_without_a_peer_is_of_no_user() {
        let socket = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            None,
        )
        .unwrap();
        let credentials = ask(socket.as_fd()).unwrap();
        assert_eq!((credentials.pid, user(&credentials)), (0, None));
        assert_eq!(same_user(socket.as_fd()), Ok(false));
    }

    #[test]
    fn a_pair_has_this_user_at_both_ends_and_a_file_has_none() {
        let (a, b) = socket::pair().unwrap();
        for end in [&a, &b] {
            assert_eq!(same_user(end.as_fd()), Ok(true));
        }
        let file = tempfile::tempfile().unwrap();
        assert_eq!(same_user(file.as_fd()), Err(Errno::NOTSOCK));
    }
}
