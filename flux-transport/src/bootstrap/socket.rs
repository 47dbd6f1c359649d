//! Unix sockets with message borders, and waiting with a deadline.
//!
//! Invariant: only [`wait`] and [`send`] block, and both end at their deadline. Every descriptor is
//! close-on-exec.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use super::unblock;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most descriptors of one message; the kernel's own limit is 253.
pub(crate) const MAX_DESCRIPTORS: usize = 64;
/// Connections that the kernel keeps for [`accept`]; the kernel caps it at `net.core.somaxconn`.
const BACKLOG: i32 = 1024;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn new() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// A listening socket under a name that must be free.
pub(crate) fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = new()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects at once or not at all (`WOULDBLOCK`: the listener's queue is full).
pub(crate) fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = new()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The next connection; `WOULDBLOCK` where none waits.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::net::accept_with(listener, FLAGS)
}

pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Whether the descriptor is a socket of the kind that [`pair`] makes.
pub(crate) fn is_ours(socket: BorrowedFd<'_>) -> bool {
    matches!(rustix::net::sockopt::socket_type(socket), Ok(SocketType::SEQPACKET))
        && matches!(rustix::net::sockopt::socket_domain(socket), Ok(AddressFamily::UNIX))
}

/// Waits for an event or the deadline; returns how many descriptors are ready, 0 at the deadline.
/// `CANCELED` on the thread of cancelled work.
pub(crate) fn wait(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize, Errno> {
    loop {
        if unblock::cancelled() {
            return Err(Errno::CANCELED);
        }
        let look = unblock::cancellable().then(|| Instant::now() + unblock::LOOK);
        let until = [deadline, look].into_iter().flatten().min();
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match rustix::event::poll(fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            Ok(0) if until != deadline => {}
            ready => return ready,
        }
    }
}

/// Sends one message whole: `TIMEDOUT` where the other end took too little until the deadline.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    parts: &[&[u8]],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), Errno> {
    let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::TOOMANYREFS);
        }
        match rustix::net::sendmsg(
            socket,
            &slices,
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                if wait(&mut [PollFd::from_borrowed_fd(socket, PollFlags::OUT)], Some(deadline))?
                    == 0
                {
                    return Err(Errno::TIMEDOUT);
                }
            }
            Err(errno) => return Err(errno),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) length: usize,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Whether more came than this process may have open.
    pub(crate) cut: bool,
}

#[derive(Debug)]
pub(crate) enum Received {
    Message(Message),
    Nothing,
    /// The other end is closed and everything that it sent is read.
    End,
    /// A message longer than the buffer, or with too many descriptors, which are closed.
    Oversized,
}

pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Received, Errno> {
    let mut resets = 0;
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(message) => {
                // Drained first, so that every early return closes what came.
                let mut descriptors = Vec::new();
                for part in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = part {
                        descriptors.extend(rights);
                    }
                }
                // If `space` is full they were too many; else this process could not take them.
                let cut = message.flags.contains(ReturnFlags::CTRUNC);
                if message.flags.contains(ReturnFlags::TRUNC)
                    || cut && descriptors.len() >= MAX_DESCRIPTORS
                {
                    return Ok(Received::Oversized);
                }
                if message.bytes == 0 {
                    return Ok(Received::End);
                }
                return Ok(Received::Message(Message { length: message.bytes, descriptors, cut }));
            }
            Err(Errno::INTR) => {}
            // Linux reports once that the other end closed with our messages unread, then delivers
            // its last.
            Err(Errno::CONNRESET) if resets == 0 => resets += 1,
            Err(Errno::CONNRESET) => return Ok(Received::End),
            Err(Errno::WOULDBLOCK) => return Ok(Received::Nothing),
            Err(errno) => return Err(errno),
        }
    }
}

/// Watches a descriptor for something to read or its end.
pub(crate) fn readable<Fd: AsFd>(socket: &Fd) -> PollFd<'_> {
    PollFd::new(socket, PollFlags::IN)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::lateness::scaled;

    fn soon() -> Instant {
        Instant::now() + scaled(Duration::from_millis(50))
    }

    #[test]
    fn last_messages_survive_a_close_with_unread_ones() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &[b"never read"], &[], soon()).unwrap();
        send(b.as_fd(), &[b"good", b"bye"], &[], soon()).unwrap();
        drop(b);
        let mut buffer = [0; 16];
        let Ok(Received::Message(message)) = receive(a.as_fd(), &mut buffer) else {
            panic!("the last message is lost")
        };
        assert_eq!(&buffer[..message.length], b"goodbye");
        assert!(matches!(receive(a.as_fd(), &mut buffer), Ok(Received::End)));
    }

    #[test]
    fn too_long_a_message_is_told_from_a_whole_one() {
        let (a, b) = pair().unwrap();
        send(a.as_fd(), &[&[1; 17]], &[], soon()).unwrap();
        assert!(matches!(receive(b.as_fd(), &mut [0; 16]), Ok(Received::Oversized)));
        assert!(matches!(receive(b.as_fd(), &mut [0; 16]), Ok(Received::Nothing)));
    }

    #[test]
    fn a_full_socket_times_out() {
        let (a, _b) = pair().unwrap();
        let (deadline, block) = (soon(), vec![0; 65536]);
        let error = loop {
            if let Err(error) = send(a.as_fd(), &[&block], &[], deadline) {
                break error;
            }
        };
        assert_eq!(error, Errno::TIMEDOUT);
    }
}
