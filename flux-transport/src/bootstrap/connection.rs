//! Message connections between two processes, over a Unix socket or TCP.
//!
//! Invariant: a message arrives whole or not at all; a sender that cannot finish one ends the
//! connection. Nothing beyond the current message is read, so a poll reports every message not yet
//! taken.

use crate::sync::locked;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::socket::{self, Message, Received};
use super::tcp;

/// What TCP puts before a message: its length.
const LENGTH_BYTES: usize = 4;
/// Read at once: room grows with what has come, never with what a length says.
const PIECE: usize = 16 * 1024;

#[derive(Debug)]
pub(super) enum Connection {
    /// To a process of this host: descriptors can be passed.
    Unix(OwnedFd),
    Tcp(FrameStream),
}

/// A TCP connection that keeps messages apart.
#[derive(Debug)]
pub(super) struct FrameStream {
    socket: OwnedFd,
    /// Held for the whole of a message, as several threads send. True after a message was cut.
    torn: Mutex<bool>,
    coming: Mutex<Coming>,
}

/// A message of which a part has come.
#[derive(Debug, Default)]
struct Coming {
    length: [u8; LENGTH_BYTES],
    known: usize,
    body: Vec<u8>,
}

impl Connection {
    pub(super) fn tcp(socket: OwnedFd) -> Self {
        Self::Tcp(FrameStream { socket, torn: Mutex::default(), coming: Mutex::default() })
    }

    /// Sends one message. `TIMEDOUT`: the peer read too little by the deadline; `OPNOTSUPP`:
    /// descriptors for another host.
    pub(super) fn send(
        &self,
        parts: &[&[u8]],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<(), Errno> {
        match self {
            Self::Unix(socket) => socket::send(socket.as_fd(), parts, fds, deadline),
            Self::Tcp(_) if !fds.is_empty() => Err(Errno::OPNOTSUPP),
            Self::Tcp(stream) => stream.send(parts, deadline),
        }
    }

    pub(super) fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        match self {
            Self::Unix(socket) => socket::receive(socket.as_fd(), buffer),
            Self::Tcp(stream) => stream.receive(buffer),
        }
    }

    pub(super) fn await_message(
        &self,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<Received, Errno> {
        loop {
            match self.receive(buffer)? {
                Received::Nothing => {}
                received => return Ok(received),
            }
            if socket::wait(&mut [socket::readable(self)], Some(deadline))? == 0 {
                return Ok(Received::Nothing);
            }
        }
    }

    /// Ends the connection in both directions; the descriptor stays.
    pub(super) fn cut(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(stream) => stream.socket.as_fd(),
        }
    }
}

impl FrameStream {
    fn send(&self, parts: &[&[u8]], deadline: Instant) -> Result<(), Errno> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let length = u32::try_from(length).map_err(|_| Errno::MSGSIZE)?;
        let message = [&[&length.to_le_bytes()[..]], parts].concat().concat();
        let mut torn = self.turn(deadline)?;
        if *torn {
            return Err(Errno::PIPE);
        }
        let mut rest = &message[..];
        self.send_bytes(&mut rest, deadline).inspect_err(|_| {
            if rest.len() < message.len() {
                // The other end could not tell the rest of this message from the next.
                *torn = true;
                let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
            }
        })
    }

    /// Sends all of the bytes, or fails with those that are left.
    fn send_bytes(&self, rest: &mut &[u8], deadline: Instant) -> Result<(), Errno> {
        while !rest.is_empty() {
            match rustix::net::send(&self.socket, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => *rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => {
                    if socket::wait(
                        &mut [PollFd::new(&self.socket, PollFlags::OUT)],
                        Some(deadline),
                    )? == 0
                    {
                        return Err(Errno::TIMEDOUT);
                    }
                }
                Err(errno) if tcp::is_end(errno) => return Err(Errno::PIPE),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Waits until no other thread is in the middle of a message.
    fn turn(&self, deadline: Instant) -> Result<MutexGuard<'_, bool>, Errno> {
        loop {
            match self.torn.try_lock() {
                Ok(torn) => return Ok(torn),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => return Err(Errno::TIMEDOUT),
            }
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let mut coming = locked(&self.coming);
        let Coming { length, known, body } = &mut *coming;
        loop {
            let mut piece = [0; PIECE];
            let room = if *known < LENGTH_BYTES {
                &mut length[*known..]
            } else {
                let wanted = u32::from_le_bytes(*length) as usize;
                // A message of no bytes would look like an end; nobody sends one.
                if wanted == 0 || wanted > buffer.len() {
                    return Ok(Received::Oversized);
                }
                if body.len() == wanted {
                    buffer[..wanted].copy_from_slice(body);
                    *coming = Coming::default();
                    return Ok(Received::Message(Message {
                        length: wanted,
                        descriptors: Vec::new(),
                        cut: false,
                    }));
                }
                &mut piece[..(wanted - body.len()).min(PIECE)]
            };
            match rustix::net::recv(&self.socket, &mut *room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Ok(Received::End),
                Ok((count, _)) if *known < LENGTH_BYTES => *known += count,
                Ok((count, _)) => body.extend_from_slice(&piece[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Ok(Received::Nothing),
                Err(errno) if tcp::is_end(errno) => return Ok(Received::End),
                Err(errno) => return Err(errno),
            }
        }
    }
}

#[cfg(test)]
mod tests;
