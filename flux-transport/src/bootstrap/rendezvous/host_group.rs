//! Ranks that share a host find each other at a Unix socket in a private directory.
//!
//! Invariant: a waiting rank holds at most one connection. The first rank of the group leads: it
//! has the socket's name, and a second one visits it like any other.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::directory::{NamedSocket, open_private, socket_path};
use super::gather::{self, Member, RankGroup};
use super::hello::Hello;
use super::listener::Listener;
use super::roster::MAX_PAYLOAD;
use super::verdict::{Leader, await_verdict};
use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::mask_of;
use crate::bootstrap::credentials::same_user;
use crate::bootstrap::deadlines::WAITING_FOR_RANKS;
use crate::bootstrap::environment::HostPlace;
use crate::bootstrap::error::{BootstrapError, ranks_in};
use crate::bootstrap::socket;
use crate::bootstrap::unblock::pause_for;

const FIRST_RANK: Leader = Leader {
    name: "the first rank of this host",
    listening: "listening to the first rank of this host",
};

/// One rank of a group that shares a host.
#[derive(Clone, Debug)]
pub(crate) struct HostGroup {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    /// The ranks of this host, in order.
    pub(crate) group: Vec<Rank>,
    pub(crate) place: HostPlace,
}

impl HostGroup {
    /// At the leader, the others once they have come; `None` at a rank that
    /// [visits](Self::visit) it.
    pub(crate) fn gather(&self, deadline: Instant) -> Result<Option<Vec<Member>>, BootstrapError> {
        if self.rank != self.leader() {
            return Ok(None);
        }
        if self.group.len() == 1 {
            return Ok(Some(Vec::new()));
        }
        // A second leader knocks like any other, so that the first tells everybody.
        let Some(listener) = NamedSocket::bind(&self.place, deadline)? else { return Ok(None) };
        let (own, world, ranks) = (self.hello(), self.world, self.group.clone());
        let group = RankGroup { own, world, ranks, most: MAX_PAYLOAD };
        gather::gather(group, Listener::unix(listener), deadline).map(Some)
    }

    pub(crate) fn leader(&self) -> Rank {
        self.group[0]
    }

    fn hello(&self) -> Hello {
        Hello::of(self.rank, self.world, self.place.nonce)
    }

    /// Finds the leader, gives it `payload` and waits for its verdict, of which `taken` makes what
    /// this rank wants; `None` for what it does not expect.
    pub(crate) fn visit<T>(
        &self,
        payload: &[u8],
        deadline: Instant,
        taken: impl Fn(&[u8], &mut Vec<OwnedFd>) -> Option<T>,
    ) -> Result<T, BootstrapError> {
        let path = socket_path(&self.place)?;
        let mut missing = mask_of([self.leader()]);
        let mut met = false;
        let mut pause = Duration::from_millis(1);
        loop {
            if open_private(&self.place.directory)?.is_some() {
                match socket::connect(&path) {
                    Ok(socket) => {
                        met = true;
                        let heard =
                            self.listen_to_leader(socket, payload, deadline, &mut missing, &taken)?;
                        if let Some(verdict) = heard {
                            return Ok(verdict);
                        }
                    }
                    // No name yet, a stale one, a full queue, or the end of what was there.
                    Err(
                        Errno::NOENT
                        | Errno::CONNREFUSED
                        | Errno::WOULDBLOCK
                        | Errno::CONNRESET
                        | Errno::PIPE,
                    ) => {}
                    Err(errno) => {
                        return Err(BootstrapError::io(
                            "connecting to the first rank of this host",
                        )(errno));
                    }
                }
            } else if !self.place.made_by_leader {
                let problem = "does not exist; its launcher makes it".to_owned();
                return Err(BootstrapError::Directory {
                    path: self.place.directory.clone(),
                    problem,
                });
            }
            if Instant::now() >= deadline {
                let sought = (!met).then(|| {
                    format!(
                        "rank {} was looked for in {}",
                        self.leader(),
                        self.place.directory.display()
                    )
                });
                return Err(BootstrapError::Timeout {
                    step: WAITING_FOR_RANKS,
                    missing: ranks_in(missing, self.world),
                    denied: 0,
                    sought,
                });
            }
            pause_for(pause).map_err(BootstrapError::io(WAITING_FOR_RANKS))?;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Says hello and waits for the verdict; `None` if the connection ended without one.
    fn listen_to_leader<T>(
        &self,
        socket: OwnedFd,
        payload: &[u8],
        deadline: Instant,
        missing: &mut u32,
        taken: impl Fn(&[u8], &mut Vec<OwnedFd>) -> Option<T>,
    ) -> Result<Option<T>, BootstrapError> {
        if !same_user(socket.as_fd()).map_err(BootstrapError::io("asking for the leader's user"))? {
            return Err(BootstrapError::Protocol(format!(
                "the process that listens in rank {}'s place runs as another user",
                self.leader()
            )));
        }
        let link = Connection::Unix(socket);
        match link.send(&[&self.hello().encode(), payload], &[], deadline) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT) => return Ok(None),
            Err(errno) => {
                return Err(BootstrapError::io("saying hello to the first rank of this host")(
                    errno,
                ));
            }
        }
        await_verdict((&link, &FIRST_RANK), (self.rank, self.world), deadline, missing, taken)
    }
}
