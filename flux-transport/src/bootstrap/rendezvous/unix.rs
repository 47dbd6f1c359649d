//! The ranks of one host meet at a Unix socket in a private directory.
//!
//! Invariant: a waiting rank holds at most one connection. The leader, the first rank, makes a
//! socket pair for every two ranks, which needs no proof of identity.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::io::Errno;

use super::directory::{NamedSocket, open_private, socket_path};
use super::gather::{self, Member, RankGroup};
use super::hello::{GIVING_UP, Hello, REPLY_BYTES, Reply};
use super::listener::Listener;
use crate::bootstrap::credentials::same_user;
use crate::bootstrap::deadlines::{ANSWER, WAITING_FOR_RANKS};
use crate::bootstrap::environment::HostPlace;
use crate::bootstrap::error::{BootstrapError, ranks_in};
use crate::bootstrap::link::Link;
use crate::bootstrap::mesh::{Mesh, socket_rows};
use crate::bootstrap::socket::{self, Received};

/// One rank of a group that shares a host.
#[derive(Clone, Debug)]
pub(crate) struct UnixRendezvous {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    /// The ranks of this host, in order.
    pub(crate) group: Vec<Rank>,
    pub(crate) place: HostPlace,
}

impl UnixRendezvous {
    pub(crate) fn new(rank: Rank, world: WorldSize, place: HostPlace) -> Self {
        Self { rank, world, group: world.ranks().collect(), place }
    }

    /// The sockets to the other ranks of the group, in their order.
    pub(crate) fn sockets(&self, deadline: Instant) -> Result<Vec<OwnedFd>, BootstrapError> {
        if self.group.len() == 1 {
            return Ok(Vec::new());
        }
        if self.rank == self.leader()
            && let Some(listener) = NamedSocket::bind(&self.place, deadline)?
        {
            let group = RankGroup {
                own: self.hello(),
                world: self.world,
                ranks: self.group.clone(),
                more: 0,
            };
            return self.deal(&gather::gather(group, Listener::unix(listener), deadline)?);
        }
        // A second leader knocks like any other, so that the first tells everybody.
        self.visit(deadline)
    }

    /// Connections to all ranks of a world on one host.
    pub(crate) fn meet(&self, deadline: Instant) -> Result<Mesh, BootstrapError> {
        Ok(Mesh::new(self.rank, self.world, self.sockets(deadline)?))
    }

    fn leader(&self) -> Rank {
        self.group[0]
    }

    fn hello(&self) -> Hello {
        Hello::of(self.rank, self.world, self.place.nonce)
    }

    /// Connects every two ranks and gives each its sockets. A rank that dies now is found later.
    fn deal(&self, members: &[Member]) -> Result<Vec<OwnedFd>, BootstrapError> {
        let mut rows = match socket_rows(self.group.len()) {
            Ok(rows) => rows,
            Err(errno) => {
                gather::dismiss(self.leader(), members, errno);
                return Err(BootstrapError::io("making the sockets between the ranks")(errno));
            }
        };
        let reply = Reply::Welcome { sockets: self.group.len() as u32 - 1 }.encode();
        for (member, row) in members.iter().zip(&rows[1..]) {
            let row: Vec<_> = row.iter().map(AsFd::as_fd).collect();
            if let Err(error) = member.link.send(&[&reply], &row, Instant::now() + ANSWER) {
                tracing::debug!(%error, "a rank left while the group formed");
            }
        }
        // The other rows close here: their ranks alone hold them from now on.
        Ok(rows.swap_remove(0))
    }

    /// Finds the leader and waits for its verdict.
    fn visit(&self, deadline: Instant) -> Result<Vec<OwnedFd>, BootstrapError> {
        let path = socket_path(&self.place)?;
        let mut missing = gather::mask(&[self.leader()]);
        let mut met = false;
        let mut pause = Duration::from_millis(1);
        loop {
            if open_private(&self.place.directory)?.is_some() {
                match socket::connect(&path) {
                    Ok(socket) => {
                        met = true;
                        if let Some(sockets) =
                            self.listen_to_leader(socket, deadline, &mut missing)?
                        {
                            return Ok(sockets);
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
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Says hello and waits for the verdict; `None` if the connection ended without one.
    fn listen_to_leader(
        &self,
        socket: OwnedFd,
        deadline: Instant,
        missing: &mut u64,
    ) -> Result<Option<Vec<OwnedFd>>, BootstrapError> {
        if !same_user(socket.as_fd()).map_err(BootstrapError::io("asking for the leader's user"))? {
            return Err(BootstrapError::Protocol(format!(
                "the process that listens in rank {}'s place runs as another user",
                self.leader()
            )));
        }
        let link = Link::Unix(socket);
        match link.send(&[&self.hello().encode()], &[], deadline) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT) => return Ok(None),
            Err(errno) => {
                return Err(BootstrapError::io("saying hello to the first rank of this host")(
                    errno,
                ));
            }
        }
        let mut buffer = [0; REPLY_BYTES];
        loop {
            let received = link
                .await_message(&mut buffer, deadline)
                .map_err(BootstrapError::io("listening to the first rank of this host"))?;
            let message = match received {
                Received::Message(message) => message,
                Received::Nothing => {
                    // Tells all ranks now who is missing, if the leader still lives.
                    let _ = link.send(&[&GIVING_UP], &[], deadline);
                    return Ok(None);
                }
                Received::End => return Ok(None),
                Received::Oversized => {
                    return Err(BootstrapError::Protocol(
                        "an answer of the leader is too long".to_owned(),
                    ));
                }
            };
            if message.cut {
                return Err(BootstrapError::io(
                    "taking connections from the first rank of this host",
                )(Errno::MFILE));
            }
            let none = message.descriptors.is_empty();
            match Reply::decode(&buffer[..message.length]) {
                Some(Reply::Waiting { missing: now }) if none => *missing = now,
                Some(Reply::Refused(refusal)) if none => {
                    return Err(refusal.into_error(self.rank, self.world));
                }
                Some(Reply::Welcome { sockets })
                    if sockets as usize == self.group.len() - 1
                        && message.descriptors.len() == sockets as usize
                        && message
                            .descriptors
                            .iter()
                            .all(|socket| socket::is_ours(socket.as_fd())) =>
                {
                    return Ok(Some(message.descriptors));
                }
                reply => {
                    let count = message.descriptors.len();
                    return Err(BootstrapError::Protocol(format!(
                        "the leader answered {reply:?} with {count} descriptors"
                    )));
                }
            }
        }
    }
}
