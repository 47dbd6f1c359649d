//! A listening socket, and connections that have not identified themselves.
//!
//! Invariant: such a stranger takes one of [`STRANGERS`] slots for at most [`PATIENCE`] and delays
//! nobody else. Over a Unix socket it must be of this user, over TCP it must prove that it holds
//! the secret.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFd;
use rustix::io::Errno;

use super::auth::{self, Challenge, MAX_RESPONSE, Response};
use crate::bootstrap::connection::Connection;
use crate::bootstrap::credentials::same_user;
use crate::bootstrap::deadlines::ANSWER;
use crate::bootstrap::secret::Secret;
use crate::bootstrap::socket::{self, Received};
use crate::bootstrap::tcp;

/// Connections that have not said who they are, at a time; one more, and the oldest goes.
const STRANGERS: usize = 64;
/// How long such a connection may take to say it, however it spreads its bytes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// A listening socket and those before it.
#[derive(Debug)]
pub(crate) struct Listener<L> {
    socket: L,
    key: Option<LaunchKey>,
    /// Who has to go first, first.
    strangers: VecDeque<Stranger>,
    denied: u32,
}

/// What opens a listener to other hosts.
#[derive(Clone, Debug)]
pub(crate) struct LaunchKey {
    pub(crate) secret: Secret,
    pub(crate) launch: u128,
}

#[derive(Debug)]
struct Stranger {
    link: Connection,
    /// What it has to answer, over TCP.
    challenge: Option<Challenge>,
    until: Instant,
}

/// Who may be one of ours, and what it said.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) link: Connection,
    pub(crate) said: Vec<u8>,
}

impl<L: AsFd> Listener<L> {
    pub(crate) fn unix(socket: L) -> Self {
        Self { socket, key: None, strangers: VecDeque::new(), denied: 0 }
    }

    pub(crate) fn tcp(socket: L, key: LaunchKey) -> Self {
        Self { socket, key: Some(key), strangers: VecDeque::new(), denied: 0 }
    }

    /// Connections with a wrong proof so far.
    pub(crate) const fn denied(&self) -> u32 {
        self.denied
    }

    /// When the next stranger has to go; those that have to now are gone.
    pub(crate) fn expire(&mut self) -> Option<Instant> {
        let now = Instant::now();
        while self.strangers.front().is_some_and(|stranger| stranger.until <= now) {
            self.strangers.pop_front();
        }
        self.strangers.front().map(|stranger| stranger.until)
    }

    /// What to wait for before [`admit`](Self::admit).
    pub(crate) fn watched(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.strangers
            .iter()
            .map(|stranger| socket::readable(&stranger.link))
            .chain([socket::readable(&self.socket)])
    }

    /// Accepts and identifies callers. `ready`: which of [`watched`](Self::watched) are readable.
    ///
    /// # Errors
    /// The listener's.
    pub(crate) fn admit(
        &mut self,
        ready: &mut impl Iterator<Item = bool>,
    ) -> Result<Vec<Caller>, Errno> {
        let mut callers = Vec::new();
        // Those who spoke first, so that strangers that push in below cost them nothing.
        let (spoke, silent) =
            self.strangers.drain(..).partition::<VecDeque<_>, _>(|_| ready.next() == Some(true));
        self.strangers = silent;
        for stranger in spoke {
            self.hear(stranger, &mut callers);
        }
        if ready.next() == Some(true) {
            self.open(&mut callers)?;
        }
        Ok(callers)
    }

    fn open(&mut self, callers: &mut Vec<Caller>) -> Result<(), Errno> {
        for _ in 0..STRANGERS {
            match self.accept() {
                Ok(Some(stranger)) => self.hear(stranger, callers),
                Ok(None) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::WOULDBLOCK) => return Ok(()),
                // Out of descriptors: drop strangers first; without any, the ranks themselves are
                // too many.
                Err(Errno::MFILE | Errno::NFILE) if self.strangers.pop_front().is_some() => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// The next who waits outside; `None` for who has no business here.
    fn accept(&self) -> Result<Option<Stranger>, Errno> {
        let until = Instant::now() + PATIENCE;
        let Some(key) = &self.key else {
            let socket = socket::accept(self.socket.as_fd())?;
            if !matches!(same_user(socket.as_fd()), Ok(true)) {
                tracing::warn!("refused a process of another user at the rendezvous");
                return Ok(None);
            }
            return Ok(Some(Stranger { link: Connection::Unix(socket), challenge: None, until }));
        };
        let (socket, from): (OwnedFd, IpAddr) = tcp::accept(self.socket.as_fd())?;
        let (link, challenge) = (Connection::tcp(socket), Challenge::new(key.launch)?);
        // A fresh connection takes this much at once, or is gone.
        if let Err(error) = link.send(&[challenge.bytes()], &[], Instant::now()) {
            tracing::debug!(%from, %error, "a connection ended before it was asked anything");
            return Ok(None);
        }
        Ok(Some(Stranger { link, challenge: Some(challenge), until }))
    }

    /// Reads what a stranger has said, if it has.
    fn hear(&mut self, stranger: Stranger, callers: &mut Vec<Caller>) {
        let mut buffer = [0; MAX_RESPONSE];
        let message = match stranger.link.receive(&mut buffer) {
            Ok(Received::Message(message)) => message,
            Ok(Received::Nothing) => {
                if self.strangers.len() >= STRANGERS {
                    self.strangers.pop_front();
                }
                // Who said a part of it gets no more time for that.
                let at = self.strangers.partition_point(|other| other.until <= stranger.until);
                self.strangers.insert(at, stranger);
                return;
            }
            Ok(Received::Oversized) => {
                tracing::warn!("dropped a connection to the rendezvous that said too much");
                return;
            }
            Ok(Received::End) | Err(_) => return,
        };
        if !message.descriptors.is_empty() {
            tracing::warn!("dropped a connection to the rendezvous that sent descriptors");
            return;
        }
        let Stranger { link, challenge, .. } = stranger;
        let said = match (&self.key, challenge) {
            (Some(key), Some(challenge)) => {
                proven(key, &link, &challenge, &buffer[..message.length])
            }
            _ => Some(buffer[..message.length].to_vec()),
        };
        match said {
            Some(said) => callers.push(Caller { link, said }),
            None => self.denied += 1,
        }
    }
}

/// What a caller says, if it proves that it holds the secret; then it has the proof of this end.
fn proven(
    key: &LaunchKey,
    link: &Connection,
    challenge: &Challenge,
    bytes: &[u8],
) -> Option<Vec<u8>> {
    let Some((body, proof)) =
        Response::decode(bytes).and_then(|answer| answer.check(&key.secret, challenge))
    else {
        tracing::warn!("dropped a connection to the rendezvous that does not know the secret");
        auth::deny(link, Instant::now());
        return None;
    };
    // Who does not take it will not be heard either: its connection says so later.
    let _ = link.send(&[&proof], &[], Instant::now() + ANSWER);
    Some(body.to_vec())
}
