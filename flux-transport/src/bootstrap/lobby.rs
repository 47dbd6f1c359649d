//! Rank 0's side of the rendezvous: who has come, who has not said who it is, and the verdict.
//!
//! Invariant: a stranger (a connection without a valid hello) costs one of [`STRANGERS`] places for at most [`PATIENCE`]; it can delay nobody
//! who speaks. A rank counts as present only while its connection stands. Once there is a verdict, everyone who comes hears it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::directory::Listener;
use super::error::BootstrapError;
use super::hello::{GIVING_UP, HELLO_BYTES, Hello, PROTOCOL, Refusal, Reply};
use super::socket::{self, Received};

/// Connections that have not said who they are, at a time; one more, and the oldest goes.
const STRANGERS: usize = 64;
/// How long such a connection may stay silent.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long ranks that have not come yet can still hear that the group does not form.
const LINGER: Duration = Duration::from_secs(5);
/// For one answer. A rank reads its answers at once; who does not is not waited for.
const ANSWER: Duration = Duration::from_millis(100);

struct Member {
    socket: OwnedFd,
    pid: u32,
}

struct Stranger {
    socket: OwnedFd,
    until: Instant,
}

struct Lobby {
    own: Hello,
    world: WorldSize,
    /// By rank; none for rank 0 itself.
    members: Vec<Option<Member>>,
    strangers: VecDeque<Stranger>,
    verdict: Option<Refusal>,
    /// Ranks (bits) that have heard the verdict.
    told: u64,
}

/// Waits for all ranks: rank 0's sockets to them, in rank order.
pub(super) fn gather(own: Hello, world: WorldSize, listener: &Listener, deadline: Instant) -> Result<Vec<OwnedFd>, BootstrapError> {
    let members = world.ranks().map(|_| None).collect();
    let mut lobby = Lobby { own, world, members, strangers: VecDeque::new(), verdict: None, told: 0 };
    let mut end = deadline;
    loop {
        lobby.sweep();
        if lobby.verdict.is_none() && lobby.missing() == 0 {
            return lobby.deal();
        }
        if lobby.verdict.is_none() && Instant::now() >= deadline {
            lobby.refuse(Refusal::Missing { ranks: lobby.missing() });
        }
        if let Some(refusal) = lobby.verdict {
            end = end.min(Instant::now() + LINGER);
            // Time is up for the missing, so nobody waits to tell them.
            if matches!(refusal, Refusal::Missing { .. }) || lobby.told == all(world) || Instant::now() >= end {
                return Err(refusal.into_error(Rank::new(0), world));
            }
        }
        lobby.round(listener.as_fd(), end)?;
    }
}

const fn all(world: WorldSize) -> u64 {
    (1 << world.get()) - 1
}

impl Lobby {
    /// Ranks (bits) that are not here.
    fn missing(&self) -> u64 {
        self.world.ranks().skip(1).filter(|rank| self.members[rank.index()].is_none()).fold(0, |mask, rank| mask | 1 << rank.get())
    }

    /// Waits for something to happen, and handles it.
    fn round(&mut self, listener: BorrowedFd<'_>, end: Instant) -> Result<(), BootstrapError> {
        let now = Instant::now();
        while self.strangers.front().is_some_and(|stranger| stranger.until <= now) {
            self.strangers.pop_front();
        }
        let until = self.strangers.front().map_or(end, |stranger| stranger.until.min(end));
        // Members only so that their end wakes this up: the sweep finds it.
        let members = self.members.iter().flatten().map(|member| &member.socket);
        let strangers = self.strangers.iter().map(|stranger| &stranger.socket);
        let mut watched: Vec<_> = strangers.map(socket::readable).collect();
        watched.push(PollFd::from_borrowed_fd(listener, PollFlags::IN));
        watched.extend(members.map(socket::readable));
        socket::wait(&mut watched, Some(until)).map_err(BootstrapError::io("waiting for ranks"))?;
        let mut ready = watched.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>().into_iter();
        // Those who spoke first, so that strangers that push in below cost them nothing.
        let (spoke, silent) = self.strangers.drain(..).partition::<VecDeque<_>, _>(|_| ready.next() == Some(true));
        self.strangers = silent;
        for stranger in spoke {
            self.hear(stranger);
        }
        if ready.next() == Some(true) {
            self.open_door(listener)?;
        }
        Ok(())
    }

    /// Finds who of the members is here no more. Asked before anything is concluded from who is here: a rank that died may come again before
    /// its end was noticed otherwise.
    fn sweep(&mut self) {
        let mut gone = false;
        for rank in 1..self.members.len() {
            let Some(member) = &self.members[rank] else { continue };
            let mut buffer = [0; GIVING_UP.len()];
            match socket::receive(member.socket.as_fd(), &mut buffer) {
                Ok(Received::Nothing) => {}
                Ok(Received::Message(_)) if buffer == GIVING_UP => {
                    self.refuse(Refusal::Missing { ranks: self.missing() });
                    return;
                }
                // It died, or it is no rank of ours: they have nothing else to say.
                _ => {
                    self.members[rank] = None;
                    gone = true;
                }
            }
        }
        if gone {
            self.tell_missing();
        }
    }

    /// Lets in who waits outside.
    fn open_door(&mut self, listener: BorrowedFd<'_>) -> Result<(), BootstrapError> {
        for _ in 0..STRANGERS {
            match socket::accept(listener) {
                Ok(socket) => {
                    if matches!(socket::same_user(socket.as_fd()), Ok(true)) {
                        self.hear(Stranger { socket, until: Instant::now() + PATIENCE });
                    } else {
                        tracing::warn!("a process of another user knocked at the rendezvous");
                    }
                }
                Err(Errno::WOULDBLOCK) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // No descriptors left: room comes from strangers; without any, the ranks themselves are too many.
                Err(Errno::MFILE | Errno::NFILE) if self.strangers.pop_front().is_some() => {}
                Err(errno) => {
                    self.refuse(Refusal::RankZero { errno: errno.raw_os_error().cast_unsigned() });
                    return Err(BootstrapError::io("accepting a rank's connection")(errno));
                }
            }
        }
        Ok(())
    }

    /// Reads a stranger's hello, if it is there.
    fn hear(&mut self, stranger: Stranger) {
        let mut buffer = [0; HELLO_BYTES];
        let message = match socket::receive(stranger.socket.as_fd(), &mut buffer) {
            Ok(Received::Message(message)) => message,
            Ok(Received::Nothing) => {
                if self.strangers.len() >= STRANGERS {
                    self.strangers.pop_front();
                }
                self.strangers.push_back(stranger);
                return;
            }
            Ok(Received::End | Received::Oversized) | Err(_) => return,
        };
        match Hello::decode(&buffer[..message.length]) {
            Some(hello) if message.descriptors.is_empty() => self.judge(hello, stranger.socket),
            _ => tracing::warn!("dropped a connection to the rendezvous that did not say hello"),
        }
    }

    fn judge(&mut self, hello: Hello, socket: OwnedFd) {
        let Hello { protocol, rank, world, pid, nonce, version } = hello;
        self.sweep();
        if let Some(refusal) = self.verdict {
            self.answer(&socket, Reply::Refused(refusal));
            self.mark_told(rank);
            return;
        }
        let present = if rank == 0 { Some(self.own.pid) } else { self.pid_of(rank) };
        let refusal = if protocol != PROTOCOL || version != self.own.version {
            Refusal::Version { rank, protocols: [protocol, PROTOCOL], version, expected: self.own.version }
        } else if nonce != self.own.nonce {
            // Not of this launch: its own affair.
            self.answer(&socket, Reply::Refused(Refusal::OtherLaunch));
            return;
        } else if world != self.world.get() {
            Refusal::World { rank, world, expected: self.world.get() }
        } else if rank >= self.world.get() {
            // No launcher makes this of a world of our size.
            return;
        } else if let Some(first) = present {
            Refusal::DuplicateRank { rank, first, second: pid }
        } else {
            self.members[rank as usize] = Some(Member { socket, pid });
            self.tell_missing();
            return;
        };
        self.answer(&socket, Reply::Refused(refusal));
        self.mark_told(rank);
        self.refuse(refusal);
    }

    fn pid_of(&self, rank: u32) -> Option<u32> {
        Some(self.members.get(rank as usize)?.as_ref()?.pid)
    }

    /// The verdict, for all who are here and for all who come.
    fn refuse(&mut self, refusal: Refusal) {
        self.verdict = Some(refusal);
        self.mark_told(0);
        for rank in 1..self.world.get() {
            if let Some(member) = self.members[rank as usize].take() {
                self.answer(&member.socket, Reply::Refused(refusal));
                self.mark_told(rank);
            }
        }
    }

    fn mark_told(&mut self, rank: u32) {
        if rank < self.world.get() {
            self.told |= 1 << rank;
        }
    }

    fn tell_missing(&self) {
        let missing = self.missing();
        if missing != 0 {
            self.members.iter().flatten().for_each(|member| self.answer(&member.socket, Reply::Waiting { missing }));
        }
    }

    /// Answers who may be gone by now: then its connection says so at the next round.
    #[expect(clippy::unused_self, reason = "reads as what the lobby does")]
    fn answer(&self, socket: &OwnedFd, reply: Reply) {
        if let Err(error) = socket::send(socket.as_fd(), &[&reply.encode()], &[], Instant::now() + ANSWER) {
            tracing::debug!(%error, "a rank did not hear its answer");
        }
    }

    /// Connects every two ranks and gives each its sockets. A rank that dies now is lost to the others when they first need it.
    fn deal(mut self) -> Result<Vec<OwnedFd>, BootstrapError> {
        let mut rows = match rows(self.world) {
            Ok(rows) => rows,
            Err(errno) => {
                self.refuse(Refusal::RankZero { errno: errno.raw_os_error().cast_unsigned() });
                return Err(BootstrapError::io("making the sockets between the ranks")(errno));
            }
        };
        let reply = Reply::Welcome { sockets: self.world.peers() }.encode();
        for (member, row) in self.members.iter().zip(&rows).filter_map(|(member, row)| Some((member.as_ref()?, row))) {
            let row: Vec<_> = row.iter().map(AsFd::as_fd).collect();
            if let Err(error) = socket::send(member.socket.as_fd(), &[&reply], &row, Instant::now() + ANSWER) {
                tracing::debug!(%error, "a rank left while the group formed");
            }
        }
        // The other rows close here: their ranks alone hold them from now on.
        Ok(rows.swap_remove(0))
    }
}

/// For each rank, its sockets to the others in rank order.
pub(super) fn rows(world: WorldSize) -> Result<Vec<Vec<OwnedFd>>, Errno> {
    let mut rows: Vec<Vec<OwnedFd>> = world.ranks().map(|_| Vec::new()).collect();
    for first in 0..world.index() {
        for second in first + 1..world.index() {
            let (a, b) = socket::pair()?;
            rows[first].push(a);
            rows[second].push(b);
        }
    }
    Ok(rows)
}
